# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose rows do not depend on each other, bit for bit, however many there are.

    y = x W^T [+ bias] [+ residual]                  y = silu(x W_gate^T) * (x W_up^T)

One program computes a tile of the output, all of K by itself and from its beginning: no split of K, no choice by shape.
An output element is then one chain of tensor-core sums, 16 columns of K after the other, over its own row of x and its
own row of W. Tile sizes do not enter: rows and columns of a tile are independent in the instruction, its depth is 16
for every size, and what lies behind the end of K or of x counts as zeros, which change no sum. So `TILE_M` and `TILE_N`
may follow the number of tokens. Bias and residual are added in float32, the result is rounded once.

On Hopper tiles come through tensor descriptors (the copy engine fills in the zeros), elsewhere through masked loads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_tokens"])
def invariant_gemm_kernel(
    x_ptr,  # [num_tokens, K]
    token_desc,  # descriptor over x, blocks [TILE_M, TILE_K]; unused without USE_TMA
    weight_ptr,  # [N, K], or [2 N, K] with GATED
    weight_desc,  # descriptor over W, blocks [TILE_N, TILE_K]; unused without USE_TMA
    bias_ptr,  # [N] or unused
    out_ptr,  # [num_tokens, N]; with HAS_RESIDUAL added to
    num_tokens,
    N,
    K,
    x_stride,
    out_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,  # tiles of tokens whose programs run side by side, so that they share rows of W in the cache
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STAGES: tl.constexpr,
    USE_TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    group_size = GROUP * tl.cdiv(N, TILE_N)
    first_tile = pid // group_size * GROUP
    height = tl.minimum(tl.cdiv(num_tokens, TILE_M) - first_tile, GROUP)
    first_token = (first_tile + pid % group_size % height) * TILE_M
    first = pid % group_size // height * TILE_N
    tokens = first_token + tl.arange(0, TILE_M)
    rows = first + tl.arange(0, TILE_N)
    offs = tl.arange(0, TILE_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + rows.to(tl.int64)[:, None] * K
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    if GATED:
        up = tl.zeros([TILE_M, TILE_N], tl.float32)
    for k in tl.range(0, K, TILE_K, num_stages=STAGES):
        if USE_TMA:
            x = token_desc.load([first_token, k])
            w = weight_desc.load([first, k])
        else:
            columns = (k + offs)[None, :]
            x = tl.load(x_rows + columns, mask=(tokens < num_tokens)[:, None] & (columns < K), other=0.0)
            w = tl.load(weight_rows + columns, mask=(rows < N)[:, None] & (columns < K), other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)
        if GATED:
            if USE_TMA:
                u = weight_desc.load([N + first, k])
            else:
                u_rows = weight_ptr + (rows + N).to(tl.int64)[:, None] * K
                u = tl.load(u_rows + columns, mask=(rows < N)[:, None] & (columns < K), other=0.0)
            up = tl.dot(x, tl.trans(u), up)
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + tokens.to(tl.int64)[:, None] * out_stride + rows[None, :]
    mask = (tokens < num_tokens)[:, None] & (rows < N)[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
