# SPDX-License-Identifier: Apache-2.0
"""From the packed rows of a step to per-token inputs and decode work items, on the device.

The host sends one int32 buffer per step (`worker.cuda_batch` owns its layout): a header [num_rows, num_decodes,
num_tokens, num_samples, num_tiles], then row_slot[R], row_start[R] and query_start[R + 1]. Everything per token
follows: the row a token belongs to (binary search), its position, its id (from the slot's history, where sampled ids
are written on the device) and its KV cell (from the block table). Padding tokens get id 0, position 0 and cell -1, so
that they write nothing.

Decode attention is cut into items, about `target_programs / num_kv_heads` more than there are rows: keys are dealt
out in equal chunks over the whole batch, so one long sequence among short ones is spread as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

HEADER = 16
"""int32 values before the row arrays."""
ITEM_WORDS = 8
"""int32 values per work item: row (-1: none), split, splits of the row, sequence length, slot."""


@triton.jit
def find_rows(query_ptr, token, is_real, num_rows, SEARCH_STEPS: tl.constexpr, TILE: tl.constexpr):
    """The row that each token belongs to."""
    low = tl.zeros([TILE], tl.int32)
    high = tl.zeros([TILE], tl.int32) + num_rows
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        begin = tl.load(query_ptr + middle, mask=is_real & (middle < num_rows), other=2147483647)
        low = tl.where(begin <= token, middle, low)
        high = tl.where(begin <= token, high, middle)
    return low


@triton.jit(do_not_specialize=["num_tokens_padded", "num_items"])
def batch_inputs_kernel(
    packed_ptr,
    token_ids_ptr,  # [slots, history_stride] int32
    block_table_ptr,  # [slots, table_stride] int32
    input_ids_ptr,  # out [T] int32
    positions_ptr,  # out [T] int32
    cells_ptr,  # out [T] int64: block * BLOCK_SIZE + offset, -1 for padding
    items_ptr,  # out [items, 8] int32
    history_stride,
    table_stride,
    num_tokens_padded,
    num_items,
    target_programs,  # programs that fill the device
    num_kv_heads,
    MAX_ROWS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,  # ceil(log2(MAX_ROWS + 1))
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    num_rows = tl.load(packed_ptr)
    num_decodes = tl.load(packed_ptr + 1)
    num_tokens = tl.load(packed_ptr + 2)
    slot_ptr = packed_ptr + 16
    start_ptr = slot_ptr + MAX_ROWS
    query_ptr = start_ptr + MAX_ROWS
    pid = tl.program_id(0)
    token = pid * TILE + tl.arange(0, TILE)
    is_real = token < num_tokens

    low = find_rows(query_ptr, token, is_real, num_rows, SEARCH_STEPS, TILE)
    slot = tl.load(slot_ptr + low, mask=is_real, other=0).to(tl.int64)
    begin = tl.load(query_ptr + low, mask=is_real, other=0)
    position = tl.load(start_ptr + low, mask=is_real, other=0) + token - begin
    position = tl.where(is_real, position, 0)
    ids = tl.load(token_ids_ptr + slot * history_stride + position, mask=is_real, other=0)
    block = tl.load(block_table_ptr + slot * table_stride + position // BLOCK_SIZE, mask=is_real, other=0)
    cell = tl.where(is_real, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    in_buffer = token < num_tokens_padded
    tl.store(input_ids_ptr + token, tl.where(is_real, ids, 0), mask=in_buffer)
    tl.store(positions_ptr + token, position, mask=in_buffer)
    tl.store(cells_ptr + token, cell, mask=in_buffer)

    if pid * TILE < num_items:
        rows = tl.arange(0, MAX_ROWS)
        row_mask = rows < num_decodes
        seq_len = tl.load(start_ptr + rows, mask=row_mask, other=0) + 1
        blocks = tl.where(row_mask, (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
        chunk = tl.maximum(tl.cdiv(tl.sum(blocks, 0) * num_kv_heads, target_programs), 1)
        splits = (blocks + chunk - 1) // chunk
        ends = tl.cumsum(splits, 0)
        item = pid * TILE + tl.arange(0, TILE)
        before = ends[None, :] <= item[:, None]
        row = tl.sum(before.to(tl.int32), 1)
        first = tl.max(tl.where(before, ends[None, :], 0), 1)
        num_splits = tl.sum(tl.where(rows[None, :] == row[:, None], splits[None, :], 0), 1)
        has_work = item < tl.sum(splits, 0)
        length = tl.load(start_ptr + row, mask=has_work, other=0) + 1
        item_slot = tl.load(slot_ptr + row, mask=has_work, other=0)
        record = items_ptr + item * 8
        stored = item < num_items
        tl.store(record, tl.where(has_work, row, -1), mask=stored)
        tl.store(record + 1, item - first, mask=stored)
        tl.store(record + 2, num_splits, mask=stored)
        tl.store(record + 3, length, mask=stored)
        tl.store(record + 4, item_slot, mask=stored)
