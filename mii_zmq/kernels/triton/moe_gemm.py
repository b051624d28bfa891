# SPDX-License-Identifier: Apache-2.0
"""The experts' two products, and the sum over each token's experts.

    inner = activation(gate[e] x) * (up[e] x)          GATED, with rows of x gathered by the sorted order
    y = p (down[e] inner)                              rows are places
    out = [out +] sum of a token's y [+ sigmoid(switch x) * shared]

One program of the products handles TILE_N rows of one expert's weights (twice, gate and up, where GATED) and the places
of one work item, see `moe_routing`. Weights are the left operand, so that the tensor core's 64 rows are filled however
few tokens an expert has. Items are sorted by expert and GROUP of them run side by side, so that tiles of one expert
share its weights in the cache. With SPLIT_K, several programs share the rows; their sums are added up by `combine`,
which adds in a fixed order: nothing depends on who comes first. The grid is as large as the items may become; programs
without an item return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mii_zmq.kernels.triton.elementwise import activate
from mii_zmq.kernels.triton.moe_routing import ITEM_WORDS


@triton.jit
def expert_gemm_kernel(
    x_ptr,  # [T, K] if GATED, else [places, K]
    weight_ptr,  # [held experts, 2 N if GATED else N, K]
    weight_desc,  # descriptor over the weights' rows, blocks [TILE_N, TILE_K]; unused without USE_TMA
    item_ptr,  # [items, ITEM_WORDS] int32
    num_items_ptr,  # [1] int32
    order_ptr,  # [places] int32: entry = token * TOP_K + choice
    route_weight_ptr,  # [entries] float32, used unless GATED
    out_ptr,  # [SPLIT_K, places, N]
    x_stride,
    out_stride,
    split_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,  # of activation
    STAGES: tl.constexpr,
    USE_TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    N_TILES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    # Parts are whole tiles, so that only the last one can reach beyond K.
    K_PART: tl.constexpr = (K + SPLIT_K * TILE_K - 1) // (SPLIT_K * TILE_K) * TILE_K
    IS_EVEN: tl.constexpr = K % (SPLIT_K * TILE_K) == 0
    pid = tl.program_id(0)
    split = tl.program_id(1)
    first_item = pid // (GROUP * N_TILES) * GROUP
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    height = tl.minimum(tl.load(num_items_ptr) - first_item, GROUP)
    if height <= 0:
        return
    index = pid % (GROUP * N_TILES)
    first = index // height * TILE_N
    if first >= N:
        return
    item = item_ptr + (first_item + index % height) * ITEM_WORDS
    expert = tl.load(item)
    places = tl.load(item + 1) + tl.arange(0, TILE_M)
    is_place = places < tl.load(item + 2)
    entries = tl.load(order_ptr + places, mask=is_place, other=0)
    if GATED:
        x_rows = x_ptr + (entries // TOP_K).to(tl.int64)[:, None] * x_stride
    else:
        x_rows = x_ptr + places.to(tl.int64)[:, None] * x_stride
    rows = first + tl.arange(0, TILE_N)
    expert_row = expert * (2 * N if GATED else N)
    weight_rows = weight_ptr + (expert_row.to(tl.int64) + rows)[:, None] * K
    offs = tl.arange(0, TILE_K)
    acc = tl.zeros([TILE_N, TILE_M], tl.float32)
    acc_up = tl.zeros([TILE_N, TILE_M], tl.float32)
    for k in tl.range(split * K_PART, split * K_PART + K_PART, TILE_K, num_stages=STAGES):
        columns = (k + offs)[None, :]
        x_mask = is_place[:, None]
        w_mask = (rows < N)[:, None]
        if not IS_EVEN:
            x_mask = x_mask & (columns < K)
            w_mask = w_mask & (columns < K)
        x = tl.load(x_rows + columns, mask=x_mask, other=0.0)
        if USE_TMA:
            w = weight_desc.load([expert_row + first, k])
        else:
            w = tl.load(weight_rows + columns, mask=w_mask, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
        if GATED:
            if USE_TMA:
                u = weight_desc.load([expert_row + N + first, k])
            else:
                u = tl.load(weight_rows + N * K + columns, mask=w_mask, other=0.0)
            acc_up = tl.dot(u, tl.trans(x), acc_up)
    if GATED:
        y = tl.trans(activate(acc, KIND) * acc_up)
    else:
        y = tl.trans(acc) * tl.load(route_weight_ptr + entries, mask=is_place, other=0.0)[:, None]
    out = out_ptr + split * split_stride + places.to(tl.int64)[:, None] * out_stride + rows[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=is_place[:, None] & (rows < N)[None, :])


@triton.jit
def combine_kernel(
    y_ptr,  # [SPLIT_K, places, D]
    place_ptr,  # [T * TOP_K] int32, -1: no place
    x_ptr,  # [T, D], used with HAS_SWITCH
    switch_ptr,  # [D], used with HAS_SWITCH
    shared_ptr,  # [T, D], used with HAS_SHARED
    out_ptr,  # [T, D]; with HAS_RESIDUAL added to
    split_stride,
    x_stride,
    shared_stride,
    out_stride,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    TOP_K: tl.constexpr,  # 0: no expert is held here
    SPLIT_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_SWITCH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offs < D
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([TILE], tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(place_ptr + token * TOP_K + choice).to(tl.int64)
        for split in tl.static_range(SPLIT_K):
            cells = y_ptr + split * split_stride + place * D + offs
            total += tl.load(cells, mask=mask & (place >= 0), other=0.0).to(tl.float32)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + token * shared_stride + offs, mask=mask, other=0.0).to(tl.float32)
        if HAS_SWITCH:
            # Every tile of a token computes it, which is less than telling the others.
            columns = tl.arange(0, D_PAD)
            x = tl.load(x_ptr + token * x_stride + columns, mask=columns < D, other=0.0).to(tl.float32)
            switch = tl.load(switch_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
            shared *= tl.sigmoid(tl.sum(x * switch, 0))
        total += shared
    out = out_ptr + token * out_stride + offs
    if HAS_RESIDUAL:
        total += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)
