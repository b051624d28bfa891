# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.errors import InvalidRequest
from mii_zmq.worker.fake_model import EOS_TOKEN_ID, FakeModel
from mii_zmq.worker.plan import SamplingSpec, SequenceRequest
from tests.engine_driver import Driver, make_driver, make_limits, make_request


def test_plans_the_next_step_before_reading_the_last():
    trace: list[tuple[str, int]] = []
    driver = make_driver(trace=trace)
    driver.add(make_request(1, 5, max_new_tokens=6))
    driver.run()
    assert trace[:7] == [
        ("plan", 1), ("submit", 1), ("plan", 2), ("submit", 2), ("read", 1), ("plan", 3), ("submit", 3),
    ]  # fmt: skip
    for step in range(1, 6):
        assert trace.index(("submit", step + 1)) < trace.index(("read", step))
    assert [step for event, step in trace if event == "read"] == [1, 2, 3, 4, 5, 6]


def test_returns_at_once_without_work():
    driver = make_driver()
    assert not driver.core.has_work
    assert driver.core.step() == []
    assert driver.executor.plans == []


def test_deadlines_of_sequences_that_have_ended_wake_nobody():
    driver = make_driver()
    driver.add(make_request(1, 5, max_new_tokens=2, deadline_s=5.0))
    assert driver.core.max_wait_s(60.0) == 5.0
    driver.run()
    assert driver.core.max_wait_s(60.0) == 60.0


def test_never_plans_past_the_length_limit_and_discards_one_row_after_a_stop():
    driver = make_driver(model=FakeModel(eos_after=3))
    driver.add(make_request(1, 4, max_new_tokens=2), make_request(2, 4, max_new_tokens=20))
    driver.run()
    driver.check_outputs()
    assert driver.reasons == {1: "length", 2: "stop"}
    assert driver.outputs[2][-1] == EOS_TOKEN_ID
    num_rows = sum(len(plan.rows) for plan in driver.executor.plans)
    assert num_rows == 2 + 5


@pytest.mark.slow
def test_small_pool_preempts_and_every_sequence_equals_its_solo_run():
    driver = make_driver(make_limits(num_blocks=8, block_size=64, max_sequences=16, token_budget=64))
    driver.add(*(make_request(seq_id, 100, max_new_tokens=200) for seq_id in range(16)))
    driver.run()
    driver.check_outputs()
    assert set(driver.reasons.values()) == {"length"}
    assert driver.core.stats().num_preemptions > 0


def test_engine_solo_run_equals_the_models_own():
    for seq_id in range(3):
        driver = make_driver(make_limits(token_budget=7), FakeModel(eos_every=30))
        driver.add(make_request(seq_id, 33, max_new_tokens=40))
        driver.run()
        driver.check_outputs()


def test_refusal_leaves_no_trace():
    driver = make_driver()
    driver.add(make_request(1, 5))
    with pytest.raises(InvalidRequest, match="sequence id 1 is in use"):
        driver.core.add(make_request(1, 5))
    with pytest.raises(InvalidRequest):
        driver.core.add(make_request(2, []))
    driver.run()
    driver.check_outputs()


def test_cancelled_sequences_give_everything_back_and_report_once():
    driver = make_driver(make_limits(max_sequences=4))
    driver.add(*(make_request(seq_id, 20, max_new_tokens=100) for seq_id in range(8)))
    for _ in range(6):
        driver.step()
    driver.core.cancel([0, 1, 7, 99])
    driver.core.cancel([0])
    driver.step()
    assert {seq_id for seq_id, reason in driver.reasons.items() if reason == "cancelled"} == {0, 1, 7}
    driver.core.cancel(range(8))
    driver.run()
    assert driver.num_steps < 12
    driver.check_outputs()


def test_resumed_sequence_goes_on_where_it_stopped():
    whole = make_request(1, 30, max_new_tokens=20)
    model = FakeModel()
    expected = model.generate(whole)
    driver = make_driver(model=model)
    driver.add(make_request(1, whole.prompt_token_ids, max_new_tokens=20, resumed_token_ids=expected[:7]))
    driver.run()
    assert driver.outputs[1] == expected[7:]


@pytest.mark.parametrize(("resumed", "reason"), [([65] * 4, "length"), ([65, EOS_TOKEN_ID], "stop")])
def test_resumed_sequence_that_was_complete_ends_without_a_step(resumed: list[int], reason: str):
    driver = make_driver()
    driver.add(make_request(1, 5, max_new_tokens=4, resumed_token_ids=resumed))
    assert driver.core.has_work
    driver.run()
    assert (driver.outputs, driver.reasons) == ({1: []}, {1: reason})
    assert driver.executor.plans == []


@pytest.mark.parametrize("bug", ["clock", "queues", "blocks"])
def test_a_bug_ends_everything_and_the_engine_stays_usable(bug: str, caplog: pytest.LogCaptureFixture):
    driver = make_driver()
    scheduler = driver.core.scheduler
    driver.add(*(make_request(seq_id, 20, max_new_tokens=30) for seq_id in range(12)))
    for _ in range(4):
        driver.step()
    if bug == "clock":
        driver.core._clock = lambda: next(iter([]))
    elif bug == "queues":
        scheduler._queues.waiting_by_size.clear()
    else:
        scheduler.blocks._refs[scheduler._queues.decoding[0].block_ids[0]] = 0
    with caplog.at_level(logging.CRITICAL, logger="mii_zmq.worker.core"):
        while scheduler.has_work:
            for output in driver.core.step():
                if output.finish_reason:
                    assert output.seq_id not in driver.reasons
                    driver.reasons[output.seq_id] = output.finish_reason
            driver.core._clock = driver.clock
    assert driver.reasons.keys() == driver.requests.keys()
    driver.add(make_request(99, 20))
    driver.run()
    assert driver.outputs[99] == driver.executor.model.generate(driver.requests[99])


