# SPDX-License-Identifier: Apache-2.0
"""A model's name -> a ready executor: checkpoint, weights, memory and threads. The CPU's way, and the choice of ways.

A checkpoint whose architecture has a spec runs on our decoder (on a GPU in 16 bits on its own kernels, `cuda_load`);
any other one that transformers knows runs on transformers' modelling code over our attention.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mii_zmq import kernels
from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError
from mii_zmq.tokenizer import RANDOM_PREFIX, load_tokenizer
from mii_zmq.worker.executor import LoadedExecutor, Model, ModelExecutor
from mii_zmq.worker.kv_pool import BlockShape, KvPool, array_module
from mii_zmq.worker.memory_bill import MemoryBill
from mii_zmq.worker.models.decoder import Decoder
from mii_zmq.worker.models.demo_model import resolve_model
from mii_zmq.worker.models.hf_config import has_spec, load_model_config
from mii_zmq.worker.models.model_facts import ModelFacts
from mii_zmq.worker.models.random_vocabulary import keep_to, readable_ids
from mii_zmq.worker.models.random_weights import random_weights, shape_config
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.weights import load_weights
from mii_zmq.worker.parallel import Collectives, RankInfo
from mii_zmq.worker.plan import EngineLimits
from mii_zmq.worker.sampler import Sampler

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

GIB = 2**30
CPU_KV_BYTES = 4 * 10**9
CPU_TOKEN_BUDGET = 512
GPU_TOKEN_BUDGET = 2048


@dataclass(frozen=True)
class _Loaded:
    """A model on the way to its executor."""

    model: Model
    facts: ModelFacts
    dtype: torch.dtype
    weight_bytes: int
    num_kv_heads: int
    """That this rank holds."""
    hidden_size: int
    """Of the final hidden states; 0: the model does not give them."""
    rope_border: int | None = None
    recomputes_at_border: bool = False


def load_executor(
    config: EngineConfig,
    progress: Progress | None = None,
    rank: RankInfo | None = None,
    collectives: Collectives | None = None,
) -> LoadedExecutor:
    """Load this rank's part of the model that `config` names and size everything around it.

    A model called `random:SHAPE` has a published shape (`random_weights.SHAPES`) and random weights: for measurements.
    With a tokenizer it says nothing but tokens that are text by themselves.

    Raises:
        StartupError: the checkpoint, a setting or the memory does not allow it; the message is for the operator.
    """
    say: Progress = progress or (lambda text, share: None)
    rank = rank or RankInfo()
    num_threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // rank.world_size)
    torch.set_num_threads(num_threads)
    device = _device(config, rank)
    if device.type == "cuda":
        # Kernels go to the thread's current device.
        torch.cuda.set_device(device)
    shape = config.model.removeprefix(RANDOM_PREFIX) if config.model.startswith(RANDOM_PREFIX) else None
    directory = Path(shape or resolve_model(config.model, lambda text: say(text, 0.0)))
    if shape is None and not has_spec(directory):
        loaded = _load_fallback(config, directory, device, say, rank)
        return _make_executor(config, directory, loaded, device, num_threads, say, rank, None)
    model_config = load_model_config(directory) if shape is None else shape_config(shape)
    facts = ModelFacts.of(model_config)
    dtype = _dtype(config, facts, device)
    has_kernels = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    _check_deterministic(config, has_kernels, dtype, device)
    max_model_len = _max_model_len(config, facts)
    shard = Shard.of(model_config, rank)
    if shape is None:
        weights = load_weights(directory, model_config, dtype, device, rank, progress)
    else:
        weights = random_weights(model_config, dtype, device, shard=shard)
        if config.tokenizer is not None:
            keep_to(weights, shard, readable_ids(load_tokenizer(config.tokenizer), model_config.vocab_size))
    if has_kernels:
        # Triton and CuPy are there only where a GPU is.
        from mii_zmq.worker.cuda_load import build_cuda_executor

        return build_cuda_executor(
            config, model_config, weights, max_model_len, say, rank=rank, collectives=collectives
        )
    say("preparing weights", 0.0)
    decoder = Decoder(model_config, weights, kernels.for_device(device), device, dtype, shard, collectives)
    loaded = _Loaded(
        decoder, facts, dtype, decoder.weight_bytes, shard.num_kv_heads, model_config.state_size,
        model_config.rope_border, model_config.recomputes_at_border,
    )  # fmt: skip
    return _make_executor(config, directory, loaded, device, num_threads, say, rank, collectives)


def _load_fallback(
    config: EngineConfig, directory: Path, device: torch.device, say: Progress, rank: RankInfo
) -> _Loaded:
    if rank.world_size > 1:
        raise ConfigError(
            f"tensor_parallel is {rank.world_size}, but {directory.name} runs on transformers' modelling code, which "
            "is not sharded here; use 1, and replicas for more capacity"
        )
    # Transformers' modelling code takes seconds to import, and most models do without.
    from mii_zmq.worker.models.fallback import load_fallback
    from mii_zmq.worker.models.fallback_config import fallback_facts

    dtype = _dtype(config, fallback_facts(directory), device)
    _check_deterministic(config, False, dtype, device)
    model, facts = load_fallback(directory, dtype, device, kernels.for_device(device), say)
    return _Loaded(model, facts, dtype, model.weight_bytes, facts.num_kv_heads, model.state_size)


def _make_executor(
    config: EngineConfig,
    directory: Path,
    loaded: _Loaded,
    device: torch.device,
    num_threads: int,
    say: Progress,
    rank: RankInfo,
    collectives: Collectives | None,
) -> ModelExecutor:
    facts = loaded.facts
    max_model_len = _max_model_len(config, facts)
    block = BlockShape(facts.num_layers, loaded.num_kv_heads, config.block_size, facts.head_dim, loaded.dtype)
    available = available_memory()
    num_blocks = _num_blocks(config, block, max_model_len, device, rank)
    if collectives is not None:
        num_blocks = collectives.agree(num_blocks)
    say("reserving the KV pool", 0.0)
    pool = KvPool(array_module(device), block, num_blocks)
    bill = MemoryBill(loaded.weight_bytes, pool.num_bytes, num_blocks, num_blocks * config.block_size)
    logger.info(
        "%s: %s, %s on %s, %d threads; %s; %.2f GiB were left for the pool",
        directory.name, facts.family, loaded.dtype, device, num_threads, bill, available / GIB,
    )  # fmt: skip
    limits = EngineLimits(
        vocab_size=facts.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_sequences=config.max_sequences,
        token_budget=config.token_budget or (GPU_TOKEN_BUDGET if device.type == "cuda" else CPU_TOKEN_BUDGET),
        eos_token_ids=facts.eos_token_ids,
        scores_prompts=True,
        hidden_size=loaded.hidden_size,
        rope_border=loaded.rope_border,
        recomputes_at_border=loaded.recomputes_at_border,
    )
    sampler = Sampler(config.max_sequences, facts.vocab_size, device)
    say("ready", 1.0)
    return ModelExecutor(loaded.model, pool, sampler, limits, bill, num_threads)


def _check_deterministic(config: EngineConfig, has_kernels: bool, dtype: torch.dtype, device: torch.device) -> None:
    if config.deterministic and not has_kernels:
        raise ConfigError(
            f"deterministic is set, but in {_name(dtype)} on {device.type} results depend on the batch; only the "
            "engine for GPUs in bfloat16 or float16 can do without: use --device cuda, or leave --deterministic out"
        )


def available_memory() -> int:
    """Bytes that this process can still take: the machine's, or its control group's where that is less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _read_lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read_lines("/sys/fs/cgroup/memory.max"), _read_lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdecimal():
        available = min(available, max(0, int(limit[0]) - int(used[0])))
    return available


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").split("\n")
    except OSError:
        return []


