# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU, from the fused projection to the attended heads: three kernels per layer over the paged pool.

Rotary embedding and the write of keys and values, attention of single tokens, attention of prompt chunks; the last two
only where the step has such rows. Tile sizes follow the head size, the group size and the card. Heads are this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mii_zmq.errors import ModelUnsupported
from mii_zmq.kernels.layout import AttentionShape
from mii_zmq.kernels.triton.batch_inputs import ITEM_WORDS
from mii_zmq.kernels.triton.chunk_attention import chunk_attention_kernel
from mii_zmq.kernels.triton.decode_attention import decode_attention_kernel
from mii_zmq.kernels.triton.rope_kv import rope_kv_kernel
from mii_zmq.worker.cuda_batch import PackedLayout
from mii_zmq.worker.models.cuda_buffers import Buffers, Card, DeviceState, Rows
from mii_zmq.worker.models.cuda_gemm import launch_options
from mii_zmq.worker.models.cuda_rotary import Rotation

TILE_TOKENS = 128
"""Query tokens per program of prompt attention, for heads of up to 128 elements."""
KEY_TILE = 64
MAX_HEAD_DIM = 256
HEADS_PER_PROGRAM = 8
FEW_DECODES = 16
FEW_TILES, MANY_TILES = (3, 4), (3, 2)
"""Pipeline stages and warps of decode attention: for up to `FEW_DECODES` rows, and for more."""
SMALL_ACCUMULATOR = 2048
"""Elements (padded heads of a group times padded head size) for which `MANY_TILES` leaves registers enough."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class ChunkTiles:
    """Tile sizes of prompt attention: query tokens, keys, pipeline stages, warps."""

    tokens: int
    keys: int
    stages: int
    num_warps: int


def chunk_tiles(head_dim: int, block_size: int, card: Card) -> ChunkTiles:
    """Those that fit the card's registers and shared memory.

    Raises:
        ModelUnsupported: none do.
    """
    keys = min(KEY_TILE, block_size)
    if head_dim <= 128:
        return ChunkTiles(TILE_TOKENS, keys, 2, 4 if head_dim == 128 and card.is_hopper else 8)
    if head_dim > MAX_HEAD_DIM:
        raise ModelUnsupported(
            f"heads have {head_dim} elements; the GPU's kernels take up to {MAX_HEAD_DIM}: use --device cpu"
        )
    if card.is_hopper:
        return ChunkTiles(TILE_TOKENS, min(keys, 32), 2, 8)
    # 106,500 bytes of shared memory, or 69,636.
    return ChunkTiles(64, keys if card.shared_bytes >= 106_500 else min(keys, 32), 2, 8)


def decode_tiles(group_pad: int, head_pad: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Pipeline stages and warps of decode attention, for few rows and for many."""
    size = group_pad * head_pad
    if size <= SMALL_ACCUMULATOR:
        return FEW_TILES, MANY_TILES
    tiles = (3, 4 if size <= 2 * SMALL_ACCUMULATOR else 8)
    return tiles, tiles


@dataclass(frozen=True)
class AttentionPlace:
    """What distinguishes a layer's attention."""

    index: int
    """The layer's in the pool."""
    window: int | None
    rotation: Rotation
    q_norm: Tensor | None
    """[D]."""
    k_norm: Tensor | None


