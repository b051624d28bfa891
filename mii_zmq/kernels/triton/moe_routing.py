# SPDX-License-Identifier: Apache-2.0
"""Which experts every token goes to, and the work lists that the grouped products read from device memory.

    logits = router x;  p = softmax(logits);  the TOP_K largest p, divided by their sum if RENORMALISE

A token's choice j is its *entry* token * TOP_K + j. Entries sorted by expert, then by token, have a *place*; the
experts' rows lie behind each other without gaps. A work item is up to TILE_M consecutive places of one expert.
Entries whose expert another rank holds, and tokens behind the live ones, have no place (-1).

For few tokens one program does everything; for many, `choose`, `sort` and `items` follow each other. Nothing is left
to atomics, so the same tokens always have the same places.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ITEM_WORDS = tl.constexpr(4)
"""int32 values per work item: expert (of those held), first place, place behind the last of this expert, unused."""


@triton.jit(do_not_specialize=["num_tokens"])
def router_kernel(
    x_ptr,  # [T, K]
    router_ptr,  # [NUM_EXPERTS, K]
    logits_ptr,  # out [T, NUM_EXPERTS]
    num_tokens,
    x_stride,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_E: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tokens = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    experts = tl.program_id(1) * TILE_E + tl.arange(0, TILE_E)
    offs = tl.arange(0, TILE_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * x_stride
    router_rows = router_ptr + experts[:, None] * K
    acc = tl.zeros([TILE_T, TILE_E], tl.float32)
    for k in tl.range(0, K, TILE_K, num_stages=STAGES):
        columns = (k + offs)[None, :]
        x = tl.load(x_rows + columns, mask=(tokens < num_tokens)[:, None] & (columns < K), other=0.0)
        w = tl.load(router_rows + columns, mask=(experts < NUM_EXPERTS)[:, None] & (columns < K), other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)
    cells = logits_ptr + tokens.to(tl.int64)[:, None] * NUM_EXPERTS + experts[None, :]
    mask = (tokens < num_tokens)[:, None] & (experts < NUM_EXPERTS)[None, :]
    tl.store(cells, acc.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def choose(
    logits_ptr,
    tokens,  # [T]
    experts,  # [E_PAD]
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    T: tl.constexpr,
    E_PAD: tl.constexpr,
):
    """Per token and expert: which choice it is (-1: none), and its weight. Of equal logits the first expert wins."""
    exists = (tokens < num_tokens)[:, None] & (experts < NUM_EXPERTS)[None, :]
    cells = logits_ptr + tokens.to(tl.int64)[:, None] * NUM_EXPERTS + experts[None, :]
    logits = tl.load(cells, mask=exists, other=float("-inf")).to(tl.float32)
    powers = tl.exp(logits - tl.max(logits, 1)[:, None])
    total = tl.sum(powers, 1)
    # NaN compares with nothing, but every token must choose TOP_K different experts that exist.
    keys = tl.where(logits == logits, logits, float("-inf"))
    is_free = tl.broadcast_to((experts < NUM_EXPERTS)[None, :], [T, E_PAD])
    slots = tl.full([T, E_PAD], -1, tl.int32)
    chosen = tl.zeros([T], tl.float32)
    for slot in tl.static_range(TOP_K):
        best = tl.max(tl.where(is_free, keys, float("-inf")), 1)
        is_best = is_free & (keys == best[:, None])
        first = tl.min(tl.where(is_best, experts[None, :], E_PAD), 1)
        is_first = experts[None, :] == first[:, None]
        slots = tl.where(is_first, slot, slots)
        is_free = is_free & (experts[None, :] != first[:, None])
        chosen += tl.sum(tl.where(is_first, powers, 0.0), 1)
    if RENORMALISE:
        total = chosen
    return slots, powers / total[:, None]


@triton.jit
def write_items(counts, experts, item_ptr, num_items_ptr, TILE_M: tl.constexpr):
    """The work items of experts with so many rows each; returns each expert's first place."""
    begins = tl.cumsum(counts, 0) - counts
    tiles = (counts + TILE_M - 1) // TILE_M
    items = item_ptr + (tl.cumsum(tiles, 0) - tiles) * ITEM_WORDS
    for index in range(0, tl.max(tiles, 0)):
        mask = index < tiles
        tl.store(items + index * ITEM_WORDS, experts, mask=mask)
        tl.store(items + index * ITEM_WORDS + 1, begins + index * TILE_M, mask=mask)
        tl.store(items + index * ITEM_WORDS + 2, begins + counts, mask=mask)
    tl.store(num_items_ptr, tl.sum(tiles, 0))
    return begins


