# SPDX-License-Identifier: Apache-2.0
"""A step's changes to the state on the device: new token ids, grown block tables, copied KV blocks."""

from __future__ import annotations

import triton
import triton.language as tl

UPDATE_WORDS = 4
"""int32 values per update: target (0 token ids, 1 block tables), offset there, length, offset of the data."""
TILE = 1024


@triton.jit
def apply_updates_kernel(
    update_ptr,  # [updates, 4] int32, followed by the data
    token_ids_ptr,
    block_table_ptr,
    TILE: tl.constexpr,
):
    record = update_ptr + tl.program_id(0) * 4
    target = tl.load(record)
    offset = tl.load(record + 1)
    length = tl.load(record + 2)
    source = tl.load(record + 3)
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offs < length
    data = tl.load(update_ptr + source + offs, mask=mask, other=0)
    if target == 0:
        tl.store(token_ids_ptr + offset + offs, data, mask=mask)
    else:
        tl.store(block_table_ptr + offset + offs, data, mask=mask)


@triton.jit
def copy_blocks_kernel(
    pair_ptr,  # [pairs, 2] int32: source and destination block
    pool_ptr,
    block_stride,  # elements per block of one layer
    layer_stride,
    TILE: tl.constexpr,
):
    pair = pair_ptr + tl.program_id(0) * 2
    layer = tl.program_id(2).to(tl.int64) * layer_stride
    source = layer + tl.load(pair).to(tl.int64) * block_stride
    destination = layer + tl.load(pair + 1).to(tl.int64) * block_stride
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offs < block_stride
    tl.store(pool_ptr + destination + offs, tl.load(pool_ptr + source + offs, mask=mask), mask=mask)
