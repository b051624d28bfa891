# SPDX-License-Identifier: Apache-2.0
"""An engine whose steps and rows fail: only who is to blame ends by it, and everybody else's tokens stay the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.errors import InternalError, MiiError, NumericError
from mii_zmq.worker import core as core_module
from mii_zmq.worker.bisection import MAX_UNEXPLAINED, QUIET_STEPS
from mii_zmq.worker.core import MAX_FAILED_STEPS
from mii_zmq.worker.fake_faults import Hook, Marker
from mii_zmq.worker.fake_model import EOS_TOKEN_ID
from mii_zmq.worker.plan import NOT_FINITE, PendingStep, SamplingSpec, StepPlan
from mii_zmq.worker.step_faults import NUMERIC_LIMIT, NUMERIC_WINDOW_S
from tests.engine_driver import Driver, make_driver, make_limits, make_request

BANE = (201, 202, 203)
SEARCH_LIMITS = make_limits(max_sequences=64, num_blocks=1024, token_budget=512, max_model_len=128)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module.logger, "disabled", True)


def marked(seq_id: int, num_prompt: int = 9, **fields: Any) -> Any:
    prompt = make_request(seq_id, num_prompt).prompt_token_ids
    return make_request(seq_id, [*prompt, *BANE, 7], **fields)


def mark(driver: Driver, hook: Hook, after: int = 0) -> None:
    driver.executor.faults.markers[hook] = Marker(BANE, after)


@pytest.mark.parametrize("where", ["steps", "submit"])
@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_step_that_raises_once_ends_nobody(where: str, num_requests: int):
    driver = make_driver(make_limits(max_sequences=2, token_budget=16))
    getattr(driver.executor.faults, where)[3] = OSError("lost")
    driver.add(*(make_request(seq_id, 8, max_new_tokens=10) for seq_id in range(num_requests)))
    driver.run()
    assert set(driver.reasons.values()) == {"length"}
    driver.check_outputs()
    assert driver.core.stats().num_failed_steps == 1
    assert [plan.step for plan in driver.executor.plans] == list(range(1, len(driver.executor.plans) + 1))


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("culprits", [{0}, {37}, {63}, {0, 1}, {10, 11, 50}])
def test_only_the_requests_that_make_steps_fail_end(after: int, culprits: set[int]):
    driver = make_driver(SEARCH_LIMITS)
    mark(driver, Hook.RAISE, after)
    ask = {True: marked, False: make_request}
    driver.add(*(ask[seq_id in culprits](seq_id, 9, max_new_tokens=12) for seq_id in range(64)))
    driver.run()
    assert {seq_id for seq_id, reason in driver.reasons.items() if reason == "error"} == culprits
    assert all("a marked request is in the batch" in str(driver.errors[seq_id]) for seq_id in culprits)
    assert all(len(driver.outputs[seq_id]) == after for seq_id in culprits)
    driver.check_outputs()
    # Halving 64 takes 7 failed steps down to one sequence, which fails once more before it is blamed.
    assert driver.core.stats().num_failed_steps <= 9 * len(culprits)


def test_a_lone_request_that_makes_steps_fail_ends_and_the_next_is_served():
    driver = make_driver()
    mark(driver, Hook.RAISE)
    driver.add(marked(1))
    driver.run()
    driver.add(make_request(2, 9))
    driver.run()
    assert driver.reasons == {1: "error", 2: "length"}
    assert driver.core.stats().num_failed_steps == 2


def test_arrivals_cancels_and_deadlines_during_a_search():
    driver = make_driver(make_limits(max_sequences=8))
    mark(driver, Hook.RAISE)
    driver.add(*(make_request(seq_id, 9, 30) for seq_id in range(6)), marked(6, max_new_tokens=30))
    while not driver.core.stats().num_failed_steps:
        driver.step()
    held = driver.core.scheduler._queues.held
    assert held
    driver.add(make_request(7, 9, 5), make_request(8, 9, deadline_s=1.0), make_request(9, 9))
    assert {7, 8, 9} < {sequence.seq_id for sequence in held}
    driver.core.cancel([9, 0])
    driver.clock.now += 2.0
    driver.run()
    assert (driver.reasons[6], driver.reasons[7], driver.reasons[8]) == ("error", "length", "deadline")
    assert (driver.reasons[9], driver.reasons[0]) == ("cancelled", "cancelled")
    assert list(driver.reasons.values()).count("length") == 6
    driver.check_outputs()


def test_a_culprit_that_is_cancelled_ends_the_search():
    driver = make_driver(make_limits(max_sequences=8))
    mark(driver, Hook.RAISE)
    driver.add(*(make_request(seq_id, 9, 30) for seq_id in range(7)), marked(7, max_new_tokens=30))
    while not driver.core.stats().num_failed_steps:
        driver.step()
    driver.core.cancel([7])
    driver.run()
    assert list(driver.reasons.values()).count("length") == 7
    assert driver.core.stats().num_failed_steps == 1
    driver.check_outputs()


class DeadDevice:
    """An executor that takes no step."""

    limits = make_limits(max_sequences=1, token_budget=16)

    def submit(self, plan: StepPlan) -> PendingStep:
        raise RuntimeError("does not work")

    def close(self) -> None: ...


@pytest.mark.parametrize("takes_steps", [False, True])
def test_a_device_on_which_every_step_fails_ends_the_engine_before_many_are_blamed(takes_steps: bool):
    driver = make_driver(DeadDevice.limits)
    if takes_steps:
        driver.executor.faults.steps.update({step: RuntimeError("does not work") for step in range(1, 100)})
    else:
        driver.core.executor = DeadDevice()
    driver.add(*(make_request(seq_id, 8) for seq_id in range(20)))
    with pytest.raises(InternalError, match="steps keep failing whatever is in them"):
        driver.run()
    assert len(driver.reasons) == 3


def test_a_device_on_which_every_step_fails_with_a_full_batch_ends_the_engine_before_anybody_is_blamed():
    driver = make_driver(SEARCH_LIMITS)
    driver.executor.faults.steps.update({step: RuntimeError("does not work") for step in range(3, 100)})
    driver.add(*(make_request(seq_id, 8, 20) for seq_id in range(64)))
    with pytest.raises(InternalError, match=f"{MAX_FAILED_STEPS} steps failed one after the other.*does not work"):
        driver.run()
    assert driver.reasons == {}


def test_a_lost_device_ends_the_engine_at_once_and_blames_nobody():
    driver = make_driver()
    mark(driver, Hook.LOSE, after=3)
    driver.add(make_request(1, 9, 20), marked(2, max_new_tokens=20))
    with pytest.raises(InternalError, match="step 4 failed: RuntimeError: CUDA error: device-side assert"):
        driver.run()
    assert driver.reasons == {}
    assert driver.core.stats().num_failed_steps == 0


@pytest.mark.parametrize(("gap", "ends"), [(20, True), (QUIET_STEPS + 40, False)])
def test_failures_without_a_culprit_end_the_engine_when_they_come_close_together(gap: int, ends: bool):
    driver = make_driver(make_limits(max_model_len=2000, num_blocks=1000))
    for number in range(1, MAX_UNEXPLAINED + 1):
        driver.executor.faults.steps[gap * number] = RuntimeError("by chance")
    driver.add(*(make_request(seq_id, 9, 600) for seq_id in range(2)))
    if ends:
        with pytest.raises(InternalError, match="steps keep failing"):
            driver.run()
    else:
        driver.run()
        driver.check_outputs()
    assert "error" not in driver.reasons.values()


# Memory.


def test_steps_that_do_not_fit_get_smaller_and_grow_again():
    driver = make_driver(make_limits(token_budget=64, max_sequences=16, num_blocks=256))
    driver.executor.faults.oom_above = 10
    driver.add(*(make_request(seq_id, 20, 15) for seq_id in range(16)))
    driver.run()
    assert set(driver.reasons.values()) == {"length"}
    driver.check_outputs()
    assert driver.core.stats().token_budget <= 10
    assert driver.core.stats().num_failed_steps >= 3
    driver.executor.faults.oom_above = None
    num_plans = len(driver.executor.plans)
    driver.add(*(make_request(seq_id, 20, 100) for seq_id in range(20, 40)))
    driver.run()
    driver.add(*(make_request(seq_id, 40) for seq_id in range(40, 56)))
    driver.run()
    driver.check_outputs()
    assert driver.core.stats().token_budget > 10
    assert max(plan.num_tokens for plan in driver.executor.plans[num_plans:]) > 10


def test_a_single_token_that_does_not_fit_ends_one_sequence_after_the_other():
    driver = make_driver()
    driver.executor.faults.oom_above = 0
    driver.add(*(make_request(seq_id, 9) for seq_id in range(3)))
    driver.run()
    assert set(driver.reasons.values()) == {"error"}
    assert all("a step of 1 tokens is too large" in str(error) for error in driver.errors.values())
    driver.executor.faults.oom_above = None
    driver.add(make_request(5, 9))
    driver.run()
    assert driver.reasons[5] == "length"


def test_an_engine_without_any_memory_ends():
    driver = make_driver()
    driver.executor.faults.oom_above = 0
    driver.add(*(make_request(seq_id, 9) for seq_id in range(40)))
    with pytest.raises(InternalError, match="steps failed one after the other"):
        driver.run()
    assert len(driver.reasons) <= MAX_FAILED_STEPS


# Rows.


def test_a_row_that_is_not_finite_ends_one_request_whose_blocks_are_zeroed():
    driver = make_driver()
    mark(driver, Hook.NAN)
    request = marked(1, 20)
    driver.add(request, make_request(2, 9))
    driver.run()
    assert driver.reasons == {1: "error", 2: "length"}
    assert isinstance(driver.errors[1], NumericError)
    assert driver.core.stats().num_numeric_errors == 1
    driver.executor.faults.markers.clear()
    # The executor refuses blocks that still hold the first one's numbers.
    driver.add(make_request(3, request.prompt_token_ids), *(make_request(seq_id, 100) for seq_id in (4, 5)))
    driver.run()
    assert driver.num_cached_tokens[3] == 0
    assert driver.reasons[3] == "length"
    assert sum(len(plan.zeroed) for plan in driver.executor.plans) >= 6
    driver.check_outputs()


@pytest.mark.parametrize("token_budget", [8, 64])
def test_who_shares_blocks_with_a_row_that_is_not_finite_is_computed_without_them(token_budget: int):
    shared = [9] * 16
    driver = make_driver(make_limits(token_budget=token_budget))
    mark(driver, Hook.NAN)
    driver.add(make_request(1, [*shared, *BANE]), make_request(2, [*shared, 2]), make_request(3, [*shared, 3]))
    driver.run()
    assert driver.reasons == {1: "error", 2: "length", 3: "length"}
    driver.check_outputs()
    driver.add(make_request(4, [*shared, 4]))
    driver.run()
    assert driver.reasons[4] == "length"


def test_a_row_that_is_not_finite_later_on_takes_its_prefix_out_of_the_cache():
    driver = make_driver()
    mark(driver, Hook.NAN, after=6)
    request = marked(1, 20, max_new_tokens=20)
    driver.add(request)
    driver.run()
    assert (driver.reasons[1], len(driver.outputs[1])) == ("error", 6)
    assert driver.core.stats().num_cached_blocks == 0
    driver.check_outputs()


def test_a_row_that_fails_otherwise_ends_with_its_reason():
    driver = make_driver(make_limits(token_budget=64))
    driver.executor.faults.rows[1] = {0: "cannot draw"}
    driver.add(make_request(1, [7] * 13), make_request(2, [7] * 12 + [1]), make_request(3, 9))
    driver.run()
    assert driver.reasons == {1: "error", 2: "length", 3: "length"}
    assert type(driver.errors[1]) is InternalError
    assert str(driver.errors[1]) == "cannot draw"
    driver.check_outputs()


def run_spoiled(driver: Driver, count: int, seconds: float, *, with_good: bool) -> None:
    mark(driver, Hook.NAN)
    for seq_id in range(count):
        driver.clock.now += seconds
        driver.add(marked(seq_id))
        if with_good:
            driver.add(make_request(100 + seq_id, 9))
        driver.run()


def test_many_requests_in_turn_without_finite_logits_end_the_engine():
    driver = make_driver()
    with pytest.raises(InternalError, match="no request gets finite logits"):
        run_spoiled(driver, NUMERIC_LIMIT, 1.0, with_good=False)
    assert len(driver.reasons) == NUMERIC_LIMIT, "all of them were answered"


@pytest.mark.parametrize(("seconds", "with_good"), [(1.0, True), (NUMERIC_WINDOW_S / 2, False)])
def test_few_or_mixed_ones_do_not(seconds: float, with_good: bool):
    driver = make_driver()
    run_spoiled(driver, 3 * NUMERIC_LIMIT, seconds, with_good=with_good)
    assert list(driver.reasons.values()).count("error") == 3 * NUMERIC_LIMIT


# Everything at once.


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    num_blocks = draw(st.integers(4, 24))
    capacity = block_size * num_blocks
    requests, culprits = [], set()
    for seq_id in range(draw(st.integers(1, 10))):
        num_prompt = draw(st.integers(1, min(capacity - 1, 30)))
        prompt = [draw(st.sampled_from([0, 0, 1]))] * num_prompt
        if num_prompt > 3 and draw(st.sampled_from([False, False, True])):
            at = draw(st.integers(0, num_prompt - 3))
            prompt[at : at + 3] = BANE
            culprits.add(seq_id)
        num_new = draw(st.integers(1, min(capacity - num_prompt, 20)))
        sampling = SamplingSpec(stop_token_ids=(EOS_TOKEN_ID,), min_new_tokens=draw(st.integers(0, 5)))
        deadline_s = draw(st.sampled_from([None, None, None, None, 10.0]))
        requests.append(make_request(seq_id, prompt, num_new, sampling=sampling, deadline_s=deadline_s))
    return {
        "limits": make_limits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_sequences=draw(st.integers(1, 8)),
            token_budget=draw(st.integers(2, 40)),
        ),
        "requests": requests,
        "culprits": culprits,
        "arrivals": [draw(st.integers(0, 15)) for _ in requests],
        "cancels": draw(st.dictionaries(st.integers(0, 40), st.integers(0, 9), max_size=4)),
        "hook": draw(st.sampled_from([Hook.RAISE, Hook.NAN])),
        "after": draw(st.sampled_from([0, 0, 1, 4])),
        "oom_above": draw(st.sampled_from([None, None, 1, 7])),
        # Once at most: two failures of a sequence on its own make it a culprit.
        "chance": draw(st.none() | st.tuples(st.sampled_from(["steps", "submit"]), st.integers(1, 20))),
        "prefix_cache": draw(st.booleans()),
    }


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(scenarios())
def test_whatever_fails_only_culprits_end_by_it(scenario: dict[str, Any]):
    core_module.logger.disabled = True
    driver = make_driver(scenario["limits"], prefix_cache=scenario["prefix_cache"])
    faults = driver.executor.faults
    mark(driver, scenario["hook"], scenario["after"])
    faults.oom_above = scenario["oom_above"]
    if scenario["chance"] is not None:
        where, step = scenario["chance"]
        getattr(faults, where)[step] = RuntimeError("by chance")
    ended: list[MiiError] = []
    turn = 0
    while driver.core.has_work or len(driver.requests) < len(scenario["requests"]):
        for request, arrival in zip(scenario["requests"], scenario["arrivals"], strict=True):
            if arrival == turn:
                driver.add(request)
        if turn in scenario["cancels"]:
            driver.core.cancel([scenario["cancels"][turn]])
        try:
            driver.step()
        except InternalError as error:
            ended.append(error)
            break
        driver.clock.now += 1.0
        turn += 1
        assert turn < 3000, driver.core.stats()
    assert driver.executor.violations == []
    for seq_id, reason in driver.reasons.items():
        assert reason != "error" or seq_id in scenario["culprits"]
        assert reason != "cancelled" or seq_id in scenario["cancels"].values()
    assert all(driver.errors[seq_id] is not None for seq_id, reason in driver.reasons.items() if reason == "error")
    if ended:
        # Too many culprits, and nobody else who would have done well.
        assert len(scenario["culprits"]) >= 3
        return
    driver.run()
    driver.check_outputs()
    faults.markers.clear()
    driver.add(*(make_request(100 + request.seq_id, request.prompt_token_ids, 1) for request in scenario["requests"]))
    driver.run()
    assert all(driver.reasons[100 + request.seq_id] == "length" for request in scenario["requests"])
    driver.check_outputs()


def test_the_reason_for_rows_that_are_not_finite_is_a_sentence():
    assert NOT_FINITE == "the model's logits are not finite"
