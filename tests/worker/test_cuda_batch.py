# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.worker.cuda_batch import (
    BLOCK_TABLES,
    TOKEN_IDS,
    UPDATE_WORDS,
    PackedLayout,
    PackedStep,
    StepPacker,
    choose_bucket,
    decode_bucket,
    decode_buckets,
    row_bucket,
)
from mii_zmq.worker.plan import EngineLimits, NewSequence, SamplingSpec, StepPlan, StepRow

LAYOUT = PackedLayout(max_sequences=20, token_budget=512, tile_tokens=128)
TILES_ONLY = PackedLayout(max_sequences=20, token_budget=512, tile_tokens=128, tiles_only=True)
HISTORY, TABLE = 1024, 64


def pack(plan: StepPlan, packer: StepPacker | None = None) -> tuple[PackedStep, np.ndarray]:
    fixed = np.full(LAYOUT.fixed_words, -1, dtype=np.int32)
    return (packer or StepPacker(LAYOUT, HISTORY, TABLE)).pack(plan, fixed), fixed


def apply_updates(step: PackedStep, token_ids: np.ndarray, tables: np.ndarray) -> None:
    """What the kernel does."""
    for target, offset, length, source in step.updates[: UPDATE_WORDS * step.num_updates].reshape(-1, UPDATE_WORDS):
        memory = {TOKEN_IDS: token_ids, BLOCK_TABLES: tables}[int(target)]
        memory.reshape(-1)[offset : offset + length] = step.updates[source : source + length]


def test_layout_is_aligned_and_disjoint() -> None:
    names = ["row_slots", "row_starts", "query_starts", "sample_tokens", "sample_slots", "sample_positions"]
    offsets = [getattr(LAYOUT, name) for name in [*names, "tile_rows", "tile_starts", "fixed_words"]]
    assert offsets == sorted(set(offsets))
    assert all(offset % 16 == 0 for offset in offsets)
    assert LAYOUT.max_rows == 32
    assert LAYOUT.sample_tokens - LAYOUT.query_starts > LAYOUT.max_rows, "one more start than rows"


@pytest.mark.parametrize(("border", "recomputes", "expected"), [(8, True, 5), (8, False, 2), (None, False, -1)])
def test_rope_lengths_lie_behind_the_histories(border: int | None, recomputes: bool, expected: int) -> None:
    limits = EngineLimits(99, 64, 8, 16, 20, 512, rope_border=border, recomputes_at_border=recomputes)
    sequence = NewSequence(3, [7, 8, 9, 6, 5], 2, [4], SamplingSpec())
    step, _ = pack(StepPlan(1, [StepRow(3, 0, 5, True)], [sequence]), StepPacker(LAYOUT, HISTORY, TABLE, limits))
    memory, tables = np.full(20 * HISTORY + 20, -1, np.int32), np.zeros((20, TABLE), np.int32)
    apply_updates(step, memory, tables)
    lengths = memory[20 * HISTORY :].tolist()
    assert lengths == [expected if slot == 3 else -1 for slot in range(20)]
    assert memory[3 * HISTORY :][:6].tolist() == [7, 8, 9, 6, 5, -1]
    assert tables[3, 0] == 4


def test_rows_with_one_token_come_first() -> None:
    rows = [StepRow(3, 0, 200, False), StepRow(5, 40, 1, True), StepRow(7, 100, 30, True), StepRow(2, 9, 1, True)]
    step, fixed = pack(StepPlan(1, rows))
    assert fixed[:5].tolist() == [4, 2, 232, 3, 3]
    assert fixed[LAYOUT.row_slots :][:4].tolist() == [5, 2, 7, 3], "and of them those with the most keys"
    assert fixed[LAYOUT.row_starts :][:4].tolist() == [40, 9, 100, 0]
    assert fixed[LAYOUT.query_starts :][:5].tolist() == [0, 1, 2, 32, 232]
    assert fixed[LAYOUT.sample_tokens :][:3].tolist() == [0, 1, 31]
    assert step.sample_slots == [5, 2, 7] == fixed[LAYOUT.sample_slots :][:3].tolist()
    assert step.sample_positions == [41, 10, 130] == fixed[LAYOUT.sample_positions :][:3].tolist()
    assert step.plan_order == [0, 2, 1], "the plan's order of the sampling rows is 5, 7, 2"


