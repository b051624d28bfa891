# SPDX-License-Identifier: Apache-2.0
"""The KV pool: one slab of blocks, order [layer][block][k or v][kv head][token][dim], and the views that kernels use.

The slab belongs to the array module that is injected (NumPy on a CPU, CuPy and its memory pool on a GPU); torch sees
the same memory without a copy. bfloat16 is stored as raw uint16 and viewed, since NumPy has no such type. Layers come
first because attention reads one layer at a time, whose blocks then lie close together; mixed workloads on an H200
gained by it (BENCHMARKS.md). Knows nothing of who owns a block: the scheduler's block manager does.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mii_zmq.kernels import KvLayer

_STORAGE = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "uint16"}


@dataclass(frozen=True)
class BlockShape:
    """What one block holds."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * self.dtype.itemsize


class KvPool:
    """`num_blocks` blocks in one slab. Used by one thread."""

    def __init__(self, xp: ModuleType, shape: BlockShape, num_blocks: int) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        dims = (shape.num_layers, num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self._storage: Any = xp.zeros(dims, dtype=_STORAGE[shape.dtype])
        raw = torch.from_dlpack(self._storage)
        self.slab: Tensor = (raw if raw.dtype is shape.dtype else raw.view(shape.dtype)).transpose(0, 1)
        """[block, layer, k or v, kv head, token, dim], a view."""
        self.layers: list[KvLayer] = [KvLayer(self.slab[:, layer]) for layer in range(shape.num_layers)]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.shape.num_bytes

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each; no destination may be a source of the same call."""
        if not pairs:
            return
        sources, destinations = zip(*pairs, strict=True)
        device = self.slab.device
        copied = self.slab.index_select(0, torch.tensor(sources, dtype=torch.int64, device=device))
        self.slab.index_copy_(0, torch.tensor(destinations, dtype=torch.int64, device=device), copied)

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Forget what the blocks held; a block that is begun must hold no NaN of its former owner."""
        if block_ids:
            self.slab.index_fill_(0, torch.tensor(block_ids, dtype=torch.int64, device=self.slab.device), 0)


def array_module(device: torch.device) -> ModuleType:
    """The module that owns the slab on a device; CuPy is imported only for a GPU."""
    if device.type == "cuda":
        import cupy

        return cupy  # type: ignore[no-any-return]
    import numpy

    return numpy
