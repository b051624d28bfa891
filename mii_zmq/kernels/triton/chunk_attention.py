# SPDX-License-Identifier: Apache-2.0
"""Causal attention of prompt chunks over paged KV.

    out[t, h] = softmax(scale * q[t, h] . K[:p_t + 1]) V[:p_t + 1]        p_t: the token's position in its sequence

One program handles TILE_M query tokens of one row and head. Which ones, it reads from `tile_row` and `tile_start`
(most keys first, so that the last programs to run are short); surplus programs return at once. Keys are walked block
by block; tiles before the diagonal need no mask, tiles behind it are skipped. On Hopper the K and V tiles come through
a tensor descriptor over the whole pool (the copy engine), elsewhere through ordinary loads. Softmax in base 2 and
float32 (FlashAttention-2, Dao 2023, arXiv 2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend_tile(
    acc, l_i, m_i, q, key, table, pool_ptr, pool_desc, block_stride, head_offset, v_offset, scale_log2, softcap, window,
    positions, seq_len, slope,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    USE_TMA: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over keys [key, key + TILE_N)."""
    offs_n = tl.arange(0, TILE_N)
    offs_d = tl.arange(0, HEAD_PAD)
    block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
    element = block * block_stride + head_offset + (key % BLOCK_SIZE) * HEAD_DIM
    offsets = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    if USE_TMA:
        k = pool_desc.load([(element // HEAD_DIM).to(tl.int32), 0])
    elif HEAD_PAD == HEAD_DIM:
        k = tl.load(pool_ptr + element + offsets)
    else:
        k = tl.load(pool_ptr + element + offsets, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
    s = tl.dot(q, tl.trans(k)) * scale_log2
    if HAS_SOFTCAP:
        x = s * (0.6931471805599453 / softcap)
        s = softcap * 1.4426950408889634 * (2.0 / (1.0 + tl.exp2(-2.885390081777927 * x)) - 1.0)
    if HAS_ALIBI:
        s += slope * (key + offs_n[None, :] - positions[:, None]).to(tl.float32)
    if MASKED:
        visible = key + offs_n[None, :] <= positions[:, None]
        if HAS_WINDOW:
            visible = visible & (key + offs_n[None, :] > positions[:, None] - window)
        s = tl.where(visible, s, -1.0e30)
    m_new = tl.maximum(m_i, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    if HAS_WINDOW and MASKED:
        # A row may have no visible key in this tile: exp2(-1e30 - -1e30) would count as one.
        p = tl.where(visible, p, 0.0)
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    if USE_TMA:
        v = pool_desc.load([((element + v_offset) // HEAD_DIM).to(tl.int32), 0])
    else:
        v_mask = offs_d[None, :] < HEAD_DIM
        if MASKED:
            v_mask = v_mask & (key + offs_n < seq_len)[:, None]
        v = tl.load(pool_ptr + element + v_offset + offsets, mask=v_mask, other=0.0)
    if MASKED and USE_TMA:
        # Slots beyond the sequence hold whatever was there before, possibly NaN.
        v = tl.where((key + offs_n < seq_len)[:, None], v, 0.0)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, l_i, m_new


@triton.jit
def chunk_attention_kernel(
    q_ptr,  # [T, num_heads * D] rows of q_stride
    pool_ptr,
    pool_desc,  # tensor descriptor over the pool as [elements / D, D] with blocks [TILE_N, D]; unused without USE_TMA
    out_ptr,
    block_table_ptr,  # [slots, max_blocks] int32
    row_slot_ptr,  # [R] int32
    row_start_ptr,  # [R] int32: position of the row's first query token
    query_start_ptr,  # [R + 1] int32
    num_tiles_ptr,  # [1] int32
    tile_row_ptr,  # [tiles] int32
    tile_start_ptr,  # [tiles] int32: first query token of the tile within its row
    alibi_ptr,
    q_stride, out_stride, table_stride, block_stride, layer_offset, v_offset, scale_log2, softcap, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, USE_TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles_ptr):
        return
    row = tl.load(tile_row_ptr + tile)
    q_begin = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - q_begin
    start = tl.load(row_start_ptr + row)
    first = tl.load(tile_start_ptr + tile)
    offs_m = first + tl.arange(0, TILE_M)
    offs_d = tl.arange(0, HEAD_PAD)
    mask = (offs_m < num_queries)[:, None] & (offs_d < HEAD_DIM)[None, :]
    token = (q_begin + offs_m).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * q_stride + head * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0)
    positions = start + offs_m
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(alibi_ptr + head) * 1.4426950408889634
    table = block_table_ptr + tl.load(row_slot_ptr + row).to(tl.int64) * table_stride
    head_offset = layer_offset + (head // GROUP) * (BLOCK_SIZE * HEAD_DIM)
    seq_len = start + num_queries
    end = tl.minimum(start + first + TILE_M, seq_len)
    full_end = (start + first + 1) // TILE_N * TILE_N  # every query of the tile sees all keys before it
    begin = 0
    full_begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(start + first + 1 - window, 0) // TILE_N * TILE_N
        last_first_key = tl.maximum(tl.minimum(start + first + TILE_M, seq_len) - window, 0)
        full_begin = tl.minimum(tl.cdiv(last_first_key, TILE_N) * TILE_N, full_end)

    m_i = tl.full([TILE_M], -1.0e30, tl.float32)
    l_i = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, HEAD_PAD], tl.float32)
    if HAS_WINDOW:
        for key in tl.range(begin, full_begin, TILE_N):
            acc, l_i, m_i = _attend_tile(
                acc, l_i, m_i, q, key, table, pool_ptr, pool_desc, block_stride, head_offset, v_offset, scale_log2,
                softcap, window, positions, seq_len, slope, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, TILE_N, True,
                HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, USE_TMA,
            )  # fmt: skip
    for key in tl.range(full_begin, full_end, TILE_N, num_stages=STAGES):
        acc, l_i, m_i = _attend_tile(
            acc, l_i, m_i, q, key, table, pool_ptr, pool_desc, block_stride, head_offset, v_offset, scale_log2,
            softcap, window, positions, seq_len, slope, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, TILE_N, False,
            HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, USE_TMA,
        )  # fmt: skip
    for key in tl.range(full_end, end, TILE_N, num_stages=1):
        acc, l_i, m_i = _attend_tile(
            acc, l_i, m_i, q, key, table, pool_ptr, pool_desc, block_stride, head_offset, v_offset, scale_log2,
            softcap, window, positions, seq_len, slope, HEAD_DIM, HEAD_PAD, BLOCK_SIZE, TILE_N, True,
            HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, USE_TMA,
        )  # fmt: skip
    out = acc / l_i[:, None]
    tl.store(
        out_ptr + token[:, None] * out_stride + head * HEAD_DIM + offs_d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=mask,
    )
