# SPDX-License-Identifier: Apache-2.0
"""A model on transformers' own modelling code with our paged attention: what families without a spec run on.

All tokens of a step go through transformers' forward as one batch row; its attention calls are answered from the KV
pool. A model is only handed out after it has computed the same logits that way, in a ragged batch of prompt chunks and
decodes, as with transformers' own attention one sequence at a time: a family that mixes tokens anywhere else, or
attends in a way that the interface does not show, is refused and never served wrong. One rank only.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mii_zmq.errors import InternalError, ModelUnsupported
from mii_zmq.kernels import Attention, AttentionShape, CellMapping, KvLayer, OpTable, RaggedLayout
from mii_zmq.worker.models.decoder import ForwardBatch
from mii_zmq.worker.models.fallback_attention import EAGER, PAGED, AttentionCall, answering
from mii_zmq.worker.models.fallback_config import read_fallback_config
from mii_zmq.worker.models.fallback_probe import NUM_PROBE_TOKENS, LayerShape, Probe
from mii_zmq.worker.models.fallback_weights import build_model
from mii_zmq.worker.models.model_facts import ModelFacts
from mii_zmq.worker.models.transformers_log import quiet

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""(what is being done, share of it that is done from 0 to 1)."""

_BLOCK_SIZE = 16
_LENGTHS = (23, 9)
_STEPS = (((0, 13),), ((0, 5), (1, 7)), ((0, 1), (1, 1)), ((1, 1), (0, 4)))
"""Of the comparison: (sequence, tokens) of each step."""
_TOLERANCES = {torch.float32: (1e-3, 0.0), torch.bfloat16: (0.1, 0.25), torch.float16: (0.05, 0.25)}
"""Largest difference of logits, relative to the largest logit, and the share of positions that may exceed it: in 16
bits a router may choose another expert."""


