# SPDX-License-Identifier: Apache-2.0
"""The exact edge of every row's kept set, among the candidates that `topk_topp` has collected.

One program per row searches over the bits of z, with masses as 64-bit integers, so that no result depends on the order
in which tokens were collected: by halves among HELD tokens in registers, eight-way where there are more and they have
to be read anew for every step. A row whose bracket overflows the list (thousands of equal logits, a huge k with top-p)
is searched over the whole vocabulary, eight-way too.
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
    WORD_LOG_MIN_P,
    WORD_TEMPERATURE,
    WORD_TOP_P,
    from_sortable,
    load_float,
    load_int64,
    load_record,
    sortable,
    tempered,
)
from mii_zmq.kernels.triton.topk_topp import bracket_of, largest_key_of, pass_sums, target_of

_SCALE = tl.constexpr(17592186044416.0)
"""2**44: masses of 2**18 tokens fit 63 bits."""


@triton.jit
def _candidates(start, count, is_list, value_ptr, id_ptr, row_ptr, temperature, low, high, CHUNK: tl.constexpr):
    """(keys, ids, z) of candidates [start, start + CHUNK); LOWEST_KEY for what is none."""
    offs = start + tl.arange(0, CHUNK)
    mask = offs < count
    if is_list:
        z = tl.load(value_ptr + offs, mask=mask, other=float("-inf"))
        ids = tl.load(id_ptr + offs, mask=mask, other=0)
    else:
        z = tempered(row_ptr, offs, mask, temperature)
        ids = offs
    is_candidate = mask & (z >= low) & (z < high)
    return tl.where(is_candidate, sortable(z), LOWEST_KEY), ids, z


@triton.jit
def _weights(z, largest, by_mass):
    """int64 measure of each token: 1, or its mass."""
    mass = (tl.exp(z - largest).to(tl.float64) * _SCALE).to(tl.int64)
    return tl.where(by_mass, mass, 1)


@triton.jit
def _search(
    key_low, key_high, target, base, by_mass, largest, count, is_list, value_ptr, id_ptr, row_ptr, temperature, low,
    high, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key in [key_low, key_high) above which the measure reaches `target`; key_low if none does."""
    index = tl.arange(0, 8).to(tl.int64)
    scale = tl.where(by_mass, 1.0 / _SCALE, 1.0).to(tl.float64)
    while key_high - key_low > 1:
        pivots = key_low + (((key_high - key_low) * index) >> 3)
        sums = tl.zeros([8], tl.int64)
        for start in range(0, count, CHUNK):
            keys, _, z = _candidates(
                start, count, is_list, value_ptr, id_ptr, row_ptr, temperature, low, high, CHUNK
            )  # fmt: skip
            counted = (keys[:, None].to(tl.int64) >= pivots[None, :]) & (keys != LOWEST_KEY)[:, None]
            sums += tl.sum(tl.where(counted, _weights(z, largest, by_mass)[:, None], 0), 0)
        reaches = (index == 0) | (base + sums.to(tl.float64) * scale >= target)
        key_low = tl.max(tl.where(reaches, pivots, key_low), 0)
        key_high = tl.min(tl.where(reaches, key_high, pivots), 0)
    return key_low


@triton.jit
def _edge(
    key, largest, count, is_list, value_ptr, id_ptr, row_ptr, temperature, low, high, CHUNK: tl.constexpr
):  # fmt: skip
    """(mass above `key`, mass of one token at it, number of tokens at it)."""
    above = tl.zeros([CHUNK], tl.int64)
    equal = tl.zeros([CHUNK], tl.int32)
    for start in range(0, count, CHUNK):
        keys, _, z = _candidates(start, count, is_list, value_ptr, id_ptr, row_ptr, temperature, low, high, CHUNK)
        above += tl.where(keys > key, _weights(z, largest, True), 0)
        equal += (keys == key).to(tl.int32)
    each = tl.exp(from_sortable(key.to(tl.int32)) - largest).to(tl.float64)
    return tl.sum(above, 0).to(tl.float64) / _SCALE, each, tl.sum(equal, 0)


@triton.jit
def _ties_kept(missing, each):
    """How many of the tokens at the edge are kept: as many as it takes to reach the target."""
    return tl.maximum(tl.ceil(missing / each), 1.0)


