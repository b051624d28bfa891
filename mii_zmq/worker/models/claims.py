# SPDX-License-Identifier: Apache-2.0
"""What one checkpoint tensor is to a rank: boxes of it, each with its place and the order of its elements.

Also which heads of the projections' three layouts a rank takes. Knows no names of tensors and no files.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.spec import ModelConfig, QkvKind, Role
from mii_zmq.worker.models.tensor_source import Index


@dataclass(frozen=True)
class Part:
    """A box of a checkpoint tensor and its place."""

    destination: Tensor
    index: Index
    is_transposed: bool = False
    head_dim: int = 0
    """Where elements are reordered: the rows of a head."""
    rotary_dim: int = 0
    """Of each head's first rows the two halves are interleaved; 0: keep the order."""
    offset: float = 0.0

    def fill(self, data: Tensor) -> None:
        """Copy the box's values, converting them to the destination's dtype on the way."""
        data = data.t() if self.is_transposed else data
        if self.rotary_dim:
            width, half = self.rotary_dim, self.rotary_dim // 2
            source, target = (tensor.unflatten(0, (-1, self.head_dim)) for tensor in (data, self.destination))
            pairs = source[:, :width].unflatten(1, (2, half)).transpose(1, 2)
            target[:, :width].unflatten(1, (half, 2)).copy_(pairs)
            target[:, width:].copy_(source[:, width:])
        else:
            self.destination.copy_(data)
        if self.offset:
            self.destination.add_(self.offset)


@dataclass(frozen=True)
class Claim:
    """What one checkpoint tensor is to this rank; no parts: known, but not read."""

    shape: tuple[int, ...]
    """Of the whole tensor as stored."""
    parts: tuple[Part, ...]
    fills: tuple[str, ...]
    """The needed names that it provides."""
    is_vocabulary: bool = False
    """It has a row for each token."""


@dataclass(frozen=True)
class HeadBox:
    """Heads [start, stop) of a stored projection, and the head of the fused one that they begin at."""

    role: Role
    start: int
    stop: int
    target: int
    is_rotated: bool


def head_boxes(config: ModelConfig, shard: Shard) -> list[HeadBox]:
    """Where a rank's q, k and v heads lie in the checkpoint's projections, and where they go."""
    (q0, q1), (k0, k1) = shard.heads, shard.kv_heads
    to_k, to_v = shard.num_heads, shard.num_heads + shard.num_kv_heads
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    if config.spec.qkv is QkvKind.SEPARATE:
        parts = [(Role.Q, 0, q0, q1, 0), (Role.K, 0, k0, k1, to_k), (Role.V, 0, k0, k1, to_v)]
    elif config.spec.qkv is QkvKind.STACKED:
        parts = [
            (Role.QKV, 0, q0, q1, 0),
            (Role.QKV, num_heads, k0, k1, to_k),
            (Role.QKV, num_heads + num_kv_heads, k0, k1, to_v),
        ]
    else:
        share = num_heads // num_kv_heads
        parts = []
        for group in range(k0, k1):
            begin, first = group * (share + 2), group * share
            low, high = max(q0, first), min(q1, first + share)
            parts += [
                (Role.QKV, begin - first, low, high, low - q0),
                (Role.QKV, begin + share, 0, 1, to_k + group - k0),
                (Role.QKV, begin + share + 1, 0, 1, to_v + group - k0),
            ]
    return [
        HeadBox(role, base + start, base + stop, target, is_rotated=target < to_v)
        for role, base, start, stop, target in parts
    ]
