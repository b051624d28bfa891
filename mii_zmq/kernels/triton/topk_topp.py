# SPDX-License-Identifier: Apache-2.0
"""Top-k, top-p and min-p without a sort: for each row the threshold (T, L) of its kept set.

A token is kept when z > T, or z = T and its id <= L; z = logit / temperature. The set is the one of transformers'
warpers in the order top-k (all ties of the k-th kept), top-p (of equal logits at the edge the lowest ids first), min-p.

Both filters ask for the largest v whose measure over {z >= v} reaches a target: the measure is a count (top-k) or a
mass of exp(z - max) (top-p). Two passes over the vocabulary measure 14 pivots each, first at growing distances from
the maximum, then evenly inside the bracket found; a third collects the bracket's tokens, a few thousand at most as a
rule, for the exact search (`topk_edge`). Sums of a pass are made tile by tile and added in the order of the tiles, so
a row's result depends on nothing beside it.

Launch order: row_max, pivot_sums (pass 0), pivot_sums (pass 1), collect, then `topk_edge.threshold`. Rows that need no
search return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mii_zmq.kernels.triton.sampling import (
    FLAG_DRAWN,
    FLAG_MIN_P,
    FLAG_TOP_K,
    FLAG_TOP_P,
    INF_KEY,
    LOWEST_KEY,
    MINUS_INF_KEY,
    WORD_FLAGS,
    WORD_TEMPERATURE,
    WORD_TOP_K,
    WORD_TOP_P,
    from_sortable,
    load_float,
    load_int64,
    load_record,
    sortable,
    tempered,
)

NUM_PIVOTS = 16
"""Pivots of a pass; the first and the last are the ends of the bracket."""


@triton.jit
def largest_key_of(row_max_ptr, row, NUM_TILES: tl.constexpr, PAD: tl.constexpr):
    """Key of the row's largest z."""
    offs = tl.arange(0, PAD)
    keys = tl.load(row_max_ptr + row.to(tl.int64) * NUM_TILES + offs, mask=offs < NUM_TILES, other=LOWEST_KEY)
    return tl.max(keys, 0)


@triton.jit
def pass_sums(sum_ptr, row, PASS: tl.constexpr, NUM_TILES: tl.constexpr, PAD: tl.constexpr):
    """[16] float64: the measure at each pivot of a pass, over the whole row."""
    tiles = tl.arange(0, PAD)
    offs = tiles[:, None] * 16 + tl.arange(0, 16)[None, :]
    base = sum_ptr + (row.to(tl.int64) * 2 + PASS) * (NUM_TILES * 16)
    return tl.sum(tl.load(base + offs, mask=(tiles < NUM_TILES)[:, None], other=0.0), 0)


@triton.jit
def target_of(record, flags, first_sums):
    """What the bracket's measure must reach: k, or top_p of the whole mass."""
    index = tl.arange(0, 16)
    total = tl.sum(tl.where(index == 15, first_sums, 0.0), 0)
    by_mass = load_int64(record, WORD_TOP_P).to(tl.float64, bitcast=True) * total
    return tl.where((flags & FLAG_TOP_K) != 0, tl.load(record + WORD_TOP_K).to(tl.float64), by_mass)


@triton.jit
def bracket_of(pivot_ptr, sums, target, row, PASS: tl.constexpr):
    """(low, high, measure at high): the edge lies in [low, high)."""
    index = tl.arange(0, 16)
    reaches = ((sums >= target) & (index > 0)) | (index == 15)
    found = tl.min(tl.where(reaches, index, 15), 0)
    pivots = tl.load(pivot_ptr + (row * 2 + PASS) * 16 + index)
    low = tl.max(tl.where(index == found, pivots, float("-inf")), 0)
    high = tl.max(tl.where(index == found - 1, pivots, float("-inf")), 0)
    return low, high, tl.sum(tl.where(index == found - 1, sums, 0.0), 0)


