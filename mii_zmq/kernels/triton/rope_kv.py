# SPDX-License-Identifier: Apache-2.0
"""Optional q/k RMSNorm, rotary embedding of q and k, and the write of k and v into the paged pool, in one pass.

    rotation of adjacent channels:  (a, b) -> (a cos - b sin, b cos + a sin)       (RoFormer, arXiv 2104.09864)

The weight loader stores heads so that the two channels of a pair are neighbours; only the first ROTARY_DIM channels of
a head are rotated. Input is the fused projection
[T, (Hq + 2 Hkv) D]. One program handles one token and a group of heads: q heads are rotated in place, k heads go to
the pool, v heads are copied to the pool. Tokens with cell -1 (padding) write nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rope_kv_kernel(
    qkv_ptr,
    pool_ptr,
    cos_ptr,  # [rows, ROTARY_DIM / 2] float32
    sin_ptr,
    position_ptr,  # [T] int32: row of the tables
    cell_ptr,  # [T] int64: block * BLOCK_SIZE + token within the block, or -1
    q_norm_ptr,  # [D], unused unless HAS_QK_NORM; float32: multiplied before anything is rounded
    k_norm_ptr,
    qkv_stride,
    block_stride,
    layer_offset,
    v_offset,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    offs = tl.arange(0, HEAD_PAD)
    is_q = heads < NUM_HEADS
    is_v = heads >= NUM_HEADS + NUM_KV_HEADS
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (offs < HEAD_DIM)[None, :]
    if HAS_QK_NORM:
        w_q = tl.load(q_norm_ptr + offs, mask=offs < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        w_k = tl.load(k_norm_ptr + offs, mask=offs < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    cell = tl.load(cell_ptr + token)
    if cell < 0:
        return
    source = qkv_ptr + token * qkv_stride + heads[:, None] * HEAD_DIM + offs[None, :]
    raw = tl.load(source, mask=mask, other=0.0)
    dtype = qkv_ptr.dtype.element_ty
    turned = raw
    if HAS_QK_NORM or HAS_ROPE:
        x = raw.to(tl.float32)
        if HAS_QK_NORM:
            scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
            normed = x * scale[:, None]
            if q_norm_ptr.dtype.element_ty == dtype:
                # Rounded to the activation dtype before it is weighted, as unfused code rounds it.
                normed = normed.to(dtype).to(tl.float32)
            x = (normed * tl.where(is_q[:, None], w_q, w_k)).to(dtype).to(tl.float32)
        if HAS_ROPE:
            half = tl.arange(0, HEAD_PAD // 2)
            half_mask = half < ROTARY_DIM // 2
            position = tl.load(position_ptr + token).to(tl.int64) * (ROTARY_DIM // 2)
            # Channels behind ROTARY_DIM are turned by nothing: cosine 1, sine 0.
            rest: tl.constexpr = 1.0 if ROTARY_DIM < HEAD_DIM else 0.0
            cos = tl.load(cos_ptr + position + half, mask=half_mask, other=rest)[None, :]
            sin = tl.load(sin_ptr + position + half, mask=half_mask, other=0.0)[None, :]
            a, b = tl.split(tl.reshape(x, (HEADS_PER_PROGRAM, HEAD_PAD // 2, 2)))
            x = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (HEADS_PER_PROGRAM, HEAD_PAD))
        turned = tl.where(is_v[:, None], raw, x.to(dtype))
        tl.store(source, turned, mask=mask & is_q[:, None])
    kv_head = tl.where(is_v, heads - NUM_HEADS - NUM_KV_HEADS, heads - NUM_HEADS)
    base = (cell // BLOCK_SIZE) * block_stride + layer_offset + (cell % BLOCK_SIZE) * HEAD_DIM
    target = pool_ptr + base + kv_head[:, None] * (BLOCK_SIZE * HEAD_DIM) + tl.where(is_v, v_offset, 0)[:, None]
    tl.store(target + offs[None, :], turned, mask=mask & (heads >= NUM_HEADS)[:, None])
