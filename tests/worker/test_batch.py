# SPDX-License-Identifier: Apache-2.0
"""Plans become flat batches; slots keep their state through differences and reuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mii_zmq.worker.batch import SlotState, build_batch
from mii_zmq.worker.plan import NewSequence, SamplingSpec, StepPlan, StepRow

CPU = torch.device("cpu")


def make_state() -> SlotState:
    return SlotState(max_sequences=6, max_model_len=32, block_size=4, device=CPU)


def new(slot: int, token_ids: list[int], block_ids: list[int]) -> NewSequence:
    return NewSequence(slot, token_ids, len(token_ids), block_ids, SamplingSpec())


def test_rows_are_flattened_with_decodes_first_by_length() -> None:
    state = make_state()
    histories = {1: list(range(10, 20)), 2: list(range(20, 26)), 4: list(range(40, 43)), 5: list(range(50, 59))}
    plan = StepPlan(
        1,
        rows=[StepRow(1, 4, 6, False), StepRow(2, 5, 1, True), StepRow(5, 0, 9, True), StepRow(4, 2, 1, True)],
        new=[new(1, histories[1], [7, 3, 9]), new(2, histories[2], [0, 8]), new(4, histories[4], [5]),
             new(5, histories[5], [1, 2, 6])],
    )  # fmt: skip
    state.apply(plan)
    batch = build_batch(plan, state)
    forward = batch.forward
    assert forward.token_ids.tolist() == [42, 25, *range(50, 59), *range(14, 20)]
    assert forward.positions.tolist() == [2, 5, *range(9), *range(4, 10)]
    assert forward.mapping.block_ids.tolist() == [5, 8, 1, 1, 1, 1, 2, 2, 2, 2, 6, 3, 3, 3, 3, 9, 9]
    assert forward.mapping.offsets.tolist() == [2, 1, 0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 1]
    assert forward.layout.query_start_loc.tolist() == [0, 1, 2, 11, 17]
    assert forward.layout.seq_lens.tolist() == [3, 6, 9, 10]
    assert forward.layout.block_tables[3].tolist() == [7, 3, 9]
    assert forward.logit_rows is not None
    assert forward.logit_rows.tolist() == [0, 1, 10]
    assert batch.sample_slots == [4, 2, 5]
    assert batch.sample_positions == [3, 6, 9]
    assert batch.plan_order == [1, 2, 0], "slots 2, 5, 4 in the plan's order"


def rope_lengths(plan: StepPlan, state: SlotState) -> list[int]:
    state.apply(plan)
    lengths = build_batch(plan, state).forward.rope_lengths
    assert lengths is not None
    assert lengths.dtype == torch.int64
    return lengths.tolist()


def test_rope_lengths_are_kept_only_for_models_with_a_border() -> None:
    state = make_state()
    plan = StepPlan(1, [StepRow(0, 0, 3, False)], [new(0, [1, 2, 3], [0])])
    state.apply(plan)
    assert build_batch(plan, state).forward.rope_lengths is None
    assert state.fixed_rope_lengths is None


@pytest.mark.parametrize(("recomputes", "fixed"), [(True, 9), (False, 4)])
def test_rope_lengths_start_at_what_was_installed_and_grow_with_the_position(recomputes: bool, fixed: int) -> None:
    state = SlotState(6, 32, 4, CPU, rope_border=8, recomputes_at_border=recomputes)
    first = new(3, list(range(9)), [1, 2, 3])
    first.num_prompt_tokens = 4
    plan = StepPlan(1, [StepRow(3, 2, 6, False), StepRow(1, 0, 2, True)], [first, new(1, [5, 6], [7])])
    assert rope_lengths(plan, state) == [2, 2, *(max(fixed, position + 1) for position in range(2, 8))]
    assert rope_lengths(StepPlan(2, [StepRow(1, 2, 1, True), StepRow(3, 8, 1, True)]), state) == [3, 9]
    assert rope_lengths(StepPlan(3, [StepRow(3, 9, 1, True)]), state) == [10]


def test_a_reused_slot_takes_the_rope_length_of_its_new_sequence() -> None:
    state = SlotState(6, 32, 4, CPU, rope_border=8, recomputes_at_border=True)
    state.apply(StepPlan(1, [], [new(0, list(range(9)), [1, 2, 3])]))
    plan = StepPlan(2, [StepRow(0, 0, 2, True)], [new(0, [7, 8], [5])], freed_slots=[0])
    assert rope_lengths(plan, state) == [2, 2]


def test_no_sampled_row() -> None:
    state = make_state()
    plan = StepPlan(1, [StepRow(0, 0, 3, False)], [new(0, [1, 2, 3], [0])])
    state.apply(plan)
    assert build_batch(plan, state).forward.logit_rows is None


def test_recorded_ids_are_the_next_inputs() -> None:
    state = make_state()
    first = StepPlan(1, [StepRow(3, 0, 4, True)], [new(3, [1, 2, 3, 4], [2])])
    state.apply(first)
    state.record([3], [4], torch.tensor([99]))
    second = StepPlan(2, [StepRow(3, 4, 1, True, [5])])
    state.apply(second)
    batch = build_batch(second, state)
    assert batch.forward.token_ids.tolist() == [99]
    assert batch.forward.mapping.block_ids.tolist() == [5]
    assert batch.forward.layout.block_tables.tolist() == [[2, 5]]


def test_slot_reuse_starts_a_new_block_table() -> None:
    state = make_state()
    state.apply(StepPlan(1, [], [new(0, list(range(9)), [1, 2, 3])]))
    state.apply(StepPlan(2, [StepRow(0, 0, 2, True)], [new(0, [7, 8], [5])], freed_slots=[0]))
    state.apply(StepPlan(3, [StepRow(0, 4, 1, True, [9])]))
    assert state.block_tables[0, :2].tolist() == [5, 9]
    assert state.token_ids[0, :2].tolist() == [7, 8]


def test_begun_blocks_are_those_started_and_left_partly_filled() -> None:
    state = make_state()
    tables = {0: [10, 11, 12], 1: [20, 21], 2: [30], 3: [40, 41]}
    state.apply(StepPlan(1, [], [new(slot, [0], blocks) for slot, blocks in tables.items()]))
    rows = [StepRow(0, 0, 9, True), StepRow(1, 0, 8, True), StepRow(2, 1, 2, True), StepRow(3, 4, 1, True)]
    assert state.begun_blocks(rows) == [12, 41]


def test_the_longest_sequence_has_room_for_its_last_draw() -> None:
    state = make_state()
    plan = StepPlan(1, [StepRow(0, 0, 32, True)], [new(0, list(range(32)), list(range(8)))])
    state.apply(plan)
    batch = build_batch(plan, state)
    state.record(batch.sample_slots, batch.sample_positions, torch.tensor([5]))
    assert state.token_ids[0, 32] == 5
    assert np.array_equal(state.block_tables[0], np.arange(8))
