# SPDX-License-Identifier: Apache-2.0
"""The draw: one token per row from raw or edited logits, in two stages, and the log-probability of a token.

    z = logit / temperature;  token = argmax over the kept tokens of z + gumbel(seed, position, token)

Gumbel-max with the counter-based SplitMix64 noise that `worker/random_draw.py` defines: the same 64-bit integers, so a
request draws the same tokens on every device. Stage one reduces tiles of the vocabulary, stage two the tiles of a row.
Of equal scores the lowest id wins. What a row wants is read from its slot's record of parameters (`Field`), so that one
captured launch serves any mix of requests; programs of rows from num_rows on return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

RECORD_WORDS = 22
"""int32 values of one slot's record. Values of 64 bits lie low word first; floats are stored bit by bit."""
WORD_SEED = tl.constexpr(0)
WORD_TEMPERATURE = tl.constexpr(2)
WORD_LOG_MIN_P = tl.constexpr(3)
WORD_TOP_P = tl.constexpr(4)
WORD_TOP_K = tl.constexpr(6)
WORD_FLAGS = tl.constexpr(7)
WORD_REPETITION = tl.constexpr(8)
WORD_PRESENCE = tl.constexpr(9)
WORD_FREQUENCY = tl.constexpr(10)
WORD_NUM_PROMPT = tl.constexpr(11)
WORD_MASKS = tl.constexpr(12)
WORD_NUM_MASKS = tl.constexpr(14)
WORD_LONGEST_PREFIX = tl.constexpr(15)
WORD_ALLOWED = tl.constexpr(16)
WORD_BIASES = tl.constexpr(18)
WORD_NUM_BIASES = tl.constexpr(20)

FLAG_DRAWN = tl.constexpr(1)
"""Not greedy."""
FLAG_TOP_K = tl.constexpr(2)
FLAG_TOP_P = tl.constexpr(4)
FLAG_MIN_P = tl.constexpr(8)
FLAG_PENALISED = tl.constexpr(16)
FLAG_COUNTED = tl.constexpr(32)
"""Has a presence or frequency penalty."""
FLAG_RESTRICTED = tl.constexpr(64)
"""May draw some tokens only."""

INF_KEY = tl.constexpr(0x7F800000)
MINUS_INF_KEY = tl.constexpr(-0x7F800001)
LOWEST_KEY = tl.constexpr(-0x80000000)
"""Below the key of every number: not a candidate."""


@triton.jit
def sortable(x):
    """int32 keys in the order of the float32 `x`; NaN above +inf, and both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, bits, 0x7FFFFFFF)


@triton.jit
def from_sortable(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_record(params_ptr, slot_ptr, row, WORDS: tl.constexpr):
    """Pointer to the record of a row's slot."""
    return params_ptr + tl.load(slot_ptr + row).to(tl.int64) * WORDS


@triton.jit
def load_float(record, WORD: tl.constexpr):
    return tl.load(record + WORD).to(tl.float32, bitcast=True)


@triton.jit
def load_int64(record, WORD: tl.constexpr):
    low = tl.load(record + WORD).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(record + WORD + 1).to(tl.int64) << 32) | low


@triton.jit
def tempered(row_ptr, offs, mask, temperature):
    """logit / temperature, correctly rounded as on a CPU; -inf where masked out."""
    x = tl.load(row_ptr + offs, mask=mask, other=float("-inf")).to(tl.float32)
    if temperature != 1.0:
        x = tl.div_rn(x, temperature)
    return x


