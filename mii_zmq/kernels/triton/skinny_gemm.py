# SPDX-License-Identifier: Apache-2.0
"""Linear layers for a few tokens (2 to 128), where the weights' bytes are the cost.

    y = W x [+ bias] [+ residual]                    y = silu(W_gate x) * (W_up x)

One program streams TILE_N rows of W once and multiplies them with all tokens. W is the left operand, so that the tensor
core's 64 rows are filled with weights and its columns with as few tokens as there are. With SPLIT_K, several programs
share the rows; the one that finishes last adds up the partial sums, in a fixed order. On Hopper tiles come through
tensor descriptors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_tokens"])
def skinny_gemm_kernel(
    x_ptr,  # [num_tokens, K]
    x_desc,  # descriptor over x, blocks [M_PAD, TILE_K]; unused without USE_TMA
    weight_ptr,  # [N or 2 N, K]
    weight_desc,  # descriptor over W, blocks [TILE_N, TILE_K]; unused without USE_TMA
    bias_ptr,  # [N] or unused
    out_ptr,  # [num_tokens, N]; with HAS_RESIDUAL added to
    partial_ptr,  # [SPLIT_K, 1 or 2, M_PAD, N] float32, unused without SPLIT_K
    counter_ptr,  # [N / TILE_N] int32, zero between calls
    num_tokens,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    M_PAD: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
    USE_TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    K_SPLIT: tl.constexpr = K // SPLIT_K
    PLANE: tl.constexpr = M_PAD * N
    PLANES: tl.constexpr = 2 if GATED else 1
    pid = tl.program_id(0)
    split = tl.program_id(1)
    first = pid * TILE_N
    rows = first + tl.arange(0, TILE_N)
    tokens = tl.arange(0, M_PAD)
    k_begin = split * K_SPLIT
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    offs = tl.arange(0, TILE_K)
    acc = tl.zeros([TILE_N, M_PAD], tl.float32)
    acc_up = tl.zeros([TILE_N, M_PAD], tl.float32)
    for k in tl.range(k_begin, k_begin + K_SPLIT, TILE_K, num_stages=STAGES):
        if USE_TMA:
            w = weight_desc.load([first, k])
            x = x_desc.load([0, k])
        else:
            weight = weight_ptr + rows.to(tl.int64)[:, None] * K + (k + offs)[None, :]
            w = tl.load(weight, mask=(rows < N)[:, None], other=0.0)
            x = tl.load(
                x_ptr + tokens[:, None] * x_stride + (k + offs)[None, :], mask=(tokens < num_tokens)[:, None], other=0.0
            )
        acc = tl.dot(w, tl.trans(x), acc)
        if GATED:
            if USE_TMA:
                u = weight_desc.load([first + N, k])
            else:
                u = tl.load(weight + N * K, mask=(rows < N)[:, None], other=0.0)
            acc_up = tl.dot(u, tl.trans(x), acc_up)
    y = tl.trans(acc)
    up = tl.trans(acc_up)
    mask = (tokens < num_tokens)[:, None] & (rows < N)[None, :]
    if SPLIT_K > 1:
        cell = partial_ptr + tokens[:, None] * N + rows[None, :]
        tl.store(cell + split * (PLANES * PLANE), y, mask=mask)
        if GATED:
            tl.store(cell + (split * PLANES + 1) * PLANE, up, mask=mask)
        # All threads' stores must be visible before this program is counted as finished.
        tl.debug_barrier()
        finished = tl.atomic_add(counter_ptr + pid, 1, sem="acq_rel", scope="gpu")
        if finished != SPLIT_K - 1:
            return
        tl.debug_barrier()
        y = tl.zeros([M_PAD, TILE_N], tl.float32)
        up = tl.zeros([M_PAD, TILE_N], tl.float32)
        for index in tl.static_range(SPLIT_K):
            y += tl.load(cell + index * (PLANES * PLANE), mask=mask, other=0.0, cache_modifier=".cg")
            if GATED:
                up += tl.load(cell + (index * PLANES + 1) * PLANE, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(counter_ptr + pid, 0)
    if GATED:
        y = y * tl.sigmoid(y) * up
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + tokens[:, None] * out_stride + rows[None, :]
    if HAS_RESIDUAL:
        y += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)