class CudaAttention:
    """The launches of all layers, over buffers shared by them."""

    def __init__(
        self,
        shape: AttentionShape,
        norm_eps: float,
        buffers: Buffers,
        state: DeviceState,
        layout: PackedLayout,
        block_size: int,
        card: Card,
        deterministic: bool,
    ) -> None:
        """`deterministic`: sums are rounded alike wherever a tile begins; `layout` has tiles of `chunk_tiles`."""
        self._shape, self._norm_eps = shape, norm_eps
        self._buffers, self._state, self._layout, self._block_size = buffers, state, layout, block_size
        self._deterministic = deterministic
        head_dim = shape.head_dim
        self._pdl, self._tma = card.is_hopper, card.is_hopper and head_dim in (64, 128)
        self._chunk = chunk_tiles(head_dim, block_size, card)
        self._key_tile = min(KEY_TILE, block_size)
        self._group = shape.num_heads // shape.num_kv_heads
        self._group_pad = max(16, triton.next_power_of_2(self._group))
        self._head_pad = max(16, triton.next_power_of_2(head_dim))
        self.target_programs = card.num_processors * 4
        self.spare_items = triton.cdiv(self.target_programs, shape.num_kv_heads)
        """Work items of decode attention beyond one per row."""
        self._few, self._many = decode_tiles(self._group_pad, self._head_pad)
        items = layout.max_rows + self.spare_items
        device = state.packed.device
        self.items = torch.zeros(items, ITEM_WORDS, dtype=torch.int32, device=device)
        cells = items * shape.num_kv_heads * self._group_pad
        self._partial = torch.zeros(cells * self._head_pad, dtype=torch.float32, device=device)
        self._partial_stats = torch.zeros(cells * 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(layout.max_rows * shape.num_kv_heads, dtype=torch.int32, device=device)

    def use_pool(self, slab: Tensor) -> None:
        """The KV pool [block, layer, k or v, kv head, token, dim], layers outermost in memory."""
        self._slab = slab
        flat = slab.transpose(0, 1).view(-1, self._shape.head_dim)
        self._descriptor = None
        if self._tma:
            shape = [min(flat.shape[0], 2**31 - 1), flat.shape[1]]
            self._descriptor = TensorDescriptor(flat, shape, list(flat.stride()), [self._key_tile, flat.shape[1]])

    def run(self, place: AttentionPlace, rows: Rows, num_items: int, num_tiles: int) -> None:
        """`rows.qkv` into `rows.attended`, for at most so many work items and prompt tiles."""
        self._rotate_and_store(place, rows.qkv)
        if num_items:
            self._attend_decodes(place, rows.qkv, rows.attended, num_items)
        if num_tiles:
            self._attend_chunks(place, rows.qkv, rows.attended, num_tiles)

    def _rotate_and_store(self, place: AttentionPlace, qkv: Tensor) -> None:
        shape, slab, rotation = self._shape, self._slab, place.rotation
        heads = shape.num_heads + 2 * shape.num_kv_heads
        rope_kv_kernel[(qkv.shape[0], triton.cdiv(heads, HEADS_PER_PROGRAM))](
            qkv, slab, rotation.cosines, rotation.sines, rotation.rows, self._buffers.cells, place.q_norm, place.k_norm,
            qkv.stride(0), slab.stride(0), place.index * slab.stride(1), slab.stride(2), self._norm_eps,
            NUM_HEADS=shape.num_heads, NUM_KV_HEADS=shape.num_kv_heads, HEADS_PER_PROGRAM=HEADS_PER_PROGRAM,
            HEAD_DIM=shape.head_dim, HEAD_PAD=self._head_pad, ROTARY_DIM=rotation.rotary_dim,
            BLOCK_SIZE=self._block_size, HAS_ROPE=rotation.rotary_dim > 0, HAS_QK_NORM=place.q_norm is not None,
            PDL=self._pdl, num_warps=4, **launch_options(self._pdl),
        )  # fmt: skip

    def _attend_decodes(self, place: AttentionPlace, qkv: Tensor, attended: Tensor, num_items: int) -> None:
        shape, tables, slab, slopes = self._shape, self._state.block_tables, self._slab, self._shape.alibi_slopes
        stages, num_warps = self._few if num_items <= FEW_DECODES + self.spare_items else self._many
        decode_attention_kernel[(shape.num_kv_heads, num_items)](
            qkv, slab, attended, self._partial, self._partial_stats, self._counters, tables, self.items, slopes,
            qkv.stride(0), attended.stride(0), tables.stride(0), slab.stride(0), place.index * slab.stride(1),
            slab.stride(2), shape.scale * LOG2_E, shape.softcap, place.window or 0,
            NUM_KV_HEADS=shape.num_kv_heads, GROUP=self._group, GROUP_PAD=self._group_pad, HEAD_DIM=shape.head_dim,
            HEAD_PAD=self._head_pad, BLOCK_SIZE=self._block_size, TILE=self._key_tile,
            HAS_WINDOW=place.window is not None, HAS_SOFTCAP=shape.softcap != 0.0, HAS_ALIBI=slopes is not None,
            STAGES=stages, PDL=self._pdl, num_warps=num_warps, **launch_options(self._pdl),
        )  # fmt: skip

    def _attend_chunks(self, place: AttentionPlace, qkv: Tensor, attended: Tensor, num_tiles: int) -> None:
        shape, layout, state, slab, tiles = self._shape, self._layout, self._state, self._slab, self._chunk
        packed, tables, slopes = state.packed, state.block_tables, shape.alibi_slopes
        chunk_attention_kernel[(shape.num_heads, num_tiles)](
            qkv, slab, self._descriptor, attended, tables, packed[layout.row_slots :], packed[layout.row_starts :],
            packed[layout.query_starts :], packed[4:], packed[layout.tile_rows :], packed[layout.tile_starts :], slopes,
            qkv.stride(0), attended.stride(0), tables.stride(0), slab.stride(0), place.index * slab.stride(1),
            slab.stride(2), shape.scale * LOG2_E, shape.softcap, place.window or 0,
            GROUP=self._group, HEAD_DIM=shape.head_dim, HEAD_PAD=self._head_pad, BLOCK_SIZE=self._block_size,
            TILE_M=layout.tile_tokens, TILE_N=tiles.keys, HAS_WINDOW=place.window is not None,
            HAS_SOFTCAP=shape.softcap != 0.0, HAS_ALIBI=slopes is not None, USE_TMA=self._descriptor is not None,
            STAGES=tiles.stages, num_warps=tiles.num_warps,
            # Fused, the loops with and without a mask would round differently, and it is the tile that decides
            # through which of them a row's keys go.
            enable_fp_fusion=not self._deterministic,
        )  # fmt: skip
