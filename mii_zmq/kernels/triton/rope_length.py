# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding whose frequencies depend on a sequence's length: which row of which table each token takes.

A token at position p of a sequence has the rope length max(fixed, p + 1); `fixed` is kept per slot. Two kinds:

    longrope   one table for sequences up to the border, one for longer ones: the kernel writes the row in both stacked
    dynamic    the base grows with the length: the kernel writes the token's own cosines and sines

Both read the step's packed rows like `batch_inputs`, once per step. Padding tokens get row 0 and no rotation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mii_zmq.kernels.triton.batch_inputs import find_rows


@triton.jit
def _positions(
    packed_ptr, length_ptr, token, MAX_ROWS: tl.constexpr, SEARCH_STEPS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """(position, rope length) of each token; zeros for padding."""
    num_rows = tl.load(packed_ptr)
    is_real = token < tl.load(packed_ptr + 2)
    slot_ptr = packed_ptr + 16
    start_ptr = slot_ptr + MAX_ROWS
    query_ptr = start_ptr + MAX_ROWS
    row = find_rows(query_ptr, token, is_real, num_rows, SEARCH_STEPS, TILE)
    begin = tl.load(query_ptr + row, mask=is_real, other=0)
    position = tl.load(start_ptr + row, mask=is_real, other=0) + token - begin
    position = tl.where(is_real, position, 0)
    slot = tl.load(slot_ptr + row, mask=is_real, other=0)
    fixed = tl.load(length_ptr + slot, mask=is_real, other=0)
    return position, tl.maximum(fixed, position + 1)


@triton.jit(do_not_specialize=["num_tokens_padded"])
def longrope_rows_kernel(
    packed_ptr,
    length_ptr,  # [slots] int32: fixed
    row_ptr,  # out [T] int32: row of the two stacked tables
    num_tokens_padded,
    border,
    table_rows,  # of one table
    MAX_ROWS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    position, length = _positions(packed_ptr, length_ptr, token, MAX_ROWS, SEARCH_STEPS, TILE)
    row = position + tl.where(length > border, table_rows, 0)
    tl.store(row_ptr + token, row, mask=token < num_tokens_padded)


@triton.jit(do_not_specialize=["num_tokens_padded"])
def dynamic_tables_kernel(
    packed_ptr,
    length_ptr,  # [slots] int32: fixed
    cos_ptr,  # out [T, PAIRS] float32
    sin_ptr,
    num_tokens_padded,
    border,
    THETA: tl.constexpr,
    FACTOR: tl.constexpr,
    ATTENTION_FACTOR: tl.constexpr,
    PAIRS: tl.constexpr,
    PAD: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """frequency_i = base^(-i / PAIRS);  base = THETA (FACTOR max(length / border, 1) - FACTOR + 1)^(D / (D - 2))"""
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    position, length = _positions(packed_ptr, length_ptr, token, MAX_ROWS, SEARCH_STEPS, TILE)
    # In float64, so that the frequency is right to the last bit: it is multiplied by positions of many thousands.
    ratio = tl.maximum(length, border).to(tl.float64) / border
    growth = tl.log2(FACTOR * ratio - (FACTOR - 1.0)) * (PAIRS / (PAIRS - 1.0))
    theta = tl.log2(tl.full([TILE], THETA, tl.float64))
    pair = tl.arange(0, PAD)
    exponent = (theta + growth)[:, None] * (pair.to(tl.float64) / PAIRS)[None, :]
    angle = position.to(tl.float32)[:, None] * tl.exp2(-exponent).to(tl.float32)
    cell = token.to(tl.int64)[:, None] * PAIRS + pair[None, :]
    mask = (token < num_tokens_padded)[:, None] & (pair < PAIRS)[None, :]
    tl.store(cos_ptr + cell, tl.cos(angle) * ATTENTION_FACTOR, mask=mask)
    tl.store(sin_ptr + cell, tl.sin(angle) * ATTENTION_FACTOR, mask=mask)