@triton.jit
def row_max_kernel(
    logits_ptr,
    params_ptr,
    slot_ptr,
    num_rows_ptr,
    row_max_ptr,  # out [R, tiles] int32 keys
    count_ptr,  # out [R] int32: zeroed for `collect`
    logits_stride,
    vocab_size,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    if row >= tl.load(num_rows_ptr):
        return
    record = load_record(params_ptr, slot_ptr, row, WORDS)
    flags = tl.load(record + WORD_FLAGS)
    if ((flags & FLAG_DRAWN) == 0) | ((flags & (FLAG_TOP_K | FLAG_TOP_P | FLAG_MIN_P)) == 0):
        return
    offs = tile * TILE + tl.arange(0, TILE)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    z = tempered(row_ptr, offs, offs < vocab_size, load_float(record, WORD_TEMPERATURE))
    tl.store(row_max_ptr + row.to(tl.int64) * tl.num_programs(1) + tile, tl.max(sortable(z), 0))
    if tile == 0:
        tl.store(count_ptr + row, 0)


@triton.jit
def pivot_sums_kernel(
    logits_ptr,
    params_ptr,
    slot_ptr,
    num_rows_ptr,
    row_max_ptr,
    pivot_ptr,  # [R, 2, 16] float32, descending; row PASS written
    sum_ptr,  # [R, 2, tiles, 16] float64; row PASS written
    logits_stride,
    vocab_size,
    PASS: tl.constexpr,
    WORDS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    if row >= tl.load(num_rows_ptr):
        return
    record = load_record(params_ptr, slot_ptr, row, WORDS)
    flags = tl.load(record + WORD_FLAGS)
    if ((flags & FLAG_DRAWN) == 0) | ((flags & (FLAG_TOP_K | FLAG_TOP_P)) == 0):
        return
    largest_key = largest_key_of(row_max_ptr, row, NUM_TILES, PAD)
    if (largest_key >= INF_KEY) | (largest_key <= MINUS_INF_KEY):
        return
    largest = from_sortable(largest_key)
    low = float("-inf")
    high = float("inf")
    if PASS == 1:
        first_sums = pass_sums(sum_ptr, row, 0, NUM_TILES, PAD)
        low, high, _ = bracket_of(pivot_ptr, first_sums, target_of(record, flags, first_sums), row, 0)
    top = tl.minimum(high, largest)
    offs = tile * TILE + tl.arange(0, TILE)
    in_row = offs < vocab_size
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    z = tempered(row_ptr, offs, in_row, load_float(record, WORD_TEMPERATURE))
    weights = tl.where((flags & FLAG_TOP_K) != 0, 1.0, tl.exp(z - largest))
    weights = tl.where(in_row, weights, 0.0)
    out = sum_ptr + ((row.to(tl.int64) * 2 + PASS) * NUM_TILES + tile) * 16
    for index in tl.static_range(16):
        # Distances grow from 0.17 to 18.8: the edge of a flat row lies near its maximum, that of a steep one far. With
        # these, edges in the bulk of normally distributed logits leave up to 4,000 candidates of 128,256.
        pivot = top - (0.09 * index * index + 0.08 * index)
        if PASS == 1 and low > float("-inf"):
            pivot = tl.maximum(top - (top - low) * (index / 15.0), low)
        if index == 0:
            pivot = high
        if index == 15:
            pivot = low
        tl.store(out + index, tl.sum(tl.where(z >= pivot, weights, 0.0), 0).to(tl.float64))
        if tile == 0:
            tl.store(pivot_ptr + (row * 2 + PASS) * 16 + index, pivot)


@triton.jit
def collect_kernel(
    logits_ptr,
    params_ptr,
    slot_ptr,
    num_rows_ptr,
    row_max_ptr,
    pivot_ptr,
    sum_ptr,
    count_ptr,  # [R] int32: tokens in the bracket; the list holds them if they are CAPACITY at most
    value_ptr,  # out [R, CAPACITY] float32
    id_ptr,  # out [R, CAPACITY] int32
    logits_stride,
    vocab_size,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    if row >= tl.load(num_rows_ptr):
        return
    record = load_record(params_ptr, slot_ptr, row, WORDS)
    flags = tl.load(record + WORD_FLAGS)
    if ((flags & FLAG_DRAWN) == 0) | ((flags & (FLAG_TOP_K | FLAG_TOP_P)) == 0):
        return
    largest_key = largest_key_of(row_max_ptr, row, NUM_TILES, PAD)
    if (largest_key >= INF_KEY) | (largest_key <= MINUS_INF_KEY):
        return
    target = target_of(record, flags, pass_sums(sum_ptr, row, 0, NUM_TILES, PAD))
    low, high, _ = bracket_of(pivot_ptr, pass_sums(sum_ptr, row, 1, NUM_TILES, PAD), target, row, 1)
    if ((flags & FLAG_TOP_K) != 0) & ((flags & FLAG_TOP_P) != 0):
        # The mass of the top-k set is needed, too.
        high = float("inf")
    offs = tile * TILE + tl.arange(0, TILE)
    in_row = offs < vocab_size
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    z = tempered(row_ptr, offs, in_row, load_float(record, WORD_TEMPERATURE))
    is_member = (in_row & (z >= low) & (z < high)).to(tl.int32)
    num_members = tl.sum(is_member, 0)
    if num_members > 0:
        place = tl.atomic_add(count_ptr + row, num_members) + tl.cumsum(is_member, 0) - 1
        is_stored = (is_member != 0) & (place < CAPACITY)
        base = row.to(tl.int64) * CAPACITY
        tl.store(value_ptr + base + place, z, mask=is_stored)
        tl.store(id_ptr + base + place, offs, mask=is_stored)