class FallbackModel:
    """Implements the executor's `Model`. Used by one thread at a time."""

    def __init__(
        self, model: Any, layers: dict[nn.Module, LayerShape], ops: OpTable, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.weight_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}.values())
        self._model = model
        self._write_kv = ops.write_kv
        self._dtype = dtype
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._head = model.get_output_embeddings()
        weight = getattr(self._head, "weight", None)
        self.state_size = weight.shape[1] if isinstance(weight, Tensor) and weight.dim() == 2 else 0
        """Of the final hidden states, which the head reads; 0: the model shows no head."""
        made: dict[tuple[float, float], Attention] = {}
        for layer in layers.values():
            if (layer.scale, layer.softcap) not in made:
                made[layer.scale, layer.softcap] = ops.attention(_attention_shape(layer, device, dtype))
        self._layers = {
            module: (index, made[layer.scale, layer.softcap], layer)
            for index, (module, layer) in enumerate(layers.items())
        }

    def forward_hidden(self, batch: ForwardBatch, kv_layers: Sequence[KvLayer]) -> tuple[Tensor | None, Tensor | None]:
        """As `forward`, with the wanted final hidden states [H, D], which are what the head is given."""
        if batch.hidden_rows is None:
            return self.forward(batch, kv_layers), None
        logit_rows = batch.positions.new_zeros(0) if batch.logit_rows is None else batch.logit_rows
        wanted, num_logits = torch.cat([logit_rows, batch.hidden_rows]), len(logit_rows)
        found: list[Tensor] = []

        def take(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            states = inputs[0][0] if self._keeps_rows else inputs[0][0].index_select(0, wanted)
            found.append(states)
            # There is no way around the head, but on fewer rows.
            return (states[: max(1, num_logits)].unsqueeze(0), *inputs[1:])

        hook = self._head.register_forward_pre_hook(take)
        try:
            logits = self._run(batch, kv_layers, wanted)
        finally:
            hook.remove()
        if len(found) != 1:
            raise InternalError(f"the model ran its head {len(found)} times in a step, so its input is not known")
        return logits[:num_logits] if num_logits else None, found[0][num_logits:]

    def forward(self, batch: ForwardBatch, kv_layers: Sequence[KvLayer]) -> Tensor | None:
        """Write this step's keys and values, return the wanted logits [R, V] (None if none are wanted)."""
        rows = batch.logit_rows
        # There is no way around the head: where nothing is wanted it runs on one row.
        logits = self._run(batch, kv_layers, batch.positions.new_zeros(1) if rows is None else rows)
        if rows is None:
            return None
        return logits if self._keeps_rows else logits.index_select(0, rows)

    def _run(self, batch: ForwardBatch, kv_layers: Sequence[KvLayer], rows: Tensor) -> Tensor:
        """Logits of these rows, or of all where the model cannot choose."""
        options: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_rows else {}
        with answering(_PagedStep(self._layers, self._write_kv, self._dtype, batch, kv_layers)):
            return run_model(self._model, batch.token_ids, batch.positions, **options)


class _PagedStep:
    """Answers the attention calls of one step from the KV pool."""

    def __init__(
        self,
        layers: dict[nn.Module, tuple[int, Attention, LayerShape]],
        write_kv: Callable[[Tensor, KvLayer, CellMapping], None],
        dtype: torch.dtype,
        batch: ForwardBatch,
        kv_layers: Sequence[KvLayer],
    ) -> None:
        self._layers, self._write_kv, self._dtype = layers, write_kv, dtype
        self._batch, self._kv_layers = batch, kv_layers
        self._plans: dict[tuple[int, int | None], Any] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        index, attention, layer = self._layers[call.module]
        if call.scale is not None and call.scale != layer.scale:
            raise InternalError(f"layer {index} scales its scores by {call.scale}, by {layer.scale} when it was loaded")
        plan_key = (id(attention), layer.window)
        if plan_key not in self._plans:
            self._plans[plan_key] = attention.plan(self._batch.layout, layer.window)
        qkv = torch.cat([heads[0].transpose(0, 1) for heads in (call.query, call.key, call.value)], 1).to(self._dtype)
        kv = self._kv_layers[index]
        self._write_kv(qkv, kv, self._batch.mapping)
        attended = attention(qkv, kv, self._plans[plan_key])
        return attended.view(1, -1, layer.num_heads, layer.head_dim).to(call.query.dtype)

    def mask(self, visible: Callable[..., Any], num_tokens: int, like: dict[str, Any]) -> Tensor:
        raise InternalError("no masks are built with paged attention")


def load_fallback(
    directory: Path, dtype: torch.dtype, device: torch.device, ops: OpTable, progress: Progress | None = None
) -> tuple[FallbackModel, ModelFacts]:
    """Load a checkpoint onto transformers' modelling code and check that it can be served that way.

    Raises:
        CheckpointError: files or tensors are missing, malformed, unknown or refused.
        ModelUnsupported: transformers does not know the family, or it cannot run with paged attention.
    """
    say: Progress = progress or (lambda text, share: None)
    found = read_fallback_config(directory)
    model = build_model(directory, found, dtype, device, say)
    say("checking the model", 0.0)
    try:
        with quiet(), torch.inference_mode():
            return _check_model(model, found.facts, dtype, device, ops)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        message = " ".join(str(error).split())[:300]
        raise ModelUnsupported(
            f"the {found.facts.family} model cannot run on a flattened batch: {type(error).__name__}: {message}"
        ) from error


def _check_model(
    model: Any, facts: ModelFacts, dtype: torch.dtype, device: torch.device, ops: OpTable
) -> tuple[FallbackModel, ModelFacts]:
    """Find the layers' shapes, then compare paged attention with transformers' own."""
    probe = Probe(facts.family, facts.max_position_embeddings)
    token_ids = _token_ids(NUM_PROBE_TOKENS, facts.vocab_size, device)
    with answering(probe):
        vocab_size = run_model(model, token_ids, torch.arange(len(token_ids), device=device)).shape[-1]
    if not probe.layers:
        raise ModelUnsupported(f"the {facts.family} model never calls transformers' attention interface")
    layer = next(iter(probe.layers.values()))
    facts = replace(
        facts,
        vocab_size=vocab_size,
        num_layers=len(probe.layers),
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
    )
    model.set_attn_implementation(EAGER)
    sequences = [_token_ids(length, facts.vocab_size, device, seed) for seed, length in enumerate(_LENGTHS)]
    expected = [run_model(model, ids) for ids in sequences]
    model.set_attn_implementation(PAGED)
    fallback = FallbackModel(model, probe.layers, ops, device, dtype)
    _check_paged(fallback, facts, sequences, expected, dtype)
    if fallback.state_size and not _gives_states(fallback, facts, sequences[0], dtype):
        logger.warning("%s does not show what its head reads, so there are no embeddings of it", facts.family)
        fallback.state_size = 0
    windows = sorted({layer.window for layer in probe.layers.values() if layer.window is not None})
    logger.info(
        "%s runs on transformers' modelling code with paged attention%s",
        facts.family, f", windows of {', '.join(map(str, windows))} tokens" if windows else "",
    )  # fmt: skip
    return fallback, facts


def run_model(model: Any, token_ids: Tensor, positions: Tensor | None = None, **options: Any) -> Tensor:
    """One forward pass over a flattened batch: logits [T or fewer, V]. Without positions the model counts by itself."""
    output = model(
        input_ids=token_ids.long().unsqueeze(0),
        position_ids=None if positions is None else positions.unsqueeze(0),
        use_cache=False,
        return_dict=True,
        **options,
    )
    logits: Tensor = output.logits[0]
    return logits


def _attention_shape(layer: LayerShape, device: torch.device, dtype: torch.dtype) -> AttentionShape:
    return AttentionShape(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        scale=layer.scale,
        tiles_per_block=2 * layer.num_kv_heads,
        dtype=dtype,
        device=device,
        softcap=layer.softcap,
    )


def _token_ids(length: int, vocab_size: int, device: torch.device, seed: int = 0) -> Tensor:
    # Spread over the vocabulary, the same in every process.
    return (torch.arange(1, length + 1, device=device) * 7919 + seed * 104729) % vocab_size


def _check_paged(
    model: FallbackModel, facts: ModelFacts, sequences: list[Tensor], expected: list[Tensor], dtype: torch.dtype
) -> None:
    """Run both sequences in ragged chunks and compare every position's logits with `expected`."""
    device = sequences[0].device
    shape = (4, 2, facts.num_kv_heads, _BLOCK_SIZE, facts.head_dim)
    kv_layers = [KvLayer(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(facts.num_layers)]
    block_tables = np.array([[2, 1], [3, 0]], dtype=np.int64)
    ends = [0] * len(sequences)
    found: list[list[Tensor]] = [[] for _ in sequences]
    for step in _STEPS:
        rows = [row for row, _ in step]
        starts = [ends[row] for row in rows]
        for row, count in step:
            ends[row] += count
        batch = _make_batch(sequences, block_tables, rows, starts, [ends[row] for row in rows])
        logits = model.forward(batch, kv_layers)
        assert logits is not None
        for row, part in zip(rows, logits.split([count for _, count in step]), strict=True):
            found[row].append(part)
    actual, reference = torch.cat([torch.cat(parts) for parts in found]).float(), torch.cat(expected).float()
    differences = (actual - reference).abs().amax(-1) / reference.abs().max()
    tolerance, share = _TOLERANCES[dtype]
    # A comparison with NaN is false, so not-a-number is refused too.
    if not float((differences <= tolerance).float().mean()) >= 1 - share:
        raise ModelUnsupported(
            f"the {facts.family} model computes something else with paged attention than with transformers' own "
            f"(logits differ by up to {float(differences.max()):.1e} of the largest one): its tokens meet outside of "
            "attention, or its attention is of an unknown kind"
        )


def _gives_states(model: FallbackModel, facts: ModelFacts, tokens: Tensor, dtype: torch.dtype) -> bool:
    """Whether the head can be made to show its input, without its output being another one."""
    shape = (3, 2, facts.num_kv_heads, _BLOCK_SIZE, facts.head_dim)
    kv_layers = [KvLayer(torch.zeros(shape, dtype=dtype, device=tokens.device)) for _ in range(facts.num_layers)]
    batch = _make_batch([tokens], np.array([[2, 1]], dtype=np.int64), [0], [0], [len(tokens)])
    rows = batch.positions[-2:]
    try:
        alone = model.forward(replace(batch, logit_rows=rows), kv_layers)
        logits, states = model.forward_hidden(replace(batch, logit_rows=rows, hidden_rows=batch.positions), kv_layers)
    except (InternalError, RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        logger.info("the head's input could not be read: %s: %s", type(error).__name__, error)
        return False
    if alone is None or logits is None or states is None:
        return False
    tolerance, _ = _TOLERANCES[dtype]
    is_alike = (logits - alone).abs().max() <= tolerance * alone.abs().max()
    return states.shape == (len(tokens), model.state_size) and bool(is_alike)


def _make_batch(
    sequences: list[Tensor], block_tables: np.ndarray, rows: list[int], starts: list[int], ends: list[int]
) -> ForwardBatch:
    device = sequences[0].device
    spans = list(zip(rows, starts, ends, strict=True))
    positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
    owners = np.repeat(rows, [end - start for _, start, end in spans])
    block_ids = block_tables[owners, positions // _BLOCK_SIZE]
    query_start_loc = np.cumsum([0, *(end - start for _, start, end in spans)])
    return ForwardBatch(
        token_ids=torch.cat([sequences[row][start:end] for row, start, end in spans]),
        positions=torch.from_numpy(positions).to(device),
        mapping=CellMapping(
            torch.from_numpy(block_ids).to(device), torch.from_numpy(positions % _BLOCK_SIZE).to(device)
        ),
        layout=RaggedLayout(query_start_loc, np.array(ends, dtype=np.int64), block_tables[rows], _BLOCK_SIZE),
        logit_rows=torch.arange(len(positions), device=device),
    )
