# SPDX-License-Identifier: Apache-2.0
"""Cancelled and expired sequences: their blocks are free at once, wherever they were, and no step follows for them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.worker.fake_model import EOS_TOKEN_ID
from mii_zmq.worker.plan import SamplingSpec
from tests.engine_driver import Driver, make_driver, make_limits, make_request


def num_planned_tokens(driver: Driver) -> int:
    return sum(plan.num_tokens for plan in driver.executor.plans)


# With 8 tokens per step: 0 to 2 in the middle of the prompt, 3 in the step that draws the first token, then decoding.
@pytest.mark.parametrize("num_steps", range(9))
@pytest.mark.parametrize("min_new_tokens", [0, 20])
def test_a_lone_sequence_frees_everything_at_once(num_steps: int, min_new_tokens: int):
    driver = make_driver(make_limits(token_budget=8), prefix_cache=False)
    sampling = SamplingSpec(stop_token_ids=(EOS_TOKEN_ID,), min_new_tokens=min_new_tokens)
    driver.add(make_request(1, 30, 40, sampling=sampling))
    for _ in range(num_steps):
        driver.step()
    num_tokens = num_planned_tokens(driver)
    driver.core.cancel([1])
    assert driver.core.stats().num_used_blocks == 0
    assert driver.core.stats().num_running == 0
    driver.step()
    assert driver.reasons == {1: "cancelled"}
    driver.core.cancel([1, 99])
    driver.run()
    assert num_planned_tokens(driver) == num_tokens
    assert driver.core.stats().num_outstanding_tokens == 0


def test_a_preempted_sequence_can_be_cancelled_while_it_waits():
    driver = make_driver(make_limits(num_blocks=8, block_size=4, max_sequences=4))
    queues = driver.core.scheduler._queues
    driver.add(*(make_request(seq_id, 6, 20) for seq_id in range(4)))
    found: list[int] = []
    while not found:
        driver.step()
        found = [item.seq_id for item in queues.waiting if item.has_run]
    driver.core.cancel(found)
    driver.run()
    driver.check_outputs()
    assert {seq_id for seq_id, reason in driver.reasons.items() if reason == "cancelled"} == set(found)


def test_a_preempted_sequence_can_be_cancelled_while_its_token_is_in_flight():
    driver = make_driver(make_limits(num_blocks=8, block_size=4, max_sequences=4))
    scheduler, executor = driver.core.scheduler, driver.executor
    driver.add(*(make_request(seq_id, 6, 20) for seq_id in range(4)))
    pending = []
    while not scheduler._queues.parked:
        plan = scheduler.plan(0.0)
        assert plan is not None
        pending.append(executor.submit(plan))
        if len(pending) > 1 and not scheduler._queues.parked:
            scheduler.complete(pending.pop(0).result())
    parked = next(iter(scheduler._queues.parked))
    scheduler.cancel([parked.seq_id])
    scheduler.check()
    num_tokens = len(parked.token_ids)
    for step in pending:
        scheduler.complete(step.result())
        scheduler.check()
    assert (parked.is_finished, len(parked.token_ids)) == (True, num_tokens)
    assert not scheduler._queues.parked


def test_a_sequence_that_expires_while_it_waits_never_reaches_the_device():
    driver = make_driver(make_limits(max_sequences=1))
    running, late = make_request(1, 8, 30), make_request(2, 50, 5, deadline_s=5.0)
    driver.add(running, late)
    for _ in range(10):
        driver.step()
    driver.clock.now += 6.0
    driver.run()
    assert driver.reasons == {1: "length", 2: "deadline"}
    assert num_planned_tokens(driver) == 8 + 29


def test_a_sequence_that_expires_before_the_first_plan_costs_no_step():
    driver = make_driver()
    driver.add(make_request(1, 8, deadline_s=0.0), make_request(2, 8, deadline_s=0.5))
    driver.clock.now += 1.0
    driver.run()
    assert driver.reasons == {1: "deadline", 2: "deadline"}
    assert driver.executor.plans == []


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    actions = st.one_of(
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("add"), st.integers(1, 40)),
        st.tuples(st.just("cancel"), st.integers(0, 12)),
        st.tuples(st.just("wait"), st.integers(1, 5)),
    )
    return {
        "actions": draw(st.lists(actions, min_size=5, max_size=60)),
        "num_blocks": draw(st.integers(12, 30)),
        "token_budget": draw(st.integers(1, 30)),
        "prefix_cache": draw(st.booleans()),
        "min_new_tokens": draw(st.sampled_from([0, 10])),
        "deadline_s": draw(st.sampled_from([None, 8.0])),
    }


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(histories())
def test_whatever_is_added_and_cancelled_nothing_is_left_when_idle(history: dict[str, Any]):
    limits = make_limits(num_blocks=history["num_blocks"], token_budget=history["token_budget"], max_sequences=4)
    driver = make_driver(limits, prefix_cache=history["prefix_cache"])
    sampling = SamplingSpec(stop_token_ids=(EOS_TOKEN_ID,), min_new_tokens=history["min_new_tokens"])
    for action, number in history["actions"]:
        if action == "step":
            for _ in range(number):
                driver.step()
        elif action == "add":
            prompt, seq_id = [0] * (number % 33 + 1), len(driver.requests)
            driver.add(make_request(seq_id, prompt, 12, sampling=sampling, deadline_s=history["deadline_s"]))
        elif action == "wait":
            driver.clock.now += number
        else:
            driver.core.cancel([number])
            assert number not in driver.core.scheduler._sequences
            driver.core.scheduler.check()
    driver.core.cancel(range(0, 60, 2))
    driver.run()
    driver.check_outputs()
