# SPDX-License-Identifier: Apache-2.0
"""Sequences around the length at which a model rotates positions differently.

The fake executor keeps in every KV cell under which rotary lengths it was computed and refuses plans that mix them, or
that compute behind the border on top of keys from before it.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.worker.fake_model import EOS_TOKEN_ID, FakeModel
from mii_zmq.worker.plan import SamplingSpec, StepPlan, StepResult
from mii_zmq.worker.scheduler import Scheduler
from tests.engine_driver import Driver, make_driver, make_limits, make_request

BORDER = 8


def longrope(**limits: Any) -> Driver:
    return make_driver(make_limits(rope_border=BORDER, recomputes_at_border=True, **limits), FakeModel())


def dynamic(**limits: Any) -> Driver:
    return make_driver(make_limits(rope_border=BORDER, **limits), FakeModel())


def installs(driver: Driver) -> list[int]:
    """Known tokens of each sequence that the executor was given."""
    return [len(new.token_ids) for plan in driver.executor.plans for new in plan.new]


def run(driver: Driver, *requests: Any) -> list[int]:
    driver.add(*requests)
    driver.run()
    driver.check_outputs()
    return installs(driver)


def next_step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.complete(StepResult(plan.step, [65 for row in plan.rows if row.sample]))
    scheduler.check()
    return plan


def test_a_sequence_that_grows_past_the_border_is_computed_again():
    driver = longrope()
    request = make_request(1, 5, 10)
    assert run(driver, request) == [5, BORDER + 1]
    again = driver.executor.plans.index(next(plan for plan in driver.executor.plans[1:] if plan.new))
    before = [row.start + row.num_tokens for plan in driver.executor.plans[:again] for row in plan.rows]
    assert max(before) == BORDER, "nothing behind the border was computed before the recomputation"
    plan = driver.executor.plans[again]
    assert plan.freed_slots == [0]
    assert [(row.start, row.num_tokens, row.sample) for row in plan.rows] == [(0, BORDER + 1, True)]
    assert plan.new[0].num_prompt_tokens == 5
    assert plan.new[0].token_ids == request.prompt_token_ids + driver.outputs[1][:4]
    assert driver.core.stats().num_preemptions == 1


def test_without_overlap_it_goes_on_in_the_very_step():
    scheduler = Scheduler(make_limits(rope_border=BORDER, recomputes_at_border=True))
    scheduler.add(make_request(1, 7, 6), 0.0)
    plans = [next_step(scheduler) for _ in range(4)]
    assert [[(row.start, row.num_tokens) for row in plan.rows] for plan in plans] == [
        [(0, 7)], [(7, 1)], [(0, 9)], [(9, 1)],
    ]  # fmt: skip
    assert (plans[2].freed_slots, len(plans[2].new[0].token_ids)) == ([0], 9)


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "lengths"),
    [
        (5, 4, [5]),
        (5, 5, [5, 9]),
        (BORDER, 1, [BORDER]),
        (BORDER, 2, [BORDER, BORDER + 1]),
        (BORDER + 1, 1, [BORDER + 1]),
        (BORDER + 1, 20, [BORDER + 1]),
        (70, 20, [70]),
    ],
)
def test_only_inputs_behind_the_border_count(num_prompt: int, num_new: int, lengths: list[int]):
    """The last output token is never an input: it may lie behind the border."""
    assert run(longrope(), make_request(1, num_prompt, num_new)) == lengths


@pytest.mark.parametrize(
    ("num_resumed", "lengths"), [(2, [6, 9]), (4, [8, 9]), (5, [9]), (11, [15])], ids=["short", "at", "behind", "far"]
)
def test_resumed_tokens_count(num_resumed: int, lengths: list[int]):
    whole = make_request(1, 4, 16)
    expected = FakeModel().generate(whole)
    driver = longrope()
    resumed = make_request(1, whole.prompt_token_ids, 16, resumed_token_ids=expected[:num_resumed])
    assert run(driver, resumed) == lengths
    assert driver.outputs[1] == expected[num_resumed:]


def test_a_long_prompt_in_chunks_is_in_the_long_regime_from_its_first_token():
    driver = longrope(token_budget=3)
    assert run(driver, make_request(1, 20, 4)) == [20]
    assert [row.num_tokens for row in driver.executor.plans[0].rows] == [3]


def parked_at_border(**fields: Any) -> Driver:
    """An engine whose one sequence waits for the token at the border to be known."""
    driver = longrope()
    driver.add(make_request(1, 6, 10, **fields))
    while not driver.core.scheduler.num_preemptions:
        driver.step()
        driver.clock.now += 1.0
    return driver


def test_a_sequence_cancelled_at_the_border_ends_once():
    scheduler = Scheduler(make_limits(rope_border=BORDER, recomputes_at_border=True))
    scheduler.add(make_request(1, BORDER, 10), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert scheduler.plan(0.0) is None, "the token at the border is not known yet"
    assert scheduler.stats().num_used_blocks == 0
    scheduler.cancel([1])
    outputs = scheduler.complete(StepResult(1, [65]))
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [([], "cancelled")]
    scheduler.check()
    assert not scheduler.has_work


def test_a_deadline_at_the_border_ends_it_with_all_its_tokens():
    driver = parked_at_border(deadline_s=3.5)
    driver.clock.now = 4.0
    driver.run()
    assert driver.reasons == {1: "deadline"}
    assert len(driver.outputs[1]) == BORDER + 1 - 6
    driver.check_outputs()
    assert installs(driver) == [6]


def test_a_stop_token_at_the_border_spares_the_recomputation():
    driver = make_driver(make_limits(rope_border=BORDER, recomputes_at_border=True), FakeModel(eos_after=2))
    assert run(driver, make_request(1, 6, 10)) == [6]
    assert driver.reasons == {1: "stop"}
    assert driver.outputs[1][-1] == EOS_TOKEN_ID


def test_nobody_passes_a_sequence_at_the_border():
    driver = longrope(max_sequences=1)
    driver.add(make_request(1, 6, 6), make_request(2, 4, 2), make_request(3, 30, 2, priority=1))
    driver.run()
    driver.check_outputs()
    assert installs(driver) == [6, BORDER + 1, 4, 30]


def test_regimes_of_longrope_share_within_but_not_with_each_other():
    driver = longrope()
    tokens = [7] * 20
    for seq_id, num_prompt in enumerate((8, 12, 8, 16)):
        run(driver, make_request(seq_id, tokens[:num_prompt], 1))
    assert driver.num_cached_tokens == {0: 0, 1: 0, 2: 7, 3: 12}


def test_a_recomputed_sequence_finds_what_another_long_one_has_computed():
    driver = longrope()
    first = make_request(1, 6, 12)
    run(driver, first)
    driver.add(make_request(2, first.prompt_token_ids, 12))
    num_hits = driver.core.stats().num_prefix_hit_tokens
    driver.run()
    driver.check_outputs()
    assert installs(driver) == [6, 9, 6, 9]
    assert driver.core.stats().num_prefix_hit_tokens - num_hits == 4 + 8


def test_dynamic_sequences_go_on_across_the_border():
    driver = dynamic()
    assert run(driver, make_request(1, 5, 20), make_request(2, 30, 4)) == [5, 30]
    assert driver.core.stats().num_preemptions == 0


def test_dynamic_prompts_behind_the_border_share_only_with_those_of_their_length():
    driver = dynamic()
    tokens = [7] * 40
    for seq_id, num_prompt in enumerate((8, 20, 20, 24, 8)):
        run(driver, make_request(seq_id, tokens[:num_prompt], 1))
    assert driver.num_cached_tokens == {0: 0, 1: 0, 2: 19, 3: 0, 4: 7}


def test_dynamic_output_is_found_again_by_prompts_within_the_border():
    """Up to the border nothing is scaled, and behind it the position alone decides."""
    driver = dynamic()
    whole = make_request(1, 6, 16)
    run(driver, whole)
    resumed = driver.outputs[1][:11]
    driver.add(make_request(2, whole.prompt_token_ids, 16, resumed_token_ids=resumed))
    split = make_request(3, whole.prompt_token_ids + resumed[:2], 14, resumed_token_ids=resumed[2:])
    driver.add(split, make_request(4, whole.prompt_token_ids + resumed, 5))
    num_hits = driver.core.stats().num_prefix_hit_tokens
    driver.run()
    driver.check_outputs()
    assert driver.core.stats().num_prefix_hit_tokens - num_hits == 2 * 16, "the long prompt shares nothing"


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 2, 4]))
    border = draw(st.integers(1, 20))
    num_blocks = draw(st.integers(-(-(border + 4) // block_size), -(-64 // block_size)))
    capacity = block_size * num_blocks
    requests = []
    for seq_id in range(draw(st.integers(1, 8))):
        # Around the border and often in whole blocks, from few tokens, so that regimes meet in the prefix cache.
        num_prompt = max(1, min(capacity - 2, border + draw(st.integers(-6, 4))))
        if num_prompt > block_size and draw(st.booleans()):
            num_prompt -= num_prompt % block_size
        prompt = [0] * (num_prompt - 1) + [draw(st.sampled_from([0, 0, 1]))]
        num_new = draw(st.integers(1, min(capacity - num_prompt, 16)))
        fields = {
            "priority": draw(st.integers(-1, 1)),
            "deadline_s": draw(st.sampled_from([None, None, None, 4.0, 12.0])),
            "sampling": SamplingSpec(stop_token_ids=draw(st.sampled_from([(EOS_TOKEN_ID,), ()]))),
        }
        request = make_request(seq_id, prompt, num_new, **fields)
        num_resumed = draw(st.integers(0, num_new - 1)) if draw(st.booleans()) else 0
        request.resumed_token_ids = FakeModel().generate(request)[:num_resumed]
        requests.append(request)
    return {
        "limits": make_limits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_sequences=draw(st.integers(1, 6)),
            token_budget=draw(st.integers(1, 24)),
            rope_border=border,
            recomputes_at_border=draw(st.booleans()),
        ),
        "requests": requests,
        "arrivals": [draw(st.integers(0, 12)) for _ in requests],
        "cancels": {draw(st.integers(0, 20)): draw(st.integers(0, 7)) for _ in range(draw(st.integers(0, 2)))},
        "eos_every": draw(st.sampled_from([None, None, 8])),
        "failed_step": draw(st.sampled_from([None, None, None, 3, 6])),
        "failed_row": draw(st.sampled_from([None, None, None, (2, 0), (5, 1)])),
    }


def check_regimes(driver: Driver) -> None:
    """From the plans alone: which tokens each installed sequence computed, and under which regime."""
    limits = driver.core.limits
    border = limits.rope_border
    assert border is not None
    known: dict[int, int] = {}
    for plan in driver.executor.plans:
        known.update({new.slot: len(new.token_ids) for new in plan.new})
        for row in plan.rows:
            is_behind = row.start + row.num_tokens > border
            assert not (limits.recomputes_at_border and is_behind and known[row.slot] <= border)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(scenarios())
def test_whatever_happens_at_the_border_every_sequence_ends_once_and_equals_its_solo_run(scenario: dict[str, Any]):
    driver = make_driver(scenario["limits"], FakeModel(eos_every=scenario["eos_every"]))
    faults, logger = driver.executor.faults, logging.getLogger("mii_zmq.worker.core")
    logger.setLevel(logging.CRITICAL)
    if scenario["failed_step"]:
        faults.steps[scenario["failed_step"]] = RuntimeError("step")
    if scenario["failed_row"]:
        step, slot = scenario["failed_row"]
        faults.rows[step] = {slot: "row"}
    turn = 0
    try:
        while driver.core.has_work or turn <= max(scenario["arrivals"]):
            arrivals = zip(scenario["requests"], scenario["arrivals"], strict=True)
            driver.add(*(request for request, arrival in arrivals if arrival == turn))
            if turn in scenario["cancels"]:
                driver.core.cancel([scenario["cancels"][turn]])
            driver.step()
            driver.clock.now += 1.0
            turn += 1
            assert turn < 5000, driver.core.stats()
    finally:
        logger.setLevel(logging.NOTSET)
    driver.run()
    driver.check_outputs()
    check_regimes(driver)
    for seq_id, reason in driver.reasons.items():
        assert reason != "error" or scenario["failed_step"] or scenario["failed_row"]
        assert reason != "deadline" or driver.requests[seq_id].deadline_s is not None
    # What the cache now holds is right for whoever comes next, too.
    faults.steps.clear()
    faults.rows.clear()
    driver.add(*(make_request(100 + item.seq_id, item.prompt_token_ids, 2) for item in scenario["requests"]))
    driver.run()
    driver.check_outputs()
