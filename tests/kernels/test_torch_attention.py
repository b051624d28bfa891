# SPDX-License-Identifier: Apache-2.0
"""Ragged paged attention against the oracle: odd lengths, any row order, grouped heads, windows, dtypes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.kernels import AttentionShape, KvLayer, RaggedLayout
from mii_zmq.kernels.reference import ReferenceAttention
from mii_zmq.kernels.torch_attention import TorchAttention

Row = tuple[int, int]
"""(tokens before this step, tokens of this step)."""


class Case:
    """A pool with random keys and values for some rows, and NaN in every block that no row owns."""

    def __init__(
        self,
        rows: list[Row],
        num_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(len(rows))
        counts = [count for _, count in rows]
        lengths = [start + count for start, count in rows]
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 2
        order = np.random.default_rng(0).permutation(num_blocks)[: sum(needed)]
        tables = np.full((len(rows), max(needed) + 1), num_blocks - 1, dtype=np.int64)
        slab = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
        slab[torch.from_numpy(order)] = 0
        self.layer = KvLayer(slab[:, 1])
        num_tokens = sum(counts)
        self.qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
        begin = token = 0
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            tables[row, : needed[row]] = order[begin : begin + needed[row]]
            begin += needed[row]
            keys_values = torch.randn(length, 2, num_kv_heads, head_dim, generator=generator).to(dtype)
            keys_values[length - count :] = self.qkv[token : token + count, num_heads:].unflatten(1, (2, num_kv_heads))
            for position in range(length):
                self.layer.cells[tables[row, position // block_size], position % block_size] = keys_values[position]
            token += count
        self.layout = RaggedLayout(np.cumsum([0, *counts]), np.array(lengths), tables, block_size)
        self.shape = AttentionShape(
            num_heads, num_kv_heads, head_dim, head_dim**-0.5, 6 * num_kv_heads, dtype, torch.device("cpu")
        )

    def check(self, window: int | None, tolerance: float = 1e-5) -> TorchAttention:
        attention, oracle = TorchAttention(self.shape), ReferenceAttention(self.shape)
        actual = attention(self.qkv, self.layer, attention.plan(self.layout, window))
        expected = oracle(self.qkv.double(), KvLayer(self.layer.blocks.double()), oracle.plan(self.layout, window))
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
        return attention


@pytest.mark.parametrize("window", [None, 1, 3, 4, 9, 1000])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(0, 2)],
        [(3, 1)],
        [(4, 4)],
        [(7, 1), (0, 1), (15, 1), (16, 1)],
        [(5, 1), (6, 1), (0, 7), (9, 5), (3, 2)],
        [(9, 3), (2, 1), (0, 4), (8, 1)],
    ],
)
def test_against_the_oracle(rows: list[Row], window: int | None) -> None:
    Case(rows).check(window)


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize(("softcap", "has_alibi"), [(2.0, False), (0.0, True), (2.0, True)])
@pytest.mark.parametrize(
    "rows",
    [[(0, 1)], [(0, 3)], [(7, 1), (0, 1), (15, 1), (16, 1)], [(5, 1), (6, 1), (0, 7), (9, 5), (3, 2)], [(2, 131)]],
)
def test_softcap_and_alibi(rows: list[Row], softcap: float, has_alibi: bool, window: int | None) -> None:
    case = Case(rows)
    slopes = 2.0 ** -torch.arange(1, 7).float() if has_alibi else None
    case.shape = replace(case.shape, softcap=softcap, alibi_slopes=slopes)
    case.check(window)


@pytest.mark.parametrize(("softcap", "has_alibi"), [(2.0, False), (0.0, True)])
def test_softcap_and_alibi_in_bfloat16(softcap: float, has_alibi: bool) -> None:
    case = Case([(5, 1), (6, 1), (0, 7), (9, 5)], dtype=torch.bfloat16)
    case.shape = replace(
        case.shape, softcap=softcap, alibi_slopes=2.0 ** -torch.arange(1, 7).float() if has_alibi else None
    )
    case.check(None, tolerance=3e-2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (5, 1), (9, 3)])
def test_head_groupings(num_heads: int, num_kv_heads: int) -> None:
    Case([(6, 1), (9, 1), (0, 5), (2, 3)], num_heads, num_kv_heads).check(None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 5])
def test_low_precision(dtype: torch.dtype, window: int | None) -> None:
    Case([(6, 1), (9, 1), (0, 5), (2, 3)], dtype=dtype).check(window, tolerance=3e-2)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 100])
def test_chunks_longer_than_one_piece(window: int | None) -> None:
    Case([(0, 150), (33, 130)], num_heads=2, num_kv_heads=1, block_size=16).check(window)


def test_rows_of_unlike_length_are_not_padded_to_the_longest() -> None:
    case = Case([(0, 1)] * 4 + [(39, 1)] * 4, head_dim=64, block_size=1, num_kv_heads=6)
    attention = TorchAttention(case.shape)
    groups = attention.plan(case.layout, None).groups
    assert sum(group.tile_ids.numel() for group in groups) <= 1.2 * 2 * 6 * (4 * 1 + 4 * 40) or len(groups) == 1
    many = Case([(0, 1)] * 60 + [(200, 1)] * 4, head_dim=64, block_size=16, num_kv_heads=6)
    plan = TorchAttention(many.shape).plan(many.layout, None)
    assert [group.token_end - group.token_begin for group in plan.groups] == [60, 4]


def test_a_lone_decode_needs_no_mask_and_a_window_reads_few_blocks() -> None:
    case = Case([(101, 1)], block_size=4)
    (group,) = TorchAttention(case.shape).plan(case.layout, 6).groups
    assert group.bias is None
    assert group.gathered.shape == (2 * 2 * 2, 4 * 8)
    assert group.keys.shape == group.values.shape == (2, 6, 8)


def test_nan_in_a_neighbours_block_does_not_leak() -> None:
    case = Case([(6, 1), (9, 1), (0, 5)])
    case.layer.cells[case.layout.block_tables[1, 0]] = float("nan")
    attention = TorchAttention(case.shape)
    out = attention(case.qkv, case.layer, attention.plan(case.layout, None))
    assert out.isfinite().all(dim=1).tolist() == [True, False, True, True, True, True, True]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 21), st.integers(1, 6)), min_size=1, max_size=6),
    window=st.one_of(st.none(), st.integers(1, 30)),
    block_size=st.sampled_from([1, 2, 8]),
)
def test_any_ragged_batch(rows: list[Row], window: int | None, block_size: int) -> None:
    Case(rows, num_heads=2, num_kv_heads=1, head_dim=4, block_size=block_size).check(window)