@triton.jit(do_not_specialize=["num_tokens", "first_expert"])
def route_few_kernel(
    logits_ptr,  # [T, NUM_EXPERTS]
    live_ptr,  # [1] int32: tokens in front that count; unused without HAS_LIVE
    weight_ptr,  # out [T * TOP_K] float32, by entry
    place_ptr,  # out [T * TOP_K] int32, by entry
    order_ptr,  # out [T * TOP_K] int32: the entry at each place
    item_ptr,  # out [items, ITEM_WORDS] int32
    num_items_ptr,  # out [1] int32
    num_tokens,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    HELD: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    T_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    PDL: tl.constexpr,
):
    tokens = tl.arange(0, T_PAD)
    experts = tl.arange(0, E_PAD)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    live = num_tokens
    if HAS_LIVE:
        live = tl.minimum(live, tl.load(live_ptr))
    slots, weights = choose(logits_ptr, tokens, experts, num_tokens, NUM_EXPERTS, TOP_K, RENORMALISE, T_PAD, E_PAD)
    held = experts - first_expert
    is_chosen = (slots >= 0) & (tokens < num_tokens)[:, None]
    is_routed = is_chosen & ((held >= 0) & (held < HELD))[None, :] & (tokens < live)[:, None]
    hits = is_routed.to(tl.int32)
    begins = write_items(tl.sum(hits, 0), held, item_ptr, num_items_ptr, TILE_M)
    places = begins[None, :] + tl.cumsum(hits, 0) - hits
    entries = tokens[:, None] * TOP_K + slots
    tl.store(weight_ptr + entries, weights, mask=is_chosen)
    tl.store(place_ptr + entries, tl.where(is_routed, places, -1), mask=is_chosen)
    tl.store(order_ptr + places, entries, mask=is_routed)


@triton.jit(do_not_specialize=["num_tokens", "first_expert"])
def choose_kernel(
    logits_ptr,  # [T, NUM_EXPERTS]
    live_ptr,  # [1] int32: tokens in front that count; unused without HAS_LIVE
    weight_ptr,  # out [T * TOP_K] float32, by entry
    chosen_ptr,  # out [T * TOP_K] int32, by entry: expert of those held, or -1
    place_ptr,  # out [T * TOP_K] int32, by entry: -1
    num_tokens,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    HELD: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    TILE_T: tl.constexpr,
    E_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    tokens = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    experts = tl.arange(0, E_PAD)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    live = num_tokens
    if HAS_LIVE:
        live = tl.minimum(live, tl.load(live_ptr))
    slots, weights = choose(logits_ptr, tokens, experts, num_tokens, NUM_EXPERTS, TOP_K, RENORMALISE, TILE_T, E_PAD)
    held = experts - first_expert
    is_chosen = (slots >= 0) & (tokens < num_tokens)[:, None]
    is_routed = ((held >= 0) & (held < HELD))[None, :] & (tokens < live)[:, None]
    entries = tokens[:, None] * TOP_K + slots
    tl.store(weight_ptr + entries, weights, mask=is_chosen)
    tl.store(chosen_ptr + entries, tl.where(is_routed, held[None, :], -1), mask=is_chosen)
    tl.store(place_ptr + entries, tl.full([TILE_T, E_PAD], -1, tl.int32), mask=is_chosen)


@triton.jit(do_not_specialize=["num_entries"])
def sort_kernel(
    chosen_ptr,  # [num_entries] int32: expert of those held, or -1
    place_ptr,  # out [num_entries] int32, where the entry has an expert
    order_ptr,  # out [num_entries] int32
    count_ptr,  # out [held experts] int32
    num_entries,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per expert."""
    expert = tl.program_id(0)
    offs = tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    below = tl.zeros([CHUNK], tl.int32)
    mine = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_entries, CHUNK):
        chosen = tl.load(chosen_ptr + start + offs, mask=start + offs < num_entries, other=-1)
        below += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
        mine += (chosen == expert).to(tl.int32)
    tl.store(count_ptr + expert, tl.sum(mine, 0))
    first = tl.sum(below, 0)
    for start in range(0, num_entries, CHUNK):
        entries = start + offs
        chosen = tl.load(chosen_ptr + entries, mask=entries < num_entries, other=-1)
        hits = (chosen == expert).to(tl.int32)
        places = first + tl.cumsum(hits, 0) - hits
        tl.store(place_ptr + entries, places, mask=chosen == expert)
        tl.store(order_ptr + places, entries, mask=chosen == expert)
        first += tl.sum(hits, 0)


@triton.jit
def items_kernel(
    count_ptr,  # [HELD] int32
    item_ptr,  # out [items, ITEM_WORDS] int32
    num_items_ptr,  # out [1] int32
    HELD: tl.constexpr,
    HELD_PAD: tl.constexpr,
    TILE_M: tl.constexpr,
    PDL: tl.constexpr,
):
    experts = tl.arange(0, HELD_PAD)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    counts = tl.load(count_ptr + experts, mask=experts < HELD, other=0)
    write_items(counts, experts, item_ptr, num_items_ptr, TILE_M)
