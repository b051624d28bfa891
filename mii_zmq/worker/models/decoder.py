# SPDX-License-Identifier: Apache-2.0
"""The one decoder: config + weights + op table -> logits of a ragged batch. All families run through `forward`.

Knows nothing of sequences, plans or sampling. Logits are computed only for the rows asked for, and so is the last
layer's MLP. With several ranks each holds a `Shard` and all of them return the same whole logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mii_zmq.errors import InternalError
from mii_zmq.kernels import AttentionShape, CellMapping, KvLayer, OpTable, RaggedLayout
from mii_zmq.worker.models.layers import DecoderLayer, LayerPlace, StepContext, make_norm
from mii_zmq.worker.models.model_weights import Affine, DecoderWeights
from mii_zmq.worker.models.rotary import inverse_frequencies, length_frequencies
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.spec import ModelConfig
from mii_zmq.worker.parallel import Collectives, RankInfo


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step, flattened, and where they belong."""

    token_ids: Tensor
    """[T] int32 or int64."""
    positions: Tensor
    """[T] int64."""
    mapping: CellMapping
    layout: RaggedLayout
    logit_rows: Tensor | None
    """[R] int64: tokens whose logits are wanted; None: of none."""
    hidden_rows: Tensor | None = None
    """[H] int64: tokens whose final hidden states are wanted; None: of none."""
    rope_lengths: Tensor | None = None
    """[T] int64: the sequence length that decides each token's rotary scaling, for models with a `rope_border`."""


