# SPDX-License-Identifier: Apache-2.0
"""Attention of one query token per sequence over its paged KV, split along the keys (flash decoding).

    out[r, h] = softmax(scale * q[r, h] . K[r, kv(h), :n_r]) V[r, kv(h), :n_r]

One program handles one work item (a row and a share of its keys, see `batch_inputs`) of one kv head: the heads of a
GQA group are the rows of its matrix products, so K and V are read once. Programs without an item return at once. The
program that finishes last for a (row, kv head) merges the partial results, found by an atomic counter that it also
resets, so there is no second kernel. Softmax runs in base 2 and float32; source: Dao et al., "Flash-Decoding for
long-context inference", 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def decode_attention_kernel(
    q_ptr,  # [T, num_heads * D] rows of q_stride; row r is token r
    pool_ptr,
    out_ptr,  # [T, num_heads * D]
    partial_ptr,  # [items, Hkv, G, D] float32
    partial_stat_ptr,  # [items, Hkv, G, 2] float32: running maximum (base 2) and sum
    counter_ptr,  # [R, Hkv] int32, zero between calls
    block_table_ptr,  # [slots, max_blocks] int32
    items_ptr,  # [items, 8] int32: row or -1, split, splits of the row, keys of the row, slot
    alibi_ptr,  # [num_heads] float32 slopes, or unused
    q_stride,
    out_stride,
    table_stride,
    block_stride,  # elements between blocks of the pool
    layer_offset,  # elements from the start of the pool to the keys of the layer's block 0
    v_offset,  # elements from a K tile to its V tile
    scale_log2,  # softmax scale * log2(e)
    softcap,  # unused unless HAS_SOFTCAP
    window,  # keys visible, own one included; unused unless HAS_WINDOW
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    record = items_ptr + item * 8
    row = tl.load(record)
    split = tl.load(record + 1)
    num_splits = tl.load(record + 2)
    seq_len = tl.load(record + 3)
    slot = tl.load(record + 4)
    if PDL:
        # The items were made before the predecessor began; what it writes is read only behind this line.
        gdc_wait()
        gdc_launch_dependents()
    if row < 0:
        return
    first_key = 0
    if HAS_WINDOW:
        first_key = (tl.maximum(seq_len - window, 0) // BLOCK_SIZE) * BLOCK_SIZE
    chunk = tl.cdiv(tl.cdiv(seq_len - first_key, num_splits), BLOCK_SIZE) * BLOCK_SIZE
    start = first_key + split * chunk
    end = tl.minimum(start + chunk, seq_len)

    offs_g = tl.arange(0, GROUP_PAD)
    offs_d = tl.arange(0, HEAD_PAD)
    offs_n = tl.arange(0, TILE)
    g_mask = offs_g < GROUP
    d_mask = offs_d < HEAD_DIM
    head = kv_head * GROUP + offs_g
    q = tl.load(
        q_ptr + row.to(tl.int64) * q_stride + head[:, None] * HEAD_DIM + offs_d[None, :],
        mask=g_mask[:, None] & d_mask[None, :],
        other=0.0,
    )
    if HAS_ALIBI:
        slope = tl.load(alibi_ptr + head, mask=g_mask, other=0.0) * 1.4426950408889634
    table = block_table_ptr + slot.to(tl.int64) * table_stride
    head_offset = layer_offset + kv_head * (BLOCK_SIZE * HEAD_DIM)

    m_i = tl.full([GROUP_PAD], -1.0e30, tl.float32)
    l_i = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for key in tl.range(start, end, TILE, num_stages=STAGES):
        block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
        tile = pool_ptr + block * block_stride + head_offset + (key % BLOCK_SIZE) * HEAD_DIM
        offsets = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        n_mask = key + offs_n < end
        # Slots beyond the sequence cost nothing, and are zero: they hold whatever was there before, possibly NaN, and
        # 0 * NaN is NaN.
        kv_mask = n_mask[:, None]
        if HEAD_PAD != HEAD_DIM:
            kv_mask = kv_mask & d_mask[None, :]
        k = tl.load(tile + offsets, mask=kv_mask, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale_log2
        if HAS_SOFTCAP:
            # scale_log2 carries log2(e); the cap applies to the natural-scale score.
            x = s * (0.6931471805599453 / softcap)
            t = 2.0 / (1.0 + tl.exp2(-2.885390081777927 * x)) - 1.0
            s = softcap * 1.4426950408889634 * t
        if HAS_ALIBI:
            s += slope[:, None] * (key + offs_n - (seq_len - 1))[None, :].to(tl.float32)
        visible = n_mask
        if HAS_WINDOW:
            visible = visible & (key + offs_n > seq_len - 1 - window)
        s = tl.where(visible[None, :], s, -1.0e30)
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.where(visible[None, :], tl.exp2(s - m_new[:, None]), 0.0)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(tile + v_offset + offsets, mask=kv_mask, other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m_i = m_new

    out = out_ptr + row.to(tl.int64) * out_stride + head[:, None] * HEAD_DIM + offs_d[None, :]
    out_mask = g_mask[:, None] & d_mask[None, :]
    if num_splits == 1:
        tl.store(out, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
        return

    base = (item * NUM_KV_HEADS + kv_head).to(tl.int64)
    g_offset = offs_g[:, None] * HEAD_PAD + offs_d[None, :]
    tl.store(partial_ptr + base * (GROUP_PAD * HEAD_PAD) + g_offset, acc)
    tl.store(partial_stat_ptr + base * (GROUP_PAD * 2) + offs_g * 2, m_i)
    tl.store(partial_stat_ptr + base * (GROUP_PAD * 2) + offs_g * 2 + 1, l_i)
    # All threads' stores must be visible before this program is counted as finished.
    tl.debug_barrier()
    counter = counter_ptr + row * NUM_KV_HEADS + kv_head
    finished = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if finished != num_splits - 1:
        return
    tl.debug_barrier()
    base = ((item - split) * NUM_KV_HEADS + kv_head).to(tl.int64)
    m_i = tl.full([GROUP_PAD], -1.0e30, tl.float32)
    l_i = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for index in range(num_splits):
        part = base + index * NUM_KV_HEADS
        m_part = tl.load(partial_stat_ptr + part * (GROUP_PAD * 2) + offs_g * 2, cache_modifier=".cg")
        l_part = tl.load(partial_stat_ptr + part * (GROUP_PAD * 2) + offs_g * 2 + 1, cache_modifier=".cg")
        a_part = tl.load(partial_ptr + part * (GROUP_PAD * HEAD_PAD) + g_offset, cache_modifier=".cg")
        m_new = tl.maximum(m_i, m_part)
        alpha = tl.exp2(m_i - m_new)
        beta = tl.exp2(m_part - m_new)
        acc = acc * alpha[:, None] + a_part * beta[:, None]
        l_i = l_i * alpha + l_part * beta
        m_i = m_new
    tl.store(out, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(counter, 0)
