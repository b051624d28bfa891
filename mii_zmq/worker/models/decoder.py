# SPDX-License-Identifier: Apache-2.0
"""The one decoder: config + weights + op table -> logits of a ragged batch. All families run through `forward`.

Knows nothing of sequences, plans or sampling. Logits are computed only for the rows asked for, and so is the last
layer's MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mii_zmq.kernels import AttentionShape, CellMapping, KvLayer, OpTable, RaggedLayout
from mii_zmq.worker.models.layers import DecoderLayer, StepContext, inverse_frequencies, make_norm
from mii_zmq.worker.models.spec import ModelConfig
from mii_zmq.worker.models.weights import DecoderWeights


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


class Decoder:
    """A loaded model. `weights` may be consumed: linears can keep packed copies instead."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, ops: OpTable, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.weight_bytes = weights.num_bytes
        """Without the second copy of a tied embedding that a packed head keeps."""
        self._ops = ops
        self._embed = weights.embed
        self._positions = weights.positions
        self._frequencies = None
        if config.rope is not None:
            self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._windows = list(dict.fromkeys(config.windows))
        self._attention = ops.attention(
            AttentionShape(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
                tiles_per_block=2 * config.num_kv_heads,
                dtype=dtype,
                device=device,
            )
        )
        self._final_norm = make_norm(config, weights.final_norm, ops)
        self._head = ops.linear(weights.embed if weights.head is None else weights.head, None)
        weights.head = None
        self._layers: list[DecoderLayer] = []
        for window in config.windows:
            # Popping frees each layer's own copy as soon as it is packed.
            layer = weights.layers.pop(0)
            self._layers.append(DecoderLayer(config, layer, ops, self._attention, self._windows.index(window)))

    def forward(self, batch: ForwardBatch, kv_layers: Sequence[KvLayer]) -> Tensor | None:
        """Write this step's keys and values, return the wanted logits [R, V] (None if none are wanted)."""
        step = StepContext(
            mapping=batch.mapping,
            rotary=None if self._frequencies is None else self._ops.rotary_table(batch.positions, self._frequencies),
            plans=[self._attention.plan(batch.layout, window) for window in self._windows],
        )
        x = torch.nn.functional.embedding(batch.token_ids, self._embed)
        if self._positions is not None:
            x += torch.nn.functional.embedding(batch.positions + self.config.spec.position_offset, self._positions)
        delta: Tensor | None = None
        for layer, kv in zip(self._layers[:-1], kv_layers[:-1], strict=True):
            delta = layer.finish(x, layer.attend(x, delta, step, kv))
        last = self._layers[-1]
        attended = last.attend(x, delta, step, kv_layers[-1])
        if batch.logit_rows is None:
            return None
        x, attended = x.index_select(0, batch.logit_rows), attended.index_select(0, batch.logit_rows)
        return self._head(self._final_norm(x, last.finish(x, attended)))