class Decoder:
    """A loaded model. `weights` may be consumed: linears can keep packed copies instead."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        ops: OpTable,
        device: torch.device,
        dtype: torch.dtype,
        shard: Shard | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        shard = shard or Shard.of(config, RankInfo())
        self.config = config
        self.weight_bytes = weights.num_bytes
        """Without the second copy of a tied embedding that a packed head keeps."""
        self._ops = ops
        self._collectives = collectives
        self._vocab_sizes = [
            _size(RankInfo(rank, shard.rank.world_size), config) for rank in range(shard.rank.world_size)
        ]
        self._embed = weights.embed
        self._positions = weights.positions
        self._embed_scale = embedding_scale(config, dtype)
        width = config.embed_dim or config.hidden_size
        self._embed_norm = make_norm(config, weights.embed_norm, ops, width)
        self._project_in = None if weights.project_in is None else ops.linear(weights.project_in, None)
        self._project_out = None if weights.project_out is None else ops.linear(weights.project_out, None)
        self._windows = list(dict.fromkeys(config.windows))
        self._ropes = list(dict.fromkeys(config.ropes))
        self._frequencies = [
            None if rope is None or rope.border is not None else inverse_frequencies(rope).to(device)
            for rope in self._ropes
        ]
        attention = ops.attention(attention_shape(config, shard, device, dtype))
        self._attention = attention
        self._final_norm = make_norm(config, weights.final_norm, ops)
        # A tied head's rows of this rank are a view of the embedding.
        head = weights.head or Affine(weights.embed[slice(*shard.vocab)])
        self._head = ops.linear(head.weight, head.bias)
        weights.head = None
        self._layers: list[DecoderLayer] = []
        for window, rope in zip(config.windows, config.ropes, strict=True):
            # Popping frees each layer's own copy as soon as it is packed.
            layer = weights.layers.pop(0)
            place = LayerPlace(self._windows.index(window), self._ropes.index(rope))
            self._layers.append(DecoderLayer(config, layer, ops, attention, place, shard, collectives))

    def forward(self, batch: ForwardBatch, kv_layers: Sequence[KvLayer]) -> Tensor | None:
        """Write this step's keys and values, return the wanted logits [R, V] (None if none are wanted)."""
        return self.forward_hidden(batch, kv_layers)[0]

    def forward_hidden(self, batch: ForwardBatch, kv_layers: Sequence[KvLayer]) -> tuple[Tensor | None, Tensor | None]:
        """As `forward`, with the wanted final hidden states [H, D], which are what the head reads."""
        step = StepContext(
            mapping=batch.mapping,
            rotary=[self._rotary_table(index, batch) for index in range(len(self._ropes))],
            plans=[self._attention.plan(batch.layout, window) for window in self._windows],
        )
        x = self._embed_tokens(batch)
        delta: Tensor | None = None
        for layer, kv in zip(self._layers[:-1], kv_layers[:-1], strict=True):
            delta = layer.finish(x, layer.attend(x, delta, step, kv))
        last = self._layers[-1]
        attended = last.attend(x, delta, step, kv_layers[-1])
        wanted = [rows for rows in (batch.logit_rows, batch.hidden_rows) if rows is not None]
        if not wanted:
            return None, None
        rows = wanted[0] if len(wanted) == 1 else torch.cat(wanted)
        x, attended = x.index_select(0, rows), attended.rows(rows)
        states = self._final_states(x, last.finish(x, attended))
        if batch.hidden_rows is None:
            return self._logits(states), None
        num_logits = 0 if batch.logit_rows is None else len(batch.logit_rows)
        return self._logits(states[:num_logits]) if num_logits else None, states[num_logits:]

    def _embed_tokens(self, batch: ForwardBatch) -> Tensor:
        x = functional.embedding(batch.token_ids, self._embed)
        if self._embed_scale != 1.0:
            x.mul_(self._embed_scale)
        if self._project_in is not None:
            x = self._project_in(x)
        if self._positions is not None:
            x += functional.embedding(batch.positions + self.config.spec.position_offset, self._positions)
        return x if self._embed_norm is None else self._embed_norm(x)

    def _rotary_table(self, index: int, batch: ForwardBatch) -> Tensor | None:
        rope, frequencies = self._ropes[index], self._frequencies[index]
        if rope is None:
            return None
        if frequencies is None:
            if batch.rope_lengths is None:
                raise InternalError(f"rotary scaling of kind {rope.kind} needs the batch's rope_lengths")
            frequencies = length_frequencies(rope, batch.rope_lengths)
        table = self._ops.rotary_table(batch.positions, frequencies)
        return table if rope.attention_factor == 1.0 else table * rope.attention_factor

    def _final_states(self, x: Tensor, delta: Tensor | None) -> Tensor:
        if self._final_norm is not None:
            x = self._final_norm(x, delta)
        elif delta is not None:
            x.add_(delta)
        return x if self._project_out is None else self._project_out(x)

    def _logits(self, states: Tensor) -> Tensor:
        logits = self._head(states)
        if self._collectives is not None:
            logits = self._collectives.gather(logits, self._vocab_sizes)
        cap = self.config.logit_softcap
        return logits if not cap else logits.div_(cap).tanh_().mul_(cap)


def alibi_slopes(num_heads: int) -> Tensor:
    """[Hq] float32: a geometric sequence; the heads beyond a power of two take every other one of the next (Press)."""

    def powers(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]

    whole = 2 ** int(math.log2(num_heads))
    return torch.tensor(powers(whole) + powers(2 * whole)[0::2][: num_heads - whole])


def attention_shape(config: ModelConfig, shard: Shard, device: torch.device, dtype: torch.dtype) -> AttentionShape:
    slopes = None
    if config.has_alibi:
        slopes = (alibi_slopes(config.num_heads) * config.alibi_scale)[slice(*shard.heads)].to(device)
    return AttentionShape(
        num_heads=shard.num_heads,
        num_kv_heads=shard.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        tiles_per_block=2 * shard.num_kv_heads,
        dtype=dtype,
        device=device,
        softcap=config.attn_softcap,
        alibi_slopes=slopes,
    )


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    if not config.spec.scales_embedding:
        return 1.0
    return float(torch.tensor(config.hidden_size**0.5, dtype=dtype))


def _size(rank: RankInfo, config: ModelConfig) -> int:
    start, stop = rank.span(config.vocab_size)
    return stop - start
