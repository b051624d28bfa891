# SPDX-License-Identifier: Apache-2.0
"""The op table: the one place where models get their compute from, and where a device's implementation is chosen.

A leaf: imports nothing else of the package. An op that holds weights is made once by a factory of the table; one
that does not is a function. `REFERENCE` is the oracle with the same signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mii_zmq.kernels import reference, torch_ops
from mii_zmq.kernels.layout import AttentionShape, CellMapping, KvLayer, MoeShape, RaggedLayout
from mii_zmq.kernels.reference_moe import ReferenceMoe
from mii_zmq.kernels.torch_attention import TorchAttention
from mii_zmq.kernels.torch_linear import Linear, LinearFactory
from mii_zmq.kernels.torch_moe import TorchMoe

__all__ = [
    "REFERENCE", "Attention", "AttentionShape", "CellMapping", "KvLayer", "Linear", "MoeShape", "Norm", "OpTable",
    "RaggedLayout", "for_device",
]  # fmt: skip

Norm = Callable[..., Tensor]
"""norm(x, delta=None): adds delta to x in place, returns the normed x."""


class Attention(Protocol):
    """Ragged paged attention; `plan` once per step and window, then one call per layer."""

    def plan(self, layout: RaggedLayout, window: int | None) -> Any: ...

    def __call__(self, qkv: Tensor, layer: KvLayer, plan: Any) -> Tensor: ...


@dataclass(frozen=True)
class OpTable:
    """Everything a model computes with."""

    linear: Callable[[Tensor, Tensor | None], Linear]
    """(weight [N, K], bias [N] or None) -> op on [T, K]. May keep a packed copy instead of the weight."""
    rms_norm: Callable[[Tensor, float], Norm]
    """(weight, eps)."""
    layer_norm: Callable[[Tensor | None, Tensor | None, float, int], Norm]
    """(weight, bias, eps, width)."""
    attention: Callable[[AttentionShape], Attention]
    rotary_table: Callable[[Tensor, Tensor], Tensor]
    """(positions [T], inverse frequencies [P] or [T, P]) -> [T, 1, P] complex."""
    rotate: Callable[[Tensor, Tensor], None]
    """(heads [T, H, D], rotary table): in place, adjacent pairs."""
    write_kv: Callable[[Tensor, KvLayer, CellMapping], None]
    activations: dict[str, Callable[[Tensor], Tensor]]
    gated: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
    moe: Callable[[Tensor, Tensor, Tensor, str, MoeShape], Callable[[Tensor], Tensor]]
    """(router [E, H], up [held, 2 I, H], down [held, H, I], activation, shape) -> op on [T, H]."""


REFERENCE = OpTable(
    linear=reference.linear,
    rms_norm=reference.RmsNorm,
    layer_norm=reference.LayerNorm,
    attention=reference.ReferenceAttention,
    rotary_table=torch_ops.rotary_table,
    rotate=reference.rotate,
    write_kv=reference.write_kv,
    activations=torch_ops.ACTIVATIONS,
    gated=torch_ops.gated,
    moe=ReferenceMoe,
)


def for_device(device: torch.device) -> OpTable:
    """The fastest table for a device; the torch path runs on every device that torch knows."""
    del device
    return OpTable(
        linear=LinearFactory(),
        rms_norm=torch_ops.RmsNorm,
        layer_norm=torch_ops.LayerNorm,
        attention=TorchAttention,
        rotary_table=torch_ops.rotary_table,
        rotate=torch_ops.rotate,
        write_kv=torch_ops.write_kv,
        activations=torch_ops.ACTIVATIONS,
        gated=torch_ops.gated,
        moe=TorchMoe,
    )
