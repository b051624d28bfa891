# SPDX-License-Identifier: Apache-2.0
"""The oracle: every op in its plainest form, for any float dtype (float64 included); loops are fine here.

Same signatures as the fast ops, so that a whole model can run on it. It reads the pool cell by cell, through the
block table, and is never used for serving.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mii_zmq.kernels.layout import AttentionShape, CellMapping, KvLayer, RaggedLayout
from mii_zmq.kernels.torch_linear import PlainLinear


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if delta is not None:
            x.copy_(x + delta)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self._eps) * self._weight


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float, width: int) -> None:
        self._weight = torch.ones(width) if weight is None else weight
        self._bias = torch.zeros(width) if bias is None else bias
        self._eps = eps

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        if delta is not None:
            x.copy_(x + delta)
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + self._eps) * self._weight + self._bias


def linear(weight: Tensor, bias: Tensor | None = None) -> PlainLinear:
    return PlainLinear(weight, bias)


def rotate(heads: Tensor, table: Tensor) -> None:
    """Rotate adjacent pairs of [T, H, D] in place by the complex table [T, 1, P]."""
    cosine, sine = table.real, table.imag
    rotated = 2 * table.shape[2]
    even, odd = heads[..., 0:rotated:2].clone(), heads[..., 1:rotated:2].clone()
    heads[..., 0:rotated:2] = even * cosine - odd * sine
    heads[..., 1:rotated:2] = even * sine + odd * cosine


def write_kv(qkv: Tensor, layer: KvLayer, mapping: CellMapping) -> None:
    num_kv_heads = layer.blocks.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    for token in range(qkv.shape[0]):
        block, offset = int(mapping.block_ids[token]), int(mapping.offsets[token])
        layer.blocks[block, 0, :, offset] = qkv[token, num_heads : num_heads + num_kv_heads]
        layer.blocks[block, 1, :, offset] = qkv[token, num_heads + num_kv_heads :]


@dataclass(frozen=True)
class ReferencePlan:
    layout: RaggedLayout
    window: int | None


class ReferenceAttention:
    """softmax(q k^T * scale) v, one sequence, token and head at a time."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, layout: RaggedLayout, window: int | None) -> ReferencePlan:
        return ReferencePlan(layout, window)

    def __call__(self, qkv: Tensor, layer: KvLayer, plan: ReferencePlan) -> Tensor:
        shape = self._shape
        out = torch.zeros(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype)
        for row in range(plan.layout.num_rows):
            begin, end = plan.layout.query_start_loc[row : row + 2].tolist()
            length = int(plan.layout.seq_lens[row])
            for token in range(begin, end):
                position = length - end + token
                first = 0 if plan.window is None else max(0, position + 1 - plan.window)
                for head in range(shape.num_heads):
                    kv_head = head * shape.num_kv_heads // shape.num_heads
                    keys = self._read(layer, plan.layout, row, first, position + 1, 0, kv_head)
                    values = self._read(layer, plan.layout, row, first, position + 1, 1, kv_head)
                    scores = keys @ qkv[token, head] * shape.scale
                    if shape.softcap:
                        scores = shape.softcap * torch.tanh(scores / shape.softcap)
                    if shape.alibi_slopes is not None:
                        scores = scores + shape.alibi_slopes[head] * (torch.arange(first, position + 1) - position)
                    weights = torch.softmax(scores, -1)
                    out[token, head] = weights @ values
        return out.view(qkv.shape[0], -1)

    @staticmethod
    def _read(layer: KvLayer, layout: RaggedLayout, row: int, first: int, stop: int, kind: int, kv_head: int) -> Tensor:
        cells = [
            layer.blocks[int(layout.block_tables[row, p // layout.block_size]), kind, kv_head, p % layout.block_size]
            for p in range(first, stop)
        ]
        return torch.stack(cells)
