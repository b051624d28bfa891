# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.errors import InternalError, InvalidRequest, PromptTooLong
from mii_zmq.worker.fake_model import EOS_TOKEN_ID, FakeModel
from mii_zmq.worker.plan import SequenceOutput, StepPlan, StepResult
from mii_zmq.worker.prompt_planner import AGEING_S
from mii_zmq.worker.scheduler import Scheduler
from tests.engine_driver import make_driver, make_limits, make_request


def make_scheduler(**limits: int) -> Scheduler:
    return Scheduler(make_limits(**limits), model="test")


def shares(plan: StepPlan | None) -> dict[int, int]:
    """Slot -> tokens. Slots are given out from 0 up."""
    return {} if plan is None else {row.slot: row.num_tokens for row in plan.rows}


def answer(plan: StepPlan | None, token_id: int = 65) -> StepResult:
    assert plan is not None
    return StepResult(plan.step, [token_id for row in plan.rows if row.sample])


def step(scheduler: Scheduler, now: float = 0.0) -> tuple[StepPlan, list[SequenceOutput]]:
    plan = scheduler.plan(now)
    assert plan is not None
    outputs = scheduler.complete(answer(plan))
    scheduler.check()
    return plan, outputs


def test_nothing_to_do():
    scheduler = make_scheduler()
    assert scheduler.plan(0.0) is None
    assert not scheduler.has_work
    scheduler.check()


def test_a_lone_prompt_fills_the_budget_in_one_row():
    scheduler = make_scheduler()
    scheduler.add(make_request(1, 70), 0.0)
    plans = [step(scheduler)[0] for _ in range(4)]
    assert [shares(plan) for plan in plans] == [{0: 32}, {0: 32}, {0: 6}, {0: 1}]
    assert [row.sample for plan in plans for row in plan.rows] == [False, False, True, True]
    assert [row.start for plan in plans for row in plan.rows] == [0, 32, 64, 70]
    new = plans[0].new[0]
    assert (new.num_prompt_tokens, len(new.token_ids), len(new.block_ids)) == (70, 70, 8)
    assert [len(plan.rows[0].new_block_ids) for plan in plans] == [0, 8, 2, 0]


def test_decodes_go_first_and_prompt_chunks_fill_the_budget_exactly():
    scheduler = make_scheduler()
    scheduler.add(make_request(1, 10, 20), 0.0)
    scheduler.add(make_request(2, 10, 20), 0.0)
    step(scheduler)
    scheduler.add(make_request(3, 100, 20), 0.0)
    plan, _ = step(scheduler)
    assert shares(plan) == {0: 1, 1: 1, 2: 30}
    assert [row.slot for row in plan.rows] == [0, 1, 2]


def test_the_oldest_prompt_gets_half_the_shortest_the_rest():
    scheduler = make_scheduler()
    for seq_id, num_tokens in ((1, 100), (2, 60), (3, 10), (4, 40)):
        scheduler.add(make_request(seq_id, num_tokens), 0.0)
    plan, _ = step(scheduler)
    lengths = {new.slot: new.num_prompt_tokens for new in plan.new}
    assert {lengths[slot]: share for slot, share in shares(plan).items()} == {100: 16, 10: 10, 40: 6}


def test_the_oldest_takes_what_the_others_leave():
    scheduler = make_scheduler()
    scheduler.add(make_request(1, 100), 0.0)
    scheduler.add(make_request(2, 5), 0.0)
    assert shares(scheduler.plan(0.0)) == {0: 27, 1: 5}
    scheduler.check()


def test_priority_goes_before_arrival_but_not_for_ever():
    scheduler = make_scheduler(max_sequences=1)
    scheduler.add(make_request(1, 4, 1), 0.0)
    scheduler.add(make_request(2, 4, 1, priority=-1), 1.0)
    scheduler.add(make_request(3, 4, 1, priority=-1), 60.0)
    assert [step(scheduler, 60.0)[1][0].seq_id for _ in range(3)] == [2, 1, 3]


