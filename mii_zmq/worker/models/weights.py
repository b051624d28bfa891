# SPDX-License-Identifier: Apache-2.0
"""Checkpoint -> fused weights of one rank: strict, streamed, one tensor at a time.

All names and shapes are compared with what the config implies before any memory is taken: a missing, unknown,
misshapen or doubled tensor is an error, never a guess. Then the files are read one by one; values go from the mapped
file to their place in one copy, converted on the way. Knows nothing of formats, and nothing of how the decoder
computes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from mii_zmq.errors import CheckpointError, ConfigError, ModelUnsupported
from mii_zmq.worker.models.claim_table import ClaimTable
from mii_zmq.worker.models.claims import Claim
from mii_zmq.worker.models.gguf_source import GgufSource, find_gguf
from mii_zmq.worker.models.model_weights import DecoderWeights
from mii_zmq.worker.models.safetensors_source import SafetensorsSource
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.spec import ModelConfig
from mii_zmq.worker.models.tensor_source import StoredTensor, TensorSource
from mii_zmq.worker.parallel import RankInfo

Progress = Callable[[str, float], None]
"""(what is being done, share of it that is done from 0 to 1)."""

HUGE_PAGE = 2 * 2**20
PROGRESS_STEP = 1 / 200
GIB = 2**30


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    rank: RankInfo | None = None,
    progress: Progress | None = None,
) -> DecoderWeights:
    """Read this rank's part of every tensor, converted to `dtype`.

    Raises:
        CheckpointError: a file or tensor is missing, malformed, unknown or has the wrong shape.
        ModelUnsupported: tensors of a dtype that is not read, or heads that so many ranks cannot share.
        ConfigError: the weights do not fit into memory.
    """
    shard = Shard.of(config, rank or RankInfo())
    gguf = find_gguf(directory)
    source: TensorSource = GgufSource(gguf, config) if gguf is not None else SafetensorsSource(directory)
    stored = source.tensors()
    _check_counts(config, stored)
    keys = _match(directory, _outline(config, shard, dtype), stored)
    table = allocate_weights(config, shard, dtype, device)
    _fill(source, stored, keys, table.claims, progress)
    return table.weights


def _check_counts(config: ModelConfig, stored: list[StoredTensor]) -> None:
    """Refuse numbers so far from the files that even listing the needed tensors would take forever."""
    if config.num_layers > len(stored):
        raise CheckpointError(
            f"config.json says {config.num_layers} layers, but the checkpoint holds only {len(stored)} tensors"
        )
    num_bytes = sum(tensor.num_bytes for tensor in stored)
    # Its router alone takes this many numbers, of at least half a byte.
    if config.moe is not None and config.moe.num_experts * config.hidden_size > 2 * num_bytes:
        raise CheckpointError(
            f"config.json says {config.moe.num_experts} experts, but the checkpoint holds only {num_bytes} bytes"
        )


def _outline(config: ModelConfig, shard: Shard, dtype: torch.dtype) -> ClaimTable:
    try:
        return ClaimTable(config, shard, dtype, lambda shape, kind: torch.empty(shape, dtype=kind, device="meta"))
    except (RuntimeError, OverflowError):
        raise CheckpointError("config.json implies tensors of impossible sizes") from None


def _match(directory: Path, table: ClaimTable, stored: list[StoredTensor]) -> dict[str, str]:
    """The claim that each tensor fills, by its name in the checkpoint; derived ones are left out."""
    prefix = table.find_prefix(tensor.name for tensor in stored)
    origin: dict[str, Path] = {}
    filled: dict[str, str] = {}
    keys: dict[str, str] = {}
    for tensor in stored:
        if tensor.name in origin:
            raise CheckpointError(f"{tensor.file.name} holds {tensor.name}, which {origin[tensor.name].name} holds too")
        origin[tensor.name] = tensor.file
        key = _resolve(table, tensor.name, prefix)
        if key is None:
            continue
        claim = table.claims[key]
        if tensor.refusal:
            raise ModelUnsupported(f"{tensor.file.name}: {tensor.name} {tensor.refusal}")
        _check_shape(tensor, claim)
        for needed in claim.fills:
            if needed in filled:
                raise CheckpointError(f"the checkpoint holds {tensor.name} and {filled[needed]}, which are the same")
            filled[needed] = tensor.name
        keys[tensor.name] = key
    if missing := sorted(table.needed() - filled.keys()):
        raise CheckpointError(f"{directory} lacks {len(missing)} tensors, e.g. {', '.join(missing[:3])}")
    return keys


def _resolve(table: ClaimTable, name: str, prefix: str | None) -> str | None:
    """The key of the claim; None for a tensor that is derived from others or that text does not need."""
    spec = table.config.spec
    if name.endswith(spec.ignored_tensors or ("\0",)) or name.startswith(spec.ignored_prefixes or ("\0",)):
        return None
    if table.is_head(name):
        # A tied head is sometimes stored a second time; the embedding is what the model uses.
        if name in table.claims:
            return name
        if table.config.tie_word_embeddings:
            return None
    key = name.removeprefix(prefix or "")
    if prefix is None or not name.startswith(prefix) or key not in table.claims:
        raise CheckpointError(
            f"the checkpoint holds {name}, which the {spec.family} family with this config.json does not have; it "
            "would be left out silently"
        )
    return key


def _check_shape(tensor: StoredTensor, claim: Claim) -> None:
    if tensor.shape == claim.shape:
        return
    if claim.is_vocabulary and len(tensor.shape) == len(claim.shape) and tensor.shape[1:] == claim.shape[1:]:
        raise CheckpointError(
            f"{tensor.file.name}: {tensor.name} has {tensor.shape[0]} rows, one for each token, but config.json says "
            f"vocab_size = {claim.shape[0]}; correct the one that is wrong (tokens that were added need both)"
        )
    raise CheckpointError(
        f"{tensor.file.name}: {tensor.name} has the shape {list(tensor.shape)}, but config.json implies "
        f"{list(claim.shape)}"
    )


def allocate_weights(config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> ClaimTable:
    """Memory for one rank's weights, nothing in it yet; raises ConfigError: there is not enough."""

    def allocate(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        if device.type == "cpu" and math.prod(shape) * kind.itemsize >= HUGE_PAGE:
            return _huge_pages(shape, kind)
        return torch.empty(shape, dtype=kind, device=device)

    try:
        return ClaimTable(config, shard, dtype, allocate)
    except (RuntimeError, OSError, MemoryError):
        outline = _outline(config, shard, dtype).weights
        raise ConfigError(
            f"the weights of this rank take {outline.num_bytes / GIB:.1f} GiB, which {device} does not have; use a "
            "16-bit --dtype or a larger --tensor-parallel"
        ) from None


def _huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory whose first touch costs a page fault per 2 MiB: in pages of 4 KiB that takes longer than the reading."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # A kernel without them; small pages are slower, nothing else.
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _fill(
    source: TensorSource,
    stored: list[StoredTensor],
    keys: dict[str, str],
    claims: dict[str, Claim],
    progress: Progress | None,
) -> None:
    total = sum(tensor.num_bytes for tensor in stored) or 1
    done, said = 0, 0.0
    for file, tensors in groupby(stored, key=lambda tensor: tensor.file):
        with source.open(file) as read:
            for tensor in tensors:
                if tensor.name in keys:
                    for part in claims[keys[tensor.name]].parts:
                        part.fill(read(tensor.name, part.index))
                done += tensor.num_bytes
                if progress is not None and done < total and done / total - said >= PROGRESS_STEP:
                    said = done / total
                    progress("loading weights", said)
    if progress is not None:
        progress("loading weights", 1.0)
