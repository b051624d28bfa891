# SPDX-License-Identifier: Apache-2.0
"""Weight times vector for one token: the bandwidth-bound linear layers of decode at batch 1.

    y = W x                            plain, plus bias or residual
    y = W (x / rms(x) * g)             with NORM: the RMSNorm in front is folded in
    y = act(W_gate x) * (W_up x)       with GATED: the activation behind is folded in (W = [gate; up])

One program handles ROWS output rows; weights are read once and evicted first. With PDL the first weight tile is
requested before the kernel waits for its predecessor (weights never depend on it), which hides the start of every
kernel behind the end of the one before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def gemv_kernel(
    x_ptr,  # [K]
    weight_ptr,  # [N or 2 N, K]
    norm_ptr,  # [K] or unused
    bias_ptr,  # [N] or unused
    residual_ptr,  # [N] or unused
    out_ptr,  # [N]
    eps,
    norm_offset,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < N
    offs = tl.arange(0, TILE_K)
    weight = weight_ptr + rows.to(tl.int64)[:, None] * K + offs[None, :]
    if TILE_K > K:
        mask = row_mask[:, None] & (offs < K)[None, :]
    else:
        mask = row_mask[:, None]
    w = tl.load(weight, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up = weight + N.to(tl.int64) * K
        u = tl.load(up, mask=mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([ROWS, TILE_K], tl.float32)
    acc_u = tl.zeros([ROWS, TILE_K], tl.float32)
    squares = tl.zeros([TILE_K], tl.float32)
    for k in tl.static_range(0, K, TILE_K):
        k_mask = k + offs < K
        x = tl.load(x_ptr + k + offs, mask=k_mask, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * (tl.load(norm_ptr + k + offs, mask=k_mask, other=0.0).to(tl.float32) + norm_offset)
        if k > 0:
            tile_mask = row_mask[:, None] & k_mask[None, :]
            w = tl.load(weight + k, mask=tile_mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                u = tl.load(up + k, mask=tile_mask, other=0.0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            acc_u += u.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= scale
    if GATED:
        y = y * tl.sigmoid(y) * (tl.sum(acc_u, 1) * scale)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=row_mask)
