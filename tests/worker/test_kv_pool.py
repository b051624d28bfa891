# SPDX-License-Identifier: Apache-2.0
"""The slab: order, sharing with its array module, block copies, zeroing, 64-bit offsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mii_zmq.worker.kv_pool import BlockShape, KvPool, array_module

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_pool(dtype: torch.dtype = torch.float32, num_blocks: int = 5) -> KvPool:
    return KvPool(np, BlockShape(num_layers=3, num_kv_heads=2, block_size=4, head_dim=6, dtype=dtype), num_blocks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_sees_the_owners_memory(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    assert pool.slab.dtype is dtype
    assert pool.slab.shape == (5, 3, 2, 2, 4, 6)
    assert pool.num_bytes == pool.slab.nbytes == 5 * pool.shape.num_bytes
    assert pool.slab.data_ptr() == pool._storage.ctypes.data
    pool.slab[2, 1, 0, 1, 3] = 1.0
    assert np.count_nonzero(pool._storage) == 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_blocks(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    pool.slab.copy_(torch.arange(pool.slab.numel()).view(pool.slab.shape) % 251)
    before = pool.slab.clone()
    pool.copy_blocks([(0, 3), (2, 4)])
    assert torch.equal(pool.slab[3], before[0])
    assert torch.equal(pool.slab[4], before[2])
    assert torch.equal(pool.slab[:3], before[:3])
    pool.copy_blocks([])


def test_zero_blocks_clears_nan_and_nothing_else() -> None:
    pool = make_pool()
    pool.slab.fill_(float("nan"))
    pool.zero_blocks([1, 4])
    assert not pool.slab[[1, 4]].any()
    assert pool.slab[[0, 2, 3]].isnan().all()
    pool.zero_blocks([])


def test_layers_are_views_of_the_slab() -> None:
    pool = make_pool()
    pool.layers[2].cells[3, 1] = 7.0
    assert (pool.slab[3, 2, :, :, 1] == 7.0).all()
    assert pool.slab.count_nonzero() == 2 * 2 * 6


@pytest.mark.slow
def test_offsets_past_two_to_the_31_elements() -> None:
    shape = BlockShape(num_layers=2, num_kv_heads=2, block_size=64, head_dim=128, dtype=torch.bfloat16)
    num_blocks = 2**31 // (shape.num_bytes // 2) + 3
    try:
        pool = KvPool(np, shape, num_blocks)
    except MemoryError:
        pytest.skip("this machine does not promise 4.3 GB")
    last = num_blocks - 1
    assert last * (shape.num_bytes // 2) > 2**31
    pool.layers[1].cells[last, 5] = 3.0
    tile = pool.layers[1].tiles[last * pool.layers[1].tiles_per_block + 3].view(64, 128)
    assert (tile[5] == 3.0).all()
    pool.copy_blocks([(last, 0)])
    assert torch.equal(pool.slab[0], pool.slab[last])
    pool.zero_blocks([last])
    assert not pool.slab[last].any()


def test_array_module_of_the_cpu_is_numpy() -> None:
    assert array_module(torch.device("cpu")) is np