def test_tiles_cover_every_chunk_and_start_with_the_most_keys() -> None:
    step, fixed = pack(StepPlan(1, [StepRow(0, 0, 300, False), StepRow(1, 900, 10, True), StepRow(2, 5, 1, True)]))
    tiles = list(
        zip(fixed[LAYOUT.tile_rows :][: step.num_tiles], fixed[LAYOUT.tile_starts :][: step.num_tiles], strict=True)
    )
    assert tiles == [(1, 0), (2, 256), (2, 128), (2, 0)]


def test_tiles_only_makes_every_row_a_tile() -> None:
    fixed = np.full(TILES_ONLY.fixed_words, -1, dtype=np.int32)
    rows = [StepRow(3, 0, 200, False), StepRow(5, 40, 1, True), StepRow(2, 9, 1, True)]
    step = StepPacker(TILES_ONLY, HISTORY, TABLE).pack(StepPlan(1, rows), fixed)
    assert fixed[:5].tolist() == [3, 0, 202, 2, 4]
    assert (step.num_decodes, step.num_tiles) == (0, 4)
    assert fixed[TILES_ONLY.row_slots :][:3].tolist() == [5, 2, 3]
    assert fixed[TILES_ONLY.tile_rows :][:4].tolist() == [2, 0, 1, 2]
    assert fixed[TILES_ONLY.tile_starts :][:4].tolist() == [128, 0, 0, 0]


def test_updates_rebuild_histories_and_tables() -> None:
    packer = StepPacker(LAYOUT, HISTORY, TABLE)
    token_ids, tables = np.zeros((20, HISTORY), np.int32), np.zeros((20, TABLE), np.int32)
    new = [NewSequence(4, [7, 8, 9], 3, [11, 12], SamplingSpec()), NewSequence(1, [5], 1, [13], SamplingSpec())]
    step, _ = pack(StepPlan(1, [StepRow(4, 0, 3, True), StepRow(1, 0, 1, True)], new), packer)
    apply_updates(step, token_ids, tables)
    assert token_ids[4, :3].tolist() == [7, 8, 9]
    assert tables[4, :3].tolist() == [11, 12, 0]
    assert (token_ids[1, 0], tables[1, 0]) == (5, 13)
    assert step.longest_update == 3

    step, _ = pack(StepPlan(2, [StepRow(4, 3, 1, True, [14, 15]), StepRow(1, 1, 1, True)]), packer)
    apply_updates(step, token_ids, tables)
    assert tables[4, :5].tolist() == [11, 12, 14, 15, 0]
    assert step.num_updates == 1
    assert step.plan_order is None

    again = [NewSequence(4, [1], 1, [9], SamplingSpec())]
    step, _ = pack(StepPlan(3, [StepRow(4, 0, 1, True)], again, freed_slots=[4]), packer)
    apply_updates(step, token_ids, tables)
    assert tables[4, 0] == 9, "a slot that is used again starts a new table"


def test_a_step_without_changes_has_no_updates() -> None:
    step, fixed = pack(StepPlan(1, [], copies=[(1, 2), (3, 4)]))
    assert (step.num_updates, step.longest_update, step.num_tokens) == (0, 0, 0)
    assert step.copies.tolist() == [[1, 2], [3, 4]]
    assert fixed[:5].tolist() == [0] * 5


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (3, 4), (9, 16), (17, 20), (20, 20)])
def test_row_buckets(rows: int, bucket: int) -> None:
    assert row_bucket(rows, decode_buckets(20)) == bucket


@given(counts=st.lists(st.sampled_from([1, 1, 1, 2, 15, 129, 200]), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("layout", [LAYOUT, TILES_ONLY])
def test_bucket_has_room_for_the_step(layout: PackedLayout, counts: list[int]) -> None:
    counts = [count for index, count in enumerate(counts) if sum(counts[: index + 1]) <= 512] or [1]
    fixed = np.zeros(layout.fixed_words, np.int32)
    plan = StepPlan(1, [StepRow(slot, 3, count, True) for slot, count in enumerate(counts)])
    step = StepPacker(layout, HISTORY, TABLE).pack(plan, fixed)
    bucket = choose_bucket(step, layout, decode_buckets(20))
    assert bucket.num_tokens >= step.num_tokens
    assert bucket.max_decodes >= step.num_decodes
    assert bucket.max_tiles >= step.num_tiles
    assert bucket.num_tokens <= 512, "buffers are as large as the budget"
    if max(counts) == 1:
        assert bucket == decode_bucket(bucket.num_tokens, layout)
    if layout.tiles_only:
        assert bucket.max_decodes == 0
        assert bucket.is_graph, "room for as many tiles as there can be rows"