@triton.jit
def _tie_limit(
    key, num_kept, vocab_size, count, is_list, value_ptr, id_ptr, row_ptr, temperature, low, high,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The id of the num_kept-th token at `key`, in the order of ids."""
    index = tl.arange(0, 8).to(tl.int64)
    below = tl.full((), -1, tl.int64)
    reached = (vocab_size - 1).to(tl.int64)
    while reached - below > 1:
        pivots = below + (((reached - below) * index) >> 3)
        counts = tl.zeros([8], tl.int32)
        for start in range(0, count, CHUNK):
            keys, ids, _ = _candidates(
                start, count, is_list, value_ptr, id_ptr, row_ptr, temperature, low, high, CHUNK
            )  # fmt: skip
            counted = (keys == key)[:, None] & (ids[:, None] <= pivots[None, :])
            counts += tl.sum(counted.to(tl.int32), 0)
        reaches = (index > 0) & (counts >= num_kept)
        reached = tl.min(tl.where(reaches, pivots, reached), 0)
        below = tl.max(tl.where(reaches, below, pivots), 0)
    return reached


@triton.jit
def _find_listed(
    key_low, key_high, target, base, top_p, has_top_k, has_top_p, floor, largest, vocab_size, count, is_list,
    value_ptr, id_ptr, row_ptr, temperature, low, high, CHUNK: tl.constexpr,
):  # fmt: skip
    """(key of the threshold, tie limit) of a row whose candidates are read anew for every step of the search."""
    key = _search(
        key_low, key_high, target, base, has_top_k == 0, largest, count, is_list, value_ptr, id_ptr, row_ptr,
        temperature, low, high, CHUNK,
    )  # fmt: skip
    limit = vocab_size.to(tl.int64)
    if has_top_p:
        if has_top_k:
            above, each, num_equal = _edge(
                key, largest, count, is_list, value_ptr, id_ptr, row_ptr, temperature, low, high, CHUNK
            )  # fmt: skip
            target = top_p * (above + each * num_equal.to(tl.float64))
            key = _search(
                key, key_high, target, base, True, largest, count, is_list, value_ptr, id_ptr, row_ptr, temperature,
                low, high, CHUNK,
            )  # fmt: skip
        above, each, num_equal = _edge(
            key, largest, count, is_list, value_ptr, id_ptr, row_ptr, temperature, low, high, CHUNK
        )  # fmt: skip
        num_kept = _ties_kept(target - base - above, each)
        if (num_kept < num_equal.to(tl.float64)) & (from_sortable(key.to(tl.int32)) >= floor):
            limit = _tie_limit(
                key, num_kept.to(tl.int32), vocab_size, count, is_list, value_ptr, id_ptr, row_ptr, temperature, low,
                high, CHUNK,
            )  # fmt: skip
    return key, limit


@triton.jit
def _search_held(keys, measures, key_low, key_high, target, base, scale):
    """`_search` among candidates in registers."""
    while key_high - key_low > 1:
        middle = key_low + ((key_high - key_low) >> 1)
        total = tl.sum(tl.where(keys >= middle, measures, 0), 0).to(tl.float64) * scale
        reaches = base + total >= target
        key_low = tl.where(reaches, middle, key_low)
        key_high = tl.where(reaches, key_high, middle)
    return key_low


@triton.jit
def _find_held(
    key_low, key_high, target, base, top_p, has_top_k, has_top_p, floor, largest, vocab_size, count, value_ptr, id_ptr,
    HELD: tl.constexpr,
):  # fmt: skip
    """(key of the threshold, tie limit) of a row whose candidates fit the registers: a binary search."""
    offs = tl.arange(0, HELD)
    is_candidate = offs < count
    z = tl.load(value_ptr + offs, mask=is_candidate, other=float("-inf"))
    keys = tl.where(is_candidate, sortable(z), LOWEST_KEY)
    masses = tl.where(is_candidate, _weights(z, largest, True), 0)
    key = key_low
    if has_top_k:
        key = _search_held(keys, is_candidate.to(tl.int64), key_low, key_high, target, base, 1.0)
        if has_top_p:
            target = top_p * (tl.sum(tl.where(keys >= key, masses, 0), 0).to(tl.float64) / _SCALE)
    limit = vocab_size.to(tl.int64)
    if has_top_p:
        key = _search_held(keys, masses, key, key_high, target, base, 1.0 / _SCALE)
        above = tl.sum(tl.where(keys > key, masses, 0), 0).to(tl.float64) / _SCALE
        is_tie = is_candidate & (keys == key)
        each = tl.exp(from_sortable(key.to(tl.int32)) - largest).to(tl.float64)
        num_kept = _ties_kept(target - base - above, each)
        num_equal = tl.sum(is_tie.to(tl.int32), 0)
        if (num_kept < num_equal.to(tl.float64)) & (from_sortable(key.to(tl.int32)) >= floor):
            ids = tl.load(id_ptr + offs, mask=is_tie, other=2147483647)
            wanted = num_kept.to(tl.int32)
            below = tl.full((), -1, tl.int64)
            limit = (vocab_size - 1).to(tl.int64)
            while limit - below > 1:
                middle = below + ((limit - below) >> 1)
                reaches = tl.sum((ids <= middle).to(tl.int32), 0) >= wanted
                below = tl.where(reaches, below, middle)
                limit = tl.where(reaches, middle, limit)
    return key, limit


@triton.jit
def threshold_kernel(
    logits_ptr,
    params_ptr,
    slot_ptr,
    num_rows_ptr,
    row_max_ptr,
    pivot_ptr,
    sum_ptr,
    count_ptr,
    value_ptr,
    id_ptr,
    threshold_ptr,  # out [R] float32
    tie_limit_ptr,  # out [R] int32
    logits_stride,
    vocab_size,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    HELD: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        return
    record = load_record(params_ptr, slot_ptr, row, WORDS)
    flags = tl.load(record + WORD_FLAGS)
    tl.store(threshold_ptr + row, float("-inf"))
    tl.store(tie_limit_ptr + row, vocab_size)
    if ((flags & FLAG_DRAWN) == 0) | ((flags & (FLAG_TOP_K | FLAG_TOP_P | FLAG_MIN_P)) == 0):
        return
    largest_key = largest_key_of(row_max_ptr, row, NUM_TILES, PAD)
    if (largest_key >= INF_KEY) | (largest_key <= MINUS_INF_KEY):
        return
    largest = from_sortable(largest_key)
    floor = largest + load_float(record, WORD_LOG_MIN_P)
    has_top_k = (flags & FLAG_TOP_K) != 0
    has_top_p = (flags & FLAG_TOP_P) != 0
    if (flags & (FLAG_TOP_K | FLAG_TOP_P)) == 0:
        tl.store(threshold_ptr + row, floor)
        return
    target = target_of(record, flags, pass_sums(sum_ptr, row, 0, NUM_TILES, PAD))
    low, high, base = bracket_of(pivot_ptr, pass_sums(sum_ptr, row, 1, NUM_TILES, PAD), target, row, 1)
    if has_top_k & has_top_p:
        high = float("inf")
        base = base * 0.0
    count = tl.load(count_ptr + row)
    is_list = count <= CAPACITY
    count = tl.where(is_list, count, vocab_size)
    values = value_ptr + row.to(tl.int64) * CAPACITY
    ids = id_ptr + row.to(tl.int64) * CAPACITY
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    temperature = load_float(record, WORD_TEMPERATURE)
    key_low = sortable(low).to(tl.int64)
    key_high = tl.minimum(sortable(high), largest_key + 1).to(tl.int64)
    top_p = load_int64(record, WORD_TOP_P).to(tl.float64, bitcast=True)
    if is_list & (count <= HELD):
        key, limit = _find_held(
            key_low, key_high, target, base, top_p, has_top_k, has_top_p, floor, largest, vocab_size, count, values,
            ids, HELD,
        )  # fmt: skip
    else:
        key, limit = _find_listed(
            key_low, key_high, target, base, top_p, has_top_k, has_top_p, floor, largest, vocab_size, count, is_list,
            values, ids, row_ptr, temperature, low, high, CHUNK,
        )  # fmt: skip
    threshold = from_sortable(key.to(tl.int32))
    if threshold >= floor:
        tl.store(tie_limit_ptr + row, limit.to(tl.int32))
    tl.store(threshold_ptr + row, tl.maximum(threshold, floor))