def test_close_closes_the_executor():
    driver = make_driver()
    driver.add(make_request(1, 5))
    driver.core.step()
    driver.core.close()
    assert driver.executor.num_held_slots == 0


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    num_blocks = draw(st.integers(2, 24))
    capacity = block_size * num_blocks
    requests = []
    for seq_id in range(draw(st.integers(1, 12))):
        num_prompt = draw(st.integers(1, min(capacity - 1, 40)))
        # Few distinct tokens and often whole blocks, so that prefixes are shared and prompts are fully cached.
        if num_prompt > block_size and draw(st.booleans()):
            num_prompt -= num_prompt % block_size
        prompt = [draw(st.sampled_from([0, 0, 0, 1]))] * (num_prompt - 1) + [draw(st.sampled_from([0, 0, 1]))]
        num_new = draw(st.integers(1, min(capacity - num_prompt, 30)))
        requests.append(
            make_request(
                seq_id,
                prompt,
                num_new,
                priority=draw(st.integers(-2, 2)),
                resumed_token_ids=draw(st.lists(st.integers(60, 62), max_size=min(num_new - 1, 3))),
                deadline_s=draw(st.sampled_from([None, None, None, 0.0, 20.0])),
                cache_salt=draw(st.sampled_from(["", "", "tenant"])),
                sampling=SamplingSpec(
                    stop_token_ids=draw(st.sampled_from([(EOS_TOKEN_ID,), (), (EOS_TOKEN_ID, 65)])),
                    min_new_tokens=draw(st.integers(0, 3)),
                ),
            )
        )
    return {
        "limits": make_limits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_sequences=draw(st.integers(1, 8)),
            token_budget=draw(st.integers(1, 40)),
        ),
        "requests": requests,
        "arrivals": [draw(st.integers(0, 15)) for _ in requests],
        "cancels": {draw(st.integers(0, 30)): draw(st.integers(0, 11)) for _ in range(draw(st.integers(0, 3)))},
        "eos_every": draw(st.sampled_from([None, 6])),
        "prefix_cache": draw(st.booleans()),
        "failed_step": draw(st.sampled_from([None, None, None, 2, 5])),
        "failed_submit": draw(st.sampled_from([None, None, None, 3, 6])),
        "failed_row": draw(st.sampled_from([None, None, None, (1, 0), (4, 1)])),
    }


def drive(driver: Driver, requests: list[SequenceRequest], arrivals: list[int], cancels: dict[int, int]) -> None:
    turn = 0
    while driver.core.has_work or len(driver.requests) < len(requests):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == turn:
                driver.add(request)
        if turn in cancels:
            driver.core.cancel([cancels[turn]])
        driver.step()
        driver.clock.now += 1.0
        turn += 1
        assert turn < 5000, driver.core.stats()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(scenarios())
def test_whatever_happens_every_sequence_ends_once_and_equals_its_solo_run(scenario: dict[str, Any]):
    driver = make_driver(
        scenario["limits"], FakeModel(eos_every=scenario["eos_every"]), prefix_cache=scenario["prefix_cache"]
    )
    faults = driver.executor.faults
    logger = logging.getLogger("mii_zmq.worker.core")
    logger.setLevel(logging.CRITICAL)
    if scenario["failed_step"]:
        faults.steps[scenario["failed_step"]] = RuntimeError("step")
    if scenario["failed_submit"]:
        faults.submit[scenario["failed_submit"]] = RuntimeError("submit")
    if scenario["failed_row"]:
        step, slot = scenario["failed_row"]
        faults.rows[step] = {slot: "row"}
    try:
        drive(driver, scenario["requests"], scenario["arrivals"], scenario["cancels"])
    finally:
        logger.setLevel(logging.NOTSET)
    driver.run()
    driver.check_outputs()
    for plan in driver.executor.plans:
        assert plan.num_tokens <= scenario["limits"].token_budget
    was_broken = scenario["failed_step"] or scenario["failed_submit"] or scenario["failed_row"]
    if scenario["failed_row"] and not (scenario["failed_step"] or scenario["failed_submit"]):
        assert list(driver.reasons.values()).count("error") <= 1
    for seq_id, reason in driver.reasons.items():
        assert reason != "error" or was_broken
        assert reason != "deadline" or driver.requests[seq_id].deadline_s is not None
        assert reason != "cancelled" or seq_id in scenario["cancels"].values()
    # An undisturbed engine goes on to serve with whatever the cache now holds.
    faults.steps.clear()
    faults.submit.clear()
    faults.rows.clear()
    driver.add(*(make_request(100 + request.seq_id, request.prompt_token_ids, 1) for request in scenario["requests"]))
    driver.run()
    assert all(driver.reasons[100 + request.seq_id] in ("stop", "length") for request in scenario["requests"])
    driver.check_outputs()