def _device(config: EngineConfig, rank: RankInfo) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        index, num_devices = config.device_index + rank.rank, torch.cuda.device_count()
        if index >= num_devices:
            raise ConfigError(f"GPU {index} is asked for, but {num_devices} are visible; use a smaller --device-index")
        return torch.device("cuda", index)
    if config.device == "cuda":
        raise ConfigError("device is cuda, but torch finds no NVIDIA GPU here; use --device cpu")
    return torch.device("cpu")


def describe_device(config: EngineConfig) -> str:
    """For STATUS: "cpu", or number and name of the group's first GPU."""
    device = _device(config, RankInfo())
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def _dtype(config: EngineConfig, facts: ModelFacts, device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else facts.dtype  # type: ignore[assignment]
    dtypes: dict[str, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[name]  # type: ignore[no-any-return]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_model_len(config: EngineConfig, facts: ModelFacts) -> int:
    context = facts.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model's context is {context} tokens")
    return config.max_model_len or context


def _num_blocks(
    config: EngineConfig, block: BlockShape, max_model_len: int, device: torch.device, rank: RankInfo
) -> int:
    """As many blocks as asked for, or as the memory allows and the slots can ever use."""
    if config.num_blocks is not None:
        return config.num_blocks
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - total * (1 - config.gpu_memory_fraction))
    else:
        budget = min(CPU_KV_BYTES, available_memory() // 2) // rank.world_size
    if config.kv_cache_gb is not None:
        budget = int(config.kv_cache_gb * 10**9)
    useful = config.max_sequences * -(-max_model_len // config.block_size)
    num_blocks = min(budget // block.num_bytes, useful)
    if num_blocks < 1:
        raise ConfigError(
            f"the KV pool gets {budget / GIB:.2f} GiB, but one block takes {block.num_bytes / GIB:.2f} GiB; "
            "give more with --kv-cache-gb, or use a smaller --block-size"
        )
    return num_blocks