def test_a_prompt_without_room_is_passed_until_it_has_waited_long_enough():
    scheduler = make_scheduler(num_blocks=16)
    scheduler.add(make_request(1, 24, 30), 0.0)
    step(scheduler)
    scheduler.add(make_request(2, 48), 1.0)
    scheduler.add(make_request(3, 8, 1), 2.0)
    plan, _ = step(scheduler, 2.0)
    assert [new.num_prompt_tokens for new in plan.new] == [8]
    scheduler.add(make_request(4, 8, 1), 3.0)
    plan, _ = step(scheduler, 1.0 + AGEING_S)
    assert plan.new == []
    order = []
    while scheduler.has_work:
        order += [len(new.token_ids) for new in step(scheduler, 10.0)[0].new]
    assert order == [48, 8]


def test_identical_prompts_arriving_together_are_computed_once():
    scheduler = make_scheduler(token_budget=64)
    for seq_id in range(4):
        scheduler.add(make_request(seq_id, [5] * 18), 0.0)
    plan, outputs = step(scheduler)
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(0, 18), (16, 2), (16, 2), (16, 2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 16, 16]
    assert scheduler.stats().num_prefix_hit_tokens == 48


def test_identical_long_prompts_share_the_work_chunk_by_chunk():
    scheduler = make_scheduler(token_budget=16)
    for seq_id in range(2):
        scheduler.add(make_request(seq_id, [5] * 62 + [seq_id], 1), 0.0)
    num_steps = 0
    while scheduler.has_work:
        step(scheduler)
        num_steps += 1
    assert num_steps == 5
    assert scheduler.blocks.num_used == 0


def test_a_fully_cached_prompt_computes_one_token_in_a_copy_of_a_shared_block():
    scheduler = make_scheduler()
    prompt = list(range(8))
    scheduler.add(make_request(1, prompt, 20), 0.0)
    step(scheduler)
    scheduler.add(make_request(2, prompt, 20), 0.0)
    plan, outputs = step(scheduler)
    held = plan.new[0].block_ids
    assert plan.copies == [(1, held[1])]
    assert held[0] == 0
    assert held[1] != 1
    row = plan.rows[-1]
    assert (row.start, row.num_tokens, row.sample) == (7, 1, True)
    assert outputs[-1].num_cached_tokens == 7


def test_a_fully_cached_prompt_nobody_holds_needs_no_copy():
    scheduler = make_scheduler()
    scheduler.add(make_request(1, list(range(8)), 1), 0.0)
    step(scheduler)
    scheduler.add(make_request(2, list(range(8)), 1), 0.0)
    plan, _ = step(scheduler)
    assert plan.copies == []
    assert shares(plan) == {0: 1}


def test_a_block_filled_in_this_step_is_not_copied_in_it():
    scheduler = make_scheduler()
    for seq_id in (1, 2):
        scheduler.add(make_request(seq_id, list(range(8)), 1), 0.0)
    plan, _ = step(scheduler)
    assert plan.copies == []
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(0, 8), (4, 4)]


def test_output_blocks_are_found_by_the_next_turn():
    scheduler = make_scheduler()
    scheduler.add(make_request(1, [1, 2, 3], 10), 0.0)
    while scheduler.has_work:
        step(scheduler)
    scheduler.add(make_request(2, [1, 2, 3] + [65] * 10 + [9, 9], 1), 0.0)
    _, outputs = step(scheduler)
    assert outputs[0].num_cached_tokens == 12


def test_nothing_is_shared_between_salts_or_without_the_cache():
    for scheduler, salts in ((make_scheduler(), ("a", "b")), (Scheduler(make_limits(), prefix_cache=False), ("", ""))):
        for seq_id, salt in enumerate(salts):
            scheduler.add(make_request(seq_id, [5] * 20, 1, cache_salt=salt), 0.0)
            step(scheduler)
        assert scheduler.stats().num_prefix_hit_tokens == 0


def test_reset_prefix_cache_forgets_everything_while_sequences_run():
    driver = make_driver()
    driver.add(*(make_request(seq_id, [5] * 20, 12) for seq_id in range(3)))
    for _ in range(3):
        driver.step()
    driver.core.scheduler.reset_prefix_cache()
    driver.core.scheduler.check()
    assert driver.core.stats().num_cached_blocks == 0
    driver.run()
    driver.check_outputs()


