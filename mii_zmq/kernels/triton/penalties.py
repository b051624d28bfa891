# SPDX-License-Identifier: Apache-2.0
"""What a request changes in its logits: penalties, biases, the tokens it allows, bad words, stop ids not due yet.

The edited logits are float32, in a workspace [R, V] of 32-bit words: the head's own logits stay as they are. Launch
order: clear, count, edit, mask. `count` notes in the workspace, for the rows with penalties, what stands in the
history: bit 31 for a token of the prompt, below it the number of times in the output; `edit` replaces these words by
the edited logits, in which `mask` adds the biases and then masks. Nothing is kept between steps, so a resumed or
preempted sequence needs no care. Histories are read on the device, since the host learns drawn ids late.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mii_zmq.kernels.triton.sampling import (
    FLAG_COUNTED,
    FLAG_PENALISED,
    FLAG_RESTRICTED,
    WORD_ALLOWED,
    WORD_BIASES,
    WORD_FLAGS,
    WORD_FREQUENCY,
    WORD_LONGEST_PREFIX,
    WORD_MASKS,
    WORD_NUM_BIASES,
    WORD_NUM_MASKS,
    WORD_NUM_PROMPT,
    WORD_PRESENCE,
    WORD_REPETITION,
    load_float,
    load_int64,
    load_record,
)

MASK_WORDS = 4
"""int32 values per mask entry: token id, position below which it holds, length of its prefix, and where that begins in
the slot's list (which holds all entries, then all prefixes)."""
BIAS_WORDS = 2
"""int32 values per bias entry: token id, and the bits of what is added to its logit. Every id stands there once."""


@triton.jit
def clear_kernel(
    params_ptr,
    slot_ptr,
    num_rows_ptr,
    note_ptr,  # [R, V] int32: the workspace
    vocab_size,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        return
    record = load_record(params_ptr, slot_ptr, row, WORDS)
    if (tl.load(record + WORD_FLAGS) & FLAG_PENALISED) == 0:
        return
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tl.store(note_ptr + row.to(tl.int64) * vocab_size + offs, tl.zeros([TILE], tl.int32), mask=offs < vocab_size)


@triton.jit
def count_kernel(
    params_ptr,
    slot_ptr,
    position_ptr,
    num_rows_ptr,
    token_ids_ptr,  # [slots, history_stride] int32
    note_ptr,
    history_stride,
    vocab_size,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        return
    record = load_record(params_ptr, slot_ptr, row, WORDS)
    if (tl.load(record + WORD_FLAGS) & FLAG_PENALISED) == 0:
        return
    num_prompt = tl.load(record + WORD_NUM_PROMPT)
    position = tl.load(position_ptr + row)
    history = token_ids_ptr + tl.load(slot_ptr + row).to(tl.int64) * history_stride
    notes = note_ptr + row.to(tl.int64) * vocab_size
    for start in range(tl.program_id(1) * TILE, position, tl.num_programs(1) * TILE):
        offs = start + tl.arange(0, TILE)
        ids = tl.load(history + offs, mask=offs < position, other=-1)
        is_token = (ids >= 0) & (ids < vocab_size)
        tl.atomic_or(notes + ids, -0x80000000, mask=is_token & (offs < num_prompt), sem="relaxed")
        tl.atomic_add(notes + ids, 1, mask=is_token & (offs >= num_prompt), sem="relaxed")


@triton.jit
def edit_kernel(
    logits_ptr,  # [R, V] rows of logits_stride
    params_ptr,
    slot_ptr,
    num_rows_ptr,
    note_ptr,
    edited_ptr,  # out [R, V] float32: the workspace
    logits_stride,
    vocab_size,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        return
    record = load_record(params_ptr, slot_ptr, row, WORDS)
    flags = tl.load(record + WORD_FLAGS)
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offs < vocab_size
    x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + offs, mask=mask, other=0.0).to(tl.float32)
    base = row.to(tl.int64) * vocab_size
    if (flags & FLAG_PENALISED) != 0:
        notes = tl.load(note_ptr + base + offs, mask=mask, other=0)
        repetition = load_float(record, WORD_REPETITION)
        x = tl.where(notes != 0, tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)), x)
        if (flags & FLAG_COUNTED) != 0:
            count = (notes & 0x7FFFFFFF).to(tl.float32)
            lowered = load_float(record, WORD_FREQUENCY) * count
            lowered += tl.where(count > 0, load_float(record, WORD_PRESENCE), 0.0)
            x = tl.where(notes != 0, x - lowered, x)
    if (flags & FLAG_RESTRICTED) != 0:
        allowed = load_int64(record, WORD_ALLOWED).to(tl.pointer_type(tl.int32))
        bits = tl.load(allowed + offs // 32, mask=mask, other=0) >> (offs % 32)
        # Added, not stored: a NaN must stay one. Later biases are finite and change nothing about it.
        x += tl.where((bits & 1) != 0, 0.0, float("-inf"))
    tl.store(edited_ptr + base + offs, x, mask=mask)


@triton.jit
def mask_kernel(
    params_ptr,
    slot_ptr,
    position_ptr,
    num_rows_ptr,
    token_ids_ptr,
    edited_ptr,
    history_stride,
    vocab_size,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(num_rows_ptr):
        return
    record = load_record(params_ptr, slot_ptr, row, WORDS)
    num_masks = tl.load(record + WORD_NUM_MASKS)
    longest = tl.load(record + WORD_LONGEST_PREFIX)
    entries = load_int64(record, WORD_MASKS).to(tl.pointer_type(tl.int32))
    position = tl.load(position_ptr + row)
    history = token_ids_ptr + tl.load(slot_ptr + row).to(tl.int64) * history_stride
    logits = edited_ptr + row.to(tl.int64) * vocab_size
    num_biases = tl.load(record + WORD_NUM_BIASES)
    biases = load_int64(record, WORD_BIASES).to(tl.pointer_type(tl.int32))
    for start in range(0, num_biases, TILE):
        offs = start + tl.arange(0, TILE)
        mask = offs < num_biases
        token_id = tl.load(biases + offs * 2, mask=mask, other=0)
        bias = tl.load(biases + offs * 2 + 1, mask=mask, other=0).to(tl.float32, bitcast=True)
        x = tl.load(logits + token_id, mask=mask, other=0.0)
        tl.store(logits + token_id, x + bias, mask=mask)
    # A masked token may have a bias, which another thread has stored.
    tl.debug_barrier()
    for start in range(0, num_masks, TILE):
        offs = start + tl.arange(0, TILE)
        mask = offs < num_masks
        token_id = tl.load(entries + offs * 4, mask=mask, other=0)
        length = tl.load(entries + offs * 4 + 2, mask=mask, other=0)
        prefix = entries + tl.load(entries + offs * 4 + 3, mask=mask, other=0)
        is_masked = mask & (position < tl.load(entries + offs * 4 + 1, mask=mask, other=0)) & (length <= position)
        for index in range(longest):
            compared = is_masked & (index < length)
            wanted = tl.load(prefix + index, mask=compared, other=0)
            found = tl.load(history + position - length + index, mask=compared, other=0)
            is_masked = is_masked & (wanted == found)
        # Added, not stored: a NaN must stay one. Two entries with one token write the same.
        x = tl.load(logits + token_id, mask=is_masked, other=0.0)
        tl.store(logits + token_id, x + float("-inf"), mask=is_masked)
