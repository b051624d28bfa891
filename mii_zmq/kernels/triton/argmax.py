# SPDX-License-Identifier: Apache-2.0
"""Greedy sampling: the largest logit of every row, in two stages, written into the slots' histories.

Stage one reduces tiles of the vocabulary, stage two the tiles of a row. Of equal logits the smallest id wins. A row
with a NaN, with +inf or without any finite logit is flagged; its token means nothing. Rows beyond `count` leave no
trace.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def argmax_tiles_kernel(
    logits_ptr,  # [R, V] rows of stride
    value_ptr,  # out [R, tiles] float32; NaN if the tile holds one
    index_ptr,  # out [R, tiles] int32
    stride,
    V: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    offs = tile * TILE + tl.arange(0, TILE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits_ptr + row * stride + offs, mask=offs < V, other=float("-inf")).to(tl.float32)
    is_nan = tl.max((x != x).to(tl.int32), 0)
    best = tl.max(x, 0)
    index = tl.min(tl.where(x == best, offs, 2147483647), 0)
    tl.store(value_ptr + row * NUM_TILES + tile, tl.where(is_nan > 0, float("nan"), best))
    tl.store(index_ptr + row * NUM_TILES + tile, index)


@triton.jit
def argmax_rows_kernel(
    value_ptr,
    index_ptr,
    count_ptr,  # [1] int32: rows that sample
    slot_ptr,  # [R] int32
    position_ptr,  # [R] int32
    token_ids_ptr,  # [slots, history_stride] int32; unused unless RECORD
    id_ptr,  # out [R]
    finite_ptr,  # out [R]
    history_stride,
    vocab_size,
    NUM_TILES: tl.constexpr,
    PAD: tl.constexpr,
    RECORD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    offs = tl.arange(0, PAD)
    mask = offs < NUM_TILES
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(value_ptr + row * NUM_TILES + offs, mask=mask, other=float("-inf"))
    index = tl.load(index_ptr + row * NUM_TILES + offs, mask=mask, other=2147483647)
    is_nan = tl.max((x != x).to(tl.int32), 0)
    best = tl.max(x, 0)
    token_id = tl.min(tl.where(x == best, index, 2147483647), 0)
    is_finite = (is_nan == 0) & (best < float("inf")) & (best > float("-inf"))
    # A token id that is always inside the vocabulary, whatever the logits were.
    token_id = tl.where(is_finite, tl.minimum(token_id, vocab_size - 1), 0)
    if row < tl.load(count_ptr):
        if RECORD:
            slot = tl.load(slot_ptr + row).to(tl.int64)
            position = tl.load(position_ptr + row)
            tl.store(token_ids_ptr + slot * history_stride + position, token_id, mask=position < history_stride)
        tl.store(id_ptr + row, token_id.to(id_ptr.dtype.element_ty))
        tl.store(finite_ptr + row, is_finite.to(finite_ptr.dtype.element_ty))
