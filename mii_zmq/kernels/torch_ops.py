# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary embedding, KV write and activations with plain torch ops, as few per layer as possible.

Normal float32 tensors take short in-place paths; other dtypes compute in float32 and round once, as the published
models do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mii_zmq.kernels.layout import CellMapping, KvLayer


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = weight.shape[-1]
        self._is_float32 = weight.dtype is torch.float32
        """Then a 16-bit `x` is multiplied before it is rounded, else after."""
        self._eps = eps
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(n eps)) / sqrt(n): three ops instead of five.
        self._floor = torch.tensor(math.sqrt(width * eps), dtype=torch.float32, device=weight.device)
        self._weight = weight * math.sqrt(width) if self._is_float32 else weight

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to `x` in place, then return the norm of `x`."""
        if delta is not None:
            x.add_(delta)
        if self._is_float32:
            if x.dtype is not torch.float32:
                return self._scaled(x.float()).to(x.dtype)
            return self._scaled(x)
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self._eps))
        return wide.mul_(scale).to(x.dtype).mul_(self._weight)

    def _scaled(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)
        return torch.div(x, length).mul_(self._weight)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float, width: int) -> None:
        self._weight, self._bias, self._eps, self._shape = weight, bias, eps, [width]

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Add `delta` to `x` in place, then return the norm of `x`."""
        if delta is not None:
            x.add_(delta)
        return torch.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


def rotary_table(positions: Tensor, inverse_frequencies: Tensor) -> Tensor:
    """[T] positions and [P] or [T, P] float32 frequencies -> [T, 1, P] complex64: each pair's rotation."""
    angles = positions.float().unsqueeze(1) * inverse_frequencies
    return torch.complex(angles.cos(), angles.sin()).unsqueeze(1)


def rotate(heads: Tensor, table: Tensor) -> None:
    """Rotate [T, H, D] in place; pair i of a head is its adjacent elements (2 i, 2 i + 1), for i < P."""
    num_tokens, num_heads, head_dim = heads.shape
    num_pairs = table.shape[2]
    rotated = heads if 2 * num_pairs == head_dim else heads[..., : 2 * num_pairs]
    pairs = rotated.view(num_tokens, num_heads, num_pairs, 2)
    if heads.dtype is torch.float32:
        torch.view_as_complex(pairs).mul_(table)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * table))


def write_kv(qkv: Tensor, layer: KvLayer, mapping: CellMapping) -> None:
    """Store the keys and values of [T, Hq + 2 Hk, D] in the pool."""
    _, _, kinds, num_kv_heads, head_dim = layer.cells.shape
    keys_values = qkv[:, -kinds * num_kv_heads :].view(-1, kinds, num_kv_heads, head_dim)
    layer.cells.index_put_((mapping.block_ids, mapping.offsets), keys_values)


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """[T, 2 I] holding gate and up -> activation(gate) * up, [T, I]."""

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate).mul_(up)

    return apply


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
}