@pytest.mark.parametrize(("priorities", "victim"), [((0, 0), 2), ((1, 0), 1)])
def test_the_newest_least_urgent_sequence_is_preempted_and_nobody_passes_it(priorities: tuple[int, int], victim: int):
    scheduler = make_scheduler(num_blocks=5, token_budget=64)
    for seq_id, priority in zip((1, 2), priorities, strict=True):
        scheduler.add(make_request(seq_id, 5 + seq_id, 12, priority=priority), float(seq_id))
    while not scheduler.num_preemptions:
        step(scheduler, 2.0)
    scheduler.add(make_request(3, 1, 1, priority=2), 2.0)
    admitted = []
    while scheduler.has_work:
        admitted += [new.num_prompt_tokens for new in step(scheduler, 2.0)[0].new]
    assert admitted == [5 + victim, 1]
    assert scheduler.num_preemptions == 1


def test_a_preempted_sequence_waits_for_its_token_in_flight_and_keeps_it():
    scheduler = make_scheduler(num_blocks=4, max_sequences=2, token_budget=16)
    scheduler.add(make_request(1, 7, 9), 0.0)
    scheduler.add(make_request(2, 4, 6), 0.0)
    in_flight: deque[StepPlan] = deque()
    outputs: dict[int, list[int]] = {1: [], 2: []}
    was_parked = False
    for turn in range(40):
        plan = scheduler.plan(0.0)
        if plan is not None:
            in_flight.append(plan)
            assert not (was_parked and scheduler._queues.parked and plan.new)
        was_parked = was_parked or bool(scheduler._queues.parked)
        scheduler.check()
        if in_flight and (len(in_flight) > 1 or plan is None):
            for output in scheduler.complete(answer(in_flight.popleft(), 60 + turn)):
                outputs[output.seq_id] += output.token_ids
    assert was_parked
    assert (len(outputs[1]), len(outputs[2])) == (9, 6)
    assert not scheduler.has_work


def test_a_decode_waits_for_blocks_that_are_about_to_come_back():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request(1, 4, 8), 0.0)
    scheduler.add(make_request(2, 4, 5), 0.0)
    in_flight: deque[StepPlan] = deque()
    num_pauses = 0
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        if plan is not None:
            in_flight.append(plan)
        num_pauses += plan is None and scheduler.stats().num_running == 2
        if len(in_flight) > 1 or plan is None:
            scheduler.complete(answer(in_flight.popleft()))
        scheduler.check()
    assert num_pauses == 1
    assert scheduler.num_preemptions == 0


def test_slots_are_reused_in_the_plan_that_frees_them():
    scheduler = make_scheduler(max_sequences=1)
    scheduler.add(make_request(1, 4, 1), 0.0)
    scheduler.add(make_request(2, 4, 1), 0.0)
    step(scheduler)
    plan, _ = step(scheduler)
    assert plan.freed_slots == [0]
    assert plan.new[0].slot == 0


def test_never_more_sequences_than_budget():
    scheduler = make_scheduler(token_budget=3, max_sequences=8)
    for seq_id in range(6):
        scheduler.add(make_request(seq_id, 2, 60), 0.0)
    for _ in range(30):
        plan, _ = step(scheduler)
        assert plan.num_tokens <= 3
    assert scheduler.stats().num_running == 3


def test_expired_sequences_end_without_compute_or_at_the_next_plan():
    scheduler = make_scheduler(max_sequences=1)
    scheduler.add(make_request(1, 4, 50, deadline_s=5.0), 0.0)
    scheduler.add(make_request(2, 4, deadline_s=2.0), 0.0)
    scheduler.add(make_request(3, 4, 1), 0.0)
    step(scheduler)
    _, outputs = step(scheduler, 2.0)
    assert [(item.seq_id, item.finish_reason) for item in outputs if item.finish_reason] == [(2, "deadline")]
    plan, outputs = step(scheduler, 5.0)
    assert [(item.seq_id, item.finish_reason) for item in outputs if item.finish_reason] == [
        (1, "deadline"),
        (3, "length"),
    ]
    assert shares(plan) == {0: 4}
    scheduler.add(make_request(4, 4, deadline_s=1.0), 6.0)
    assert scheduler.plan(7.0) is None
    assert [item.finish_reason for item in scheduler.take_outputs()] == ["deadline"]
    assert not scheduler.has_work