@triton.jit
def mix64(z):
    """The finaliser of SplitMix64 on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def row_key(seed, position):
    """The generator's state for one draw."""
    mixed = mix64(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    return mix64(mixed + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)


@triton.jit
def _coarse_log(x):
    """ln(x) with an absolute error of 2e-7 near 1, where it is small, and a relative one elsewhere."""
    if _INTERPRETED:
        return tl.log(x)
    log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return log2 * 0.6931471805599453


@triton.jit
def gumbel(key, token_ids):
    """Noise, float32, of `token_ids` under a row's `key`."""
    z = key + (token_ids.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    bits = tl.maximum((z >> 40).to(tl.int32), 1)
    uniform = bits.to(tl.float32) * 5.9604644775390625e-08
    # -log(u) for u near 1 as 2 atanh(v / (2 - v)), v = 1 - u exact: the largest noise, which decides draws, comes from
    # the smallest -log(u), so its relative error counts.
    v = (16777216 - bits).to(tl.float32) * 5.9604644775390625e-08
    s = v / (2.0 - v)
    q = s * s
    series = 0.06666666666666667
    series = series * q + 0.07692307692307693
    series = series * q + 0.09090909090909091
    series = series * q + 0.1111111111111111
    series = series * q + 0.14285714285714285
    series = series * q + 0.2
    series = series * q + 0.3333333333333333
    near_one = 2.0 * (s + s * q * series)
    return -_coarse_log(tl.where(uniform < 0.5, -_coarse_log(uniform), near_one))


@triton.jit
def draw_tiles_kernel(
    logits_ptr,  # [R, V] rows of logits_stride
    params_ptr,  # [slots, RECORD_WORDS] int32
    slot_ptr,  # [R] int32
    position_ptr,  # [R] int32: tokens before the one drawn
    num_rows_ptr,  # [1] int32
    threshold_ptr,  # [R] float32: from topk_edge; unused unless FILTERED
    tie_limit_ptr,  # [R] int32
    score_ptr,  # out [R, tiles] int32 keys
    id_ptr,  # out [R, tiles] int32
    largest_ptr,  # out [R, tiles] int32: key of the largest logit
    logits_stride,
    vocab_size,
    FILTERED: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    if row >= tl.load(num_rows_ptr):
        return
    cell = row.to(tl.int64) * tl.num_programs(1) + tile
    offs = tile * TILE + tl.arange(0, TILE)
    in_row = offs < vocab_size
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    keys = sortable(tl.load(row_ptr + offs, mask=in_row, other=float("-inf")).to(tl.float32))
    keys = tl.where(in_row, keys, LOWEST_KEY)
    tl.store(largest_ptr + cell, tl.max(keys, 0))
    record = load_record(params_ptr, slot_ptr, row, WORDS)
    if (tl.load(record + WORD_FLAGS) & FLAG_DRAWN) != 0:
        z = tempered(row_ptr, offs, in_row, load_float(record, WORD_TEMPERATURE))
        kept = in_row
        if FILTERED:
            threshold = tl.load(threshold_ptr + row)
            is_tie = (z == threshold) & (offs <= tl.load(tie_limit_ptr + row))
            kept = in_row & ((z > threshold) | is_tie)
        keys = tl.full([TILE], LOWEST_KEY, tl.int32)
        if tl.max(kept.to(tl.int32), 0) != 0:
            state = row_key(load_int64(record, WORD_SEED), tl.load(position_ptr + row))
            keys = tl.where(kept, sortable(z + gumbel(state, offs)), LOWEST_KEY)
    best = tl.max(keys, 0)
    tl.store(score_ptr + cell, best)
    tl.store(id_ptr + cell, tl.min(tl.where(keys == best, offs, 2147483647), 0))


@triton.jit
def draw_rows_kernel(
    score_ptr,
    id_ptr,
    largest_ptr,
    slot_ptr,
    position_ptr,
    num_rows_ptr,
    token_ids_ptr,  # [slots, history_stride] int32; unused unless RECORD
    out_id_ptr,  # out [R]
    out_finite_ptr,  # out [R]: 0 where the token means nothing
    history_stride,
    vocab_size,
    NUM_TILES: tl.constexpr,
    PAD: tl.constexpr,
    RECORD: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        return
    offs = tl.arange(0, PAD)
    mask = offs < NUM_TILES
    cells = row.to(tl.int64) * NUM_TILES + offs
    scores = tl.load(score_ptr + cells, mask=mask, other=LOWEST_KEY)
    ids = tl.load(id_ptr + cells, mask=mask, other=2147483647)
    largest = tl.max(tl.load(largest_ptr + cells, mask=mask, other=LOWEST_KEY), 0)
    best = tl.max(scores, 0)
    token_id = tl.min(tl.where(scores == best, ids, 2147483647), 0)
    # Always inside the vocabulary, whatever the logits were.
    token_id = tl.minimum(token_id, vocab_size - 1)
    is_finite = (largest > MINUS_INF_KEY) & (largest < INF_KEY)
    tl.store(out_id_ptr + row, token_id.to(out_id_ptr.dtype.element_ty))
    tl.store(out_finite_ptr + row, is_finite.to(out_finite_ptr.dtype.element_ty))
    if RECORD:
        position = tl.load(position_ptr + row)
        slot = tl.load(slot_ptr + row).to(tl.int64)
        tl.store(token_ids_ptr + slot * history_stride + position, token_id, mask=position < history_stride)


@triton.jit
def exp_sum_tiles_kernel(
    logits_ptr,
    num_rows_ptr,
    largest_ptr,  # out [R, tiles] float32
    sum_ptr,  # out [R, tiles] float32: sum of exp(logit - largest)
    logits_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    if row >= tl.load(num_rows_ptr):
        return
    offs = tile * TILE + tl.arange(0, TILE)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    x = tl.load(row_ptr + offs, mask=offs < vocab_size, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    # A tile of -inf: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    cell = row.to(tl.int64) * tl.num_programs(1) + tile
    tl.store(largest_ptr + cell, largest)
    tl.store(sum_ptr + cell, tl.sum(tl.exp(x - shift), 0))


@triton.jit
def log_prob_rows_kernel(
    logits_ptr,
    num_rows_ptr,
    largest_ptr,
    sum_ptr,
    token_id_ptr,  # [R]
    out_ptr,  # out [R] float32
    logits_stride,
    NUM_TILES: tl.constexpr,
    PAD: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        return
    offs = tl.arange(0, PAD)
    mask = offs < NUM_TILES
    cells = row.to(tl.int64) * NUM_TILES + offs
    largest = tl.load(largest_ptr + cells, mask=mask, other=float("-inf"))
    sums = tl.load(sum_ptr + cells, mask=mask, other=0.0)
    top = tl.max(largest, 0)
    total = tl.sum(sums * tl.exp(largest - top), 0)
    token_id = tl.load(token_id_ptr + row).to(tl.int64)
    x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + token_id).to(tl.float32)
    tl.store(out_ptr + row, x - top - tl.log(total))
