# SPDX-License-Identifier: Apache-2.0
"""One decoder layer, with every choice of the architecture resolved into bound ops when it is built.

Residual form: `x` is the residual stream, changed in place; each half of a layer returns a delta, which the next norm
adds before it normalises, so that addition and norm are one op where a kernel offers it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mii_zmq.kernels import Attention, CellMapping, KvLayer, Norm, OpTable
from mii_zmq.worker.models.spec import MlpKind, ModelConfig, NormKind, RopeConfig
from mii_zmq.worker.models.weights import Affine, LayerWeights


@dataclass(frozen=True)
class StepContext:
    """What all layers of one step share."""

    mapping: CellMapping
    rotary: Tensor | None
    """[T, 1, P] complex; None without rotary embedding."""
    plans: list[Any]
    """Attention plan per distinct window."""


class DecoderLayer:
    """Attention and MLP of one layer over the flattened tokens of a step."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, ops: OpTable, attention: Attention, window_index: int
    ) -> None:
        self._attn_norm = make_norm(config, weights.attn_norm, ops)
        self._mlp_norm = make_norm(config, weights.mlp_norm, ops)
        self._qkv = ops.linear(weights.qkv.weight, weights.qkv.bias)
        self._out = ops.linear(weights.out.weight, weights.out.bias)
        self._up = ops.linear(weights.up.weight, weights.up.bias)
        self._down = ops.linear(weights.down.weight, weights.down.bias)
        self._activation = make_activation(config, ops)
        self._qk_norm = None if weights.qk_norm is None else ops.rms_norm(weights.qk_norm, config.norm_eps)
        self._attention = attention
        self._window_index = window_index
        self._rotate, self._write_kv = ops.rotate, ops.write_kv
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._heads_shape = (-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)

    def attend(self, x: Tensor, delta: Tensor | None, step: StepContext, kv: KvLayer) -> Tensor:
        """Add `delta` to `x`, write this step's keys and values, return the attended heads [T, Hq * D]."""
        qkv: Tensor = self._qkv(self._attn_norm(x, delta)).view(self._heads_shape)
        if self._qk_norm is not None:
            heads = qkv[:, : self._num_rotated]
            heads.copy_(self._qk_norm(heads))
        if step.rotary is not None:
            self._rotate(qkv[:, : self._num_rotated], step.rotary)
        self._write_kv(qkv, kv, step.mapping)
        return self._attention(qkv, kv, step.plans[self._window_index])

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output to `x`, return the MLP's output as the next delta."""
        hidden = self._mlp_norm(x, self._out(attended))
        return self._down(self._activation(self._up(hidden)))


def make_norm(config: ModelConfig, weights: Affine, ops: OpTable) -> Norm:
    if config.spec.norm is NormKind.RMS:
        return ops.rms_norm(weights.weight, config.norm_eps)
    return ops.layer_norm(weights.weight, weights.bias, config.norm_eps, config.hidden_size)


def make_activation(config: ModelConfig, ops: OpTable) -> Callable[[Tensor], Tensor]:
    activation = ops.activations[config.activation]
    return ops.gated(activation) if config.spec.mlp is MlpKind.GATED else activation


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[D / 2] float32: angle per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