def test_deadlines_of_finished_sequences_do_not_pile_up():
    scheduler = make_scheduler()
    for seq_id in range(300):
        scheduler.add(make_request(seq_id, 1, 1, deadline_s=1e6), 0.0)
        step(scheduler)
    assert len(scheduler._deadlines) <= 68


def test_min_new_tokens_keeps_stop_ids_without_effect():
    driver = make_driver(model=FakeModel(eos_after=1))
    sampling = make_request(0, 1).sampling
    driver.add(make_request(1, 4, 10, sampling=type(sampling)(stop_token_ids=(EOS_TOKEN_ID,), min_new_tokens=6)))
    driver.run()
    assert len(driver.outputs[1]) == 7
    driver.check_outputs()


def test_add_refuses_duplicates_and_the_impossible():
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request(1, 4), 0.0)
    with pytest.raises(InvalidRequest, match="in use"):
        scheduler.add(make_request(1, 4), 0.0)
    with pytest.raises(PromptTooLong):
        scheduler.add(make_request(2, 16), 0.0)
    scheduler.add(make_request(3, 8, 8), 0.0)
    assert scheduler.stats().num_waiting == 2
    scheduler.check()


def test_results_must_answer_the_oldest_step():
    scheduler = make_scheduler()
    with pytest.raises(InternalError, match="does not answer any step"):
        scheduler.complete(StepResult(1, []))
    scheduler.add(make_request(1, 4, 9), 0.0)
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    with pytest.raises(InternalError, match="step 2 with 1 tokens does not answer step 1 with 1"):
        scheduler.complete(answer(second))
    with pytest.raises(InternalError, match="with 0 tokens"):
        scheduler.complete(StepResult(1, []))
    assert len(scheduler.complete(answer(first))) == 1


def test_stats_count_outstanding_tokens():
    scheduler = make_scheduler()
    scheduler.add(make_request(1, 40, 10), 0.0)
    assert scheduler.stats().num_outstanding_tokens == 50
    step(scheduler)
    stats = scheduler.stats()
    assert (stats.num_outstanding_tokens, stats.num_running, stats.num_used_blocks, stats.step) == (18, 1, 8, 1)


def test_check_notices_a_lost_sequence():
    scheduler = make_scheduler()
    scheduler.add(make_request(1, 4, 9), 0.0)
    step(scheduler)
    scheduler._queues.decoding.clear()
    with pytest.raises(InternalError, match="queues"):
        scheduler.check()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 80), min_size=1, max_size=8), st.integers(1, 40))
def test_the_budget_is_filled_exactly_while_there_is_enough_work(lengths: list[int], budget: int):
    scheduler = make_scheduler(token_budget=budget, num_blocks=400, max_sequences=8)
    for seq_id, length in enumerate(lengths):
        scheduler.add(make_request(seq_id, [seq_id + 1] * length, 1), 0.0)
    left = sum(lengths)
    while scheduler.has_work:
        num_before = scheduler.blocks.num_hit_tokens
        num_admissible = min(8, budget)
        plan, _ = step(scheduler)
        left -= plan.num_tokens + scheduler.blocks.num_hit_tokens - num_before
        if len(lengths) <= num_admissible:
            assert plan.num_tokens == budget or left == 0
    assert left == 0


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.integers(20, 60), st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=30, max_size=30), st.data()
)
def test_a_long_prompt_under_a_stream_of_short_ones_does_not_starve(
    length: int, stream: list[tuple[int, int]], data: st.DataObject
):
    driver = make_driver(make_limits(num_blocks=24, max_sequences=4, token_budget=data.draw(st.integers(2, 24))))
    driver.add(make_request(999, length, 4))
    turns = 0
    seq_id = 0
    while 999 not in driver.reasons:
        num_prompt, num_new = stream[seq_id % len(stream)]
        driver.add(make_request(seq_id, num_prompt, num_new))
        seq_id += 1
        driver.step()
        driver.clock.now += 0.5
        turns += 1
        # Ageing, then room from at most three running sequences, then at least one token a step.
        assert turns <= 2 * AGEING_S + 30 + 4 * length
    driver.core.cancel(range(seq_id))
    driver.run()
    driver.check_outputs()
