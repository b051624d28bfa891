# SPDX-License-Identifier: Apache-2.0
"""Sequences with grammars in the engine core: masks that come late, beside sequences without."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.errors import InvalidRequest
from mii_zmq.worker import core as core_module
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.fake import FakePendingStep
from mii_zmq.worker.fake_model import EOS_TOKEN_ID
from mii_zmq.worker.plan import SamplingSpec, SequenceRequest, StepPlan
from tests.engine_driver import Clock, Driver, RecordingExecutor, make_driver, make_limits, make_request
from tests.worker.scripted_grammars import ScriptedGrammars, constrained, expected_output, mask_behind

NEVER = 10**9
WORDS = "abcdefghijklmnopqrstuvwxyz" * 2


def make(grammars: ScriptedGrammars | None = None, **limits: Any) -> tuple[Driver, ScriptedGrammars]:
    grammars = grammars or ScriptedGrammars()
    return make_driver(make_limits(**limits), grammars=grammars), grammars


def run(driver: Driver, max_polls: int = 20_000) -> None:
    """As `Driver.run`, where there may be nothing to do for a while."""
    for _ in range(max_polls):
        if driver.core.has_work:
            driver.step()
        elif driver.core.awaits_masks:
            driver.core.take_masks()
        else:
            break
    driver.run()


def check(driver: Driver, grammars: ScriptedGrammars) -> None:
    """What completed is what the model says; nothing is left anywhere."""
    model = driver.executor.model
    for seq_id, request in driver.requests.items():
        found, reason = driver.outputs[seq_id], driver.reasons[seq_id]
        if request.grammar is None:
            expected = model.generate(request)
        else:
            expected, expected_reason = expected_output(model, request)
            assert reason not in ("stop", "length") or reason == expected_reason
        assert found == (expected if reason in ("stop", "length") else expected[: len(found)])
    driver.core.take_masks()
    assert grammars.followed == {}


@pytest.mark.parametrize("delay", [0, 1, 7])
def test_output_follows_the_masks_and_ends_with_the_grammar(delay: int):
    driver, grammars = make(ScriptedGrammars(lambda seq_id, number: delay))
    without_eos = SamplingSpec()
    driver.add(
        constrained(make_request(1, 9, 20), "hello"),
        constrained(make_request(2, 50, 20, sampling=without_eos), "world"),
        constrained(make_request(3, 5, 3), "length"),
        make_request(4, 7, 20),
    )
    run(driver)
    check(driver, grammars)
    assert bytes(driver.outputs[1][:-1]).lower() == b"hello"
    assert driver.outputs[1][-1] == EOS_TOKEN_ID
    assert bytes(driver.outputs[2]).lower() == b"world"
    assert {seq_id: driver.reasons[seq_id] for seq_id in (1, 2, 3)} == {1: "stop", 2: "stop", 3: "length"}


def test_a_sequence_is_in_no_plan_while_its_mask_is_missing():
    driver, _ = make(ScriptedGrammars(lambda seq_id, number: 3))
    driver.add(constrained(make_request(1, 9, 20), "abc"), make_request(2, 4, 30))
    rows = []
    while 2 not in driver.reasons:
        driver.step()
        rows.append(len(driver.executor.plans[-1].rows))
        assert all(len(plan.masks) <= 1 for plan in driver.executor.plans)
    assert set(rows) == {1, 2}
    run(driver)


def test_others_need_no_step_more_beside_sequences_whose_masks_never_come():
    alone = make_driver(make_limits())
    alone.add(make_request(1, 40, 30), make_request(2, 3, 50))
    alone.run()
    driver, _ = make(ScriptedGrammars(lambda seq_id, number: NEVER if number else 0))
    driver.add(constrained(make_request(3, 4, 30), "abc"), constrained(make_request(4, 4, 30), "abc"))
    for _ in range(3):
        driver.step()
    num_before = driver.num_steps
    driver.add(*alone.requests.values())
    while driver.reasons.keys() < {1, 2}:
        driver.step()
    assert driver.outputs[1] == alone.outputs[1]
    assert driver.num_steps - num_before <= alone.num_steps
    driver.core.cancel([3, 4])
    run(driver)


class FailingExecutor(RecordingExecutor):
    fails_next = False

    def submit(self, plan: StepPlan) -> FakePendingStep:
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("this step cannot be submitted")
        return super().submit(plan)


def test_a_step_that_fails_behind_a_wait_for_masks_is_computed_again():
    clock = Clock()
    executor = FailingExecutor(make_limits(max_sequences=1), clock=clock)
    grammars = ScriptedGrammars(lambda seq_id, number: NEVER if number == 1 else 0)
    driver = Driver(EngineCore(executor, model="test", clock=clock, grammars=grammars), executor, clock)
    driver.add(constrained(make_request(1, 4, 30, deadline_s=5.0), "ab"), make_request(2, 4, 8))
    while not driver.outputs[1] or driver.core.has_work:
        if driver.core.has_work:
            driver.step()
        else:
            driver.core.take_masks()
    clock.now = 6.0
    executor.fails_next = True
    driver.step()
    assert not executor.fails_next
    assert driver.reasons == {1: "deadline"}
    run(driver)
    check(driver, grammars)
    assert driver.reasons[2] in ("length", "stop")


def test_there_is_nothing_to_do_until_a_mask_or_a_deadline_comes():
    driver, grammars = make(ScriptedGrammars(lambda seq_id, number: NEVER if number == 1 else 0))
    driver.add(constrained(make_request(1, 4, 30, deadline_s=5.0), "ab"))
    while not driver.outputs[1] or driver.core.has_work:
        if driver.core.has_work:
            driver.step()
        else:
            driver.core.take_masks()
    assert not driver.core.has_work
    assert driver.core.awaits_masks
    assert driver.core.max_wait_s(60.0) == 5.0
    driver.clock.now = 5.0
    assert driver.core.has_work
    driver.step()
    assert driver.reasons[1] == "deadline"
    assert not driver.core.has_work
    assert not driver.core.awaits_masks
    check(driver, grammars)


def test_a_sequence_without_its_first_mask_holds_nothing():
    driver, grammars = make(ScriptedGrammars(lambda seq_id, number: NEVER))
    driver.add(constrained(make_request(1, 40, 5), "ab"))
    driver.step()
    assert (driver.core.stats().num_used_blocks, driver.core.stats().num_running) == (0, 0)
    assert driver.core.stats().num_waiting == 1
    driver.core.cancel([1])
    run(driver)
    assert driver.reasons[1] == "cancelled"
    check(driver, grammars)


def test_a_resumed_sequence_goes_on_behind_its_tokens():
    driver, grammars = make()
    driver.add(
        constrained(make_request(1, 4, 30, resumed_token_ids=list(b"Ab")), "abcd"),
        constrained(make_request(2, 4, 30, resumed_token_ids=list(b"ab"), sampling=SamplingSpec()), "ab"),
    )
    run(driver)
    check(driver, grammars)
    assert bytes(driver.outputs[1][:-1]).lower() == b"cd"
    assert (driver.outputs[2], driver.reasons[2]) == ([], "stop")


def test_what_the_service_cannot_follow_ends_with_its_error():
    driver, grammars = make(ScriptedGrammars(lambda seq_id, number: -1 if (seq_id, number) in ((1, 0), (2, 2)) else 0))
    driver.add(*(constrained(make_request(seq_id, 4, 30), "abcd") for seq_id in (1, 2, 3)))
    run(driver)
    check(driver, grammars)
    assert driver.reasons == {1: "error", 2: "error", 3: "stop"}
    assert len(driver.outputs[2]) == 2
    assert driver.errors[1] is not None


class GrammarsThatCannotBeOpened(ScriptedGrammars):
    """Those of some sequences, after they have been taken note of."""

    def __init__(self, *broken: tuple[int, Exception]) -> None:
        super().__init__()
        self._broken = dict(broken)

    def open(self, request: SequenceRequest) -> None:
        super().open(request)
        if request.seq_id in self._broken:
            raise self._broken[request.seq_id]


def test_a_grammar_that_cannot_be_opened_ends_its_sequence_alone():
    driver, grammars = make(GrammarsThatCannotBeOpened((2, TypeError("a bug")), (3, InvalidRequest("a refusal"))))
    driver.add(constrained(make_request(1, 9, 20), "hello"))
    before = driver.core.stats()
    driver.add(*(constrained(make_request(seq_id, 9, 20), "hello") for seq_id in (2, 3)))
    assert driver.core.stats() == before
    driver.step()
    assert driver.reasons == {2: "error", 3: "error"}
    assert str(driver.errors[2]).endswith("grammar cannot be opened: TypeError: a bug")
    assert str(driver.errors[3]) == "a refusal"
    assert grammars.followed.keys() == {1}
    driver.add(constrained(make_request(4, 9, 20), "again"))
    run(driver)
    check(driver, grammars)
    assert driver.reasons == {1: "stop", 2: "error", 3: "error", 4: "stop"}


def test_a_complete_sequence_whose_grammar_cannot_be_opened_ends_once():
    driver, grammars = make(GrammarsThatCannotBeOpened((1, TypeError("a bug"))))
    driver.add(constrained(make_request(1, 4, 2, resumed_token_ids=list(b"ab")), "abc"))
    run(driver)
    check(driver, grammars)
    assert driver.reasons == {1: "length"}


def test_a_small_pool_preempts_sequences_that_wait_for_masks():
    driver, grammars = make(
        ScriptedGrammars(lambda seq_id, number: number % 3), num_blocks=16, block_size=2, max_sequences=6
    )
    driver.add(*(constrained(make_request(seq_id, 6, 20), WORDS[:15]) for seq_id in range(4)))
    driver.add(*(make_request(seq_id, 6, 20) for seq_id in range(4, 8)))
    run(driver)
    assert driver.core.stats().num_preemptions > 0
    check(driver, grammars)


def test_an_engine_without_grammars_refuses_them():
    driver = make_driver()
    with pytest.raises(InvalidRequest, match="structured_output"):
        driver.core.add(constrained(make_request(1, 4), "a"))
    assert not driver.core.has_work
    assert not driver.core.limits.takes_grammars


def test_close_ends_the_service():
    driver, grammars = make()
    assert driver.core.limits.takes_grammars
    driver.core.close()
    assert grammars.is_shut_down


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    block_size, num_blocks = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(3, 24))
    capacity = block_size * num_blocks
    requests: list[SequenceRequest] = []
    for seq_id in range(draw(st.integers(1, 10))):
        num_prompt = draw(st.integers(1, min(capacity - 1, 30)))
        prompt = [draw(st.sampled_from([0, 0, 1]))] * num_prompt
        num_new = draw(st.integers(1, min(capacity - num_prompt, 20)))
        request = make_request(
            seq_id,
            prompt,
            num_new,
            priority=draw(st.integers(-2, 2)),
            deadline_s=draw(st.sampled_from([None, None, None, 15.0])),
            sampling=SamplingSpec(stop_token_ids=draw(st.sampled_from([(EOS_TOKEN_ID,), ()]))),
        )
        if draw(st.booleans()):
            text = WORDS[: draw(st.integers(0, 20))]
            request = constrained(request, text)
            request.resumed_token_ids = list(text[: draw(st.integers(0, min(num_new - 1, len(text), 3)))].encode())
        requests.append(request)
    return {
        "limits": {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_sequences": draw(st.integers(1, 8)),
            "token_budget": draw(st.integers(2, 40)),
        },
        "requests": requests,
        "arrivals": [draw(st.integers(0, 15)) for _ in requests],
        "cancels": draw(st.dictionaries(st.integers(0, 40), st.integers(0, 9), max_size=3)),
        "delays": draw(st.lists(st.integers(0, 9), min_size=1, max_size=7)),
        "failures": draw(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2)),
        "failed_step": draw(st.none() | st.tuples(st.sampled_from(["steps", "submit"]), st.integers(1, 20))),
        "failed_row": draw(st.sampled_from([None, None, (2, 0), (4, 1)])),
        "oom_above": draw(st.sampled_from([None, None, 7])),
    }


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(scenarios())
def test_whatever_happens_every_sequence_ends_once_with_what_its_grammar_allows(scenario: dict[str, Any]):
    core_module.logger.disabled = True
    delays, failures = scenario["delays"], scenario["failures"]

    def delay(seq_id: int, number: int) -> int:
        late: int = delays[(3 * seq_id + number) % len(delays)]
        return -1 - late if (seq_id, number) in failures else late

    driver, grammars = make(ScriptedGrammars(delay), **scenario["limits"])
    faults = driver.executor.faults
    faults.oom_above = scenario["oom_above"]
    if scenario["failed_step"] is not None:
        where, step = scenario["failed_step"]
        getattr(faults, where)[step] = RuntimeError("by chance")
    if scenario["failed_row"] is not None:
        step, slot = scenario["failed_row"]
        faults.rows[step] = {slot: "row"}
    turn = 0
    while driver.core.scheduler.has_work or driver.core.has_work or len(driver.requests) < len(scenario["requests"]):
        for request, arrival in zip(scenario["requests"], scenario["arrivals"], strict=True):
            if arrival == turn:
                driver.add(request)
        if turn in scenario["cancels"]:
            driver.core.cancel([scenario["cancels"][turn]])
        if driver.core.has_work:
            driver.step()
        else:
            driver.core.take_masks()
        driver.clock.now += 0.1
        turn += 1
        assert turn < 5000, driver.core.stats()
    driver.run()
    check(driver, grammars)
    for seq_id, reason in driver.reasons.items():
        is_failure = any(number[0] == seq_id for number in failures) or scenario["failed_row"] is not None
        assert reason != "error" or is_failure
        assert reason != "cancelled" or seq_id in scenario["cancels"].values()


def test_masks_of_the_script_end():
    request = constrained(make_request(1, 4), "a")
    assert mask_behind(request, 0) != mask_behind(request, 1)
