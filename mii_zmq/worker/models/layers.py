# SPDX-License-Identifier: Apache-2.0
"""One decoder layer, with every choice of the architecture resolved into bound ops when it is built.

Residual form: `x` is the residual stream, changed in place; each half of a layer returns a delta, which the next norm
adds before it normalises, so that addition and norm are one op where a kernel offers it. With several ranks each
computes partial sums from its heads, channels and experts; they are reduced before anything reads them whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mii_zmq.kernels import Attention, CellMapping, KvLayer, MoeShape, Norm, OpTable
from mii_zmq.worker.models.model_weights import Affine, LayerWeights, MoeWeights
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.spec import MlpKind, ModelConfig, NormKind, ResidualKind
from mii_zmq.worker.parallel import Collectives

Mlp = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StepContext:
    """What all layers of one step share."""

    mapping: CellMapping
    rotary: list[Tensor | None]
    """Per distinct rotary embedding [T, 1, P] complex; None: no rotation."""
    plans: list[Any]
    """Attention plan per distinct window."""


@dataclass(frozen=True)
class LayerPlace:
    """Which of a model's distinct windows and rotary embeddings a layer uses."""

    window_index: int
    rotary_index: int


@dataclass(frozen=True)
class Attended:
    """A layer between its halves."""

    heads: Tensor
    """[T, Hq * D]."""
    normed: Tensor | None
    """[T, hidden]: what the attention read, where the MLP reads it too."""

    def rows(self, index: Tensor) -> Attended:
        normed = None if self.normed is None else self.normed.index_select(0, index)
        return Attended(self.heads.index_select(0, index), normed)


class DecoderLayer:
    """Attention and MLP of one layer over the flattened tokens of a step."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        ops: OpTable,
        attention: Attention,
        place: LayerPlace,
        shard: Shard,
        collectives: Collectives | None = None,
    ) -> None:
        self._attn_norm = make_norm(config, weights.attn_norm, ops) or _add
        self._attn_post_norm: Norm = make_norm(config, weights.attn_post_norm, ops) or _keep
        self._mlp_norm = make_norm(config, weights.mlp_norm, ops) or _add
        self._mlp_post_norm: Norm = make_norm(config, weights.mlp_post_norm, ops) or _keep
        self._qkv = ops.linear(weights.qkv.weight, weights.qkv.bias)
        self._out = ops.linear(weights.out.weight, weights.out.bias)
        self._mlp = _make_mlp(config, weights, ops)
        self._qk_norm = None if weights.qk_norm is None else ops.rms_norm(weights.qk_norm, config.norm_eps)
        self._attention, self._place = attention, place
        self._rotate, self._write_kv = ops.rotate, ops.write_kv
        self._num_rotated = shard.num_heads + shard.num_kv_heads
        self._heads_shape = (-1, shard.num_heads + 2 * shard.num_kv_heads, config.head_dim)
        self._reduce = (lambda partial: None) if collectives is None else collectives.reduce
        residual = config.spec.residual
        self._shares_norm = residual is ResidualKind.PARALLEL and weights.mlp_norm is None
        self.finish: Callable[[Tensor, Attended], Tensor | None] = {
            ResidualKind.SEQUENTIAL: self._finish_sequential,
            ResidualKind.PARALLEL: self._finish_parallel,
            ResidualKind.POST_NORM: self._finish_post_norm,
        }[residual]
        """(x, attended): add the attention's output to `x`, return the MLP's as the next delta."""

    def attend(self, x: Tensor, delta: Tensor | None, step: StepContext, kv: KvLayer) -> Attended:
        """Add `delta` to `x`, write this step's keys and values, attend."""
        normed = self._attn_norm(x, delta)
        qkv: Tensor = self._qkv(normed).view(self._heads_shape)
        if self._qk_norm is not None:
            heads = qkv[:, : self._num_rotated]
            heads.copy_(self._qk_norm(heads))
        rotary = step.rotary[self._place.rotary_index]
        if rotary is not None:
            self._rotate(qkv[:, : self._num_rotated], rotary)
        self._write_kv(qkv, kv, step.mapping)
        heads = self._attention(qkv, kv, step.plans[self._place.window_index])
        return Attended(heads, normed if self._shares_norm else None)

    def _finish_sequential(self, x: Tensor, attended: Attended) -> Tensor:
        delta = self._out(attended.heads)
        self._reduce(delta)
        delta = self._mlp(self._mlp_norm(x, self._attn_post_norm(delta)))
        self._reduce(delta)
        return self._mlp_post_norm(delta)

    def _finish_parallel(self, x: Tensor, attended: Attended) -> Tensor:
        normed = self._mlp_norm(x) if attended.normed is None else attended.normed
        delta: Tensor = self._mlp(normed).add_(self._out(attended.heads))
        self._reduce(delta)
        return delta

    def _finish_post_norm(self, x: Tensor, attended: Attended) -> None:
        delta = self._out(attended.heads)
        self._reduce(delta)
        x.copy_(self._attn_post_norm(x, delta))
        delta = self._mlp(x)
        self._reduce(delta)
        x.copy_(self._mlp_post_norm(x, delta))


def _add(x: Tensor, delta: Tensor | None = None) -> Tensor:
    """Stands for a norm that the family does not have."""
    return x if delta is None else x.add_(delta)


def _keep(delta: Tensor) -> Tensor:
    return delta


def make_norm(config: ModelConfig, weights: Affine | None, ops: OpTable, width: int = 0) -> Norm | None:
    """The norm over these weights; None if there are none."""
    if weights is None:
        return None
    if config.spec.norm is NormKind.RMS:
        return ops.rms_norm(weights.weight, config.norm_eps)
    return ops.layer_norm(weights.weight, weights.bias, config.norm_eps, width or config.hidden_size)


def _make_mlp(config: ModelConfig, weights: LayerWeights, ops: OpTable) -> Mlp:
    if weights.moe is not None:
        return _make_experts(config, weights.moe, ops)
    assert weights.up is not None
    assert weights.down is not None
    activation = ops.activations[config.activation]
    if config.spec.mlp is MlpKind.GATED:
        activation = ops.gated(activation)
    return _dense(ops, weights.up, weights.down, activation)


def _dense(ops: OpTable, up_weights: Affine, down_weights: Affine, activation: Mlp) -> Mlp:
    up, down = ops.linear(up_weights.weight, up_weights.bias), ops.linear(down_weights.weight, down_weights.bias)
    return lambda hidden: down(activation(up(hidden)))


def _make_experts(config: ModelConfig, weights: MoeWeights, ops: OpTable) -> Mlp:
    assert config.moe is not None
    shape = MoeShape(config.moe.top_k, config.moe.renormalise, weights.first_expert)
    routed = ops.moe(weights.router, weights.up, weights.down, config.activation, shape)
    if weights.shared_up is None or weights.shared_down is None:
        return routed
    activation = ops.gated(ops.activations[config.activation])
    shared = _dense(ops, Affine(weights.shared_up), Affine(weights.shared_down), activation)
    switch = weights.shared_switch

    def both(hidden: Tensor) -> Tensor:
        addend = shared(hidden)
        if switch is not None:
            addend = addend.mul_(torch.sigmoid(torch.nn.functional.linear(hidden, switch)))
        return routed(hidden).add_(addend)

    return both
