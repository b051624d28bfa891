# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError
from mii_zmq.worker.fake import FakeExecutor, PlanViolation
from mii_zmq.worker.fake_faults import Hook, Marker
from mii_zmq.worker.fake_model import ALPHABETS, EOS_TOKEN_ID, FakeModel
from mii_zmq.worker.fake_options import make_fake_executor
from mii_zmq.worker.plan import NOT_FINITE, NewSequence, SamplingSpec, StepPlan, StepResult, StepRow
from tests.engine_driver import Clock, make_limits, make_request

SAMPLING = SamplingSpec()


def new(slot: int, token_ids: list[int], block_ids: list[int]) -> NewSequence:
    return NewSequence(slot, token_ids, len(token_ids), block_ids, SAMPLING)


def make_executor(**limits: Any) -> FakeExecutor:
    return FakeExecutor(make_limits(block_size=2, num_blocks=8, **limits))


def run(executor: FakeExecutor, step: int, rows: list[StepRow], **parts: Any) -> StepResult:
    return executor.submit(StepPlan(step, rows, **parts)).result()


def test_chunked_and_whole_prompts_draw_the_same_tokens():
    prompt = [3, 1, 4, 1, 5]
    whole, parts = make_executor(), make_executor()
    first = run(whole, 1, [StepRow(0, 0, 5, True)], new=[new(0, prompt, [0, 1, 2])])
    second = run(whole, 2, [StepRow(0, 5, 1, True)])
    run(parts, 1, [StepRow(3, 0, 3, False)], new=[new(3, prompt, [5, 6])])
    assert run(parts, 2, [StepRow(3, 3, 2, True, [7])]).token_ids == first.token_ids
    assert run(parts, 3, [StepRow(3, 5, 1, True)]).token_ids == second.token_ids
    request = make_request(0, prompt, 2, sampling=SAMPLING)
    assert FakeModel().generate(request) == first.token_ids + second.token_ids


def test_a_prefix_written_in_the_same_step_can_be_read():
    executor = make_executor()
    result = run(
        executor,
        1,
        [StepRow(0, 0, 3, True), StepRow(1, 2, 2, True)],
        new=[new(0, [1, 2, 3], [0, 1]), new(1, [1, 2, 9, 9], [0, 2])],
    )
    assert len(result.token_ids) == 2


def test_blocks_computed_by_another_sequence_can_be_appended():
    executor = make_executor()
    run(executor, 1, [StepRow(0, 0, 2, False)], new=[new(0, [1, 2, 3, 4, 5], [0])])
    run(executor, 2, [StepRow(1, 2, 2, False)], new=[new(1, [1, 2, 3, 4, 6], [0, 1])])
    run(executor, 3, [StepRow(0, 4, 1, True, [1, 2])])


FIRST = StepPlan(1, [StepRow(0, 0, 3, True)], [new(0, [1, 2, 3], [0, 1])])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(3, [StepRow(0, 3, 1, True)]), "step 3 follows step 1"),
        (StepPlan(2, [StepRow(0, 2, 2, True)]), "starts at 2 but has computed 3"),
        (StepPlan(2, [StepRow(0, 3, 1, False)]), "has sample False"),
        (StepPlan(2, [StepRow(0, 3, 2, True)]), "computes tokens 3 to 4 of 4"),
        (StepPlan(2, [StepRow(0, 3, 0, False)]), "0 tokens"),
        (StepPlan(2, [StepRow(0, 3, 1, True), StepRow(0, 3, 1, True)]), "two rows"),
        (StepPlan(2, [StepRow(1, 0, 1, True)]), "no sequence"),
        (StepPlan(2, [StepRow(0, 3, 1, True, [1])]), "lists block 1 twice"),
        (StepPlan(2, [StepRow(0, 3, 1, True, [8])]), "block 8 does not exist"),
        (StepPlan(2, [StepRow(0, 0, 1, True)], [new(0, [1], [3])]), "given away while held"),
        (StepPlan(2, [StepRow(9, 0, 1, True)], [new(9, [1], [3])]), "slot 9 does not exist"),
        (StepPlan(2, [StepRow(0, 3, 1, True)], [new(1, [1], [3])]), "has no row"),
        (StepPlan(2, [StepRow(1, 0, 3, True)], [new(1, [1, 2, 3], [3])]), "no block for position 2"),
        (StepPlan(2, [StepRow(1, 0, 2, True)], [new(1, [1, 2], [0])]), "writes block 0, in use by slot 0"),
        (StepPlan(2, [StepRow(1, 2, 1, True)], [new(1, [7, 7, 7], [0, 3])]), "another sequence's KV"),
        (StepPlan(2, [StepRow(1, 2, 1, True)], [new(1, [1, 2, 7], [4, 3])]), "another sequence's KV"),
        (
            StepPlan(2, [StepRow(1, 0, 1, True), StepRow(2, 0, 1, True)], [new(1, [1], [3]), new(2, [1], [3])]),
            "two rows write block 3",
        ),
        (StepPlan(2, [StepRow(0, 3, 1, True)], freed_slots=[1]), "slot 1 is freed but not held"),
        (StepPlan(2, [StepRow(0, 3, 1, True)], copies=[(5, 6)]), "never written"),
        (StepPlan(2, [StepRow(0, 3, 1, True)], copies=[(1, 0)]), "overwrites block 0, which is held"),
        (StepPlan(2, [StepRow(1, 0, 33, True)], [new(1, [1] * 33, [2, 3])]), "a step of 33 tokens"),
    ],
)
def test_wrong_plans_are_violations(plan: StepPlan, message: str):
    executor = make_executor()
    executor.submit(FIRST)
    with pytest.raises(PlanViolation, match=message):
        executor.submit(plan)
    assert len(executor.violations) == 1


def test_a_sequence_must_not_outgrow_the_model():
    executor = make_executor(max_model_len=4)
    run(executor, 1, [StepRow(0, 0, 3, True)], new=[new(0, [1, 2, 3], [0, 1])])
    with pytest.raises(PlanViolation, match="grows past the model's length of 4"):
        run(executor, 2, [StepRow(0, 3, 1, True)])


def test_copied_blocks_and_reused_slots():
    executor = make_executor()
    run(executor, 1, [StepRow(0, 0, 4, True)], new=[new(0, [1, 2, 3, 4], [0, 1])])
    run(executor, 2, [StepRow(1, 3, 1, True)], new=[new(1, [1, 2, 3, 4], [0, 2])], copies=[(1, 2)])
    run(executor, 3, [StepRow(0, 0, 1, True)], new=[new(0, [9], [1])], freed_slots=[0])
    assert executor.num_held_slots == 2


def test_failed_rows_spoil_what_they_wrote_until_it_is_zeroed():
    executor = make_executor()
    executor.faults.rows[1] = {0: "whatever"}
    assert run(executor, 1, [StepRow(0, 0, 3, True)], new=[new(0, [1, 2, 3], [0, 1])]).failed == {0: "whatever"}
    with pytest.raises(PlanViolation, match="slot 0 gets block 0, which was not zeroed"):
        run(executor, 2, [StepRow(0, 0, 3, True)], new=[new(0, [1, 2, 3], [0, 1])], freed_slots=[0])


def test_blocks_are_zeroed_when_nobody_holds_them():
    executor = make_executor()
    executor.submit(FIRST)
    with pytest.raises(PlanViolation, match="block 1 is zeroed while held"):
        run(executor, 2, [StepRow(0, 3, 1, True)], zeroed=[1])


def test_zeroed_blocks_can_be_given_away():
    executor = make_executor()
    executor.faults.rows[1] = {0: "whatever"}
    rows, first = [StepRow(0, 0, 3, True)], new(0, [1, 2, 3], [0, 1])
    run(executor, 1, rows, new=[first])
    assert run(executor, 2, rows, new=[first], freed_slots=[0], zeroed=[0, 1]).failed == {}


def test_whoever_reads_what_a_marked_row_wrote_fails_when_it_draws():
    executor = make_executor()
    executor.faults.markers[Hook.NAN] = Marker((9, 9))
    first = new(0, [9, 9, 3, 4, 5], [0, 1, 2])
    assert run(executor, 1, [StepRow(0, 0, 4, False)], new=[first]).failed == {}
    reader = new(1, [9, 9, 3, 7, 7], [0, 3, 4])
    assert run(executor, 2, [StepRow(1, 2, 3, True)], new=[reader]).failed == {1: NOT_FINITE}
    assert run(executor, 3, [StepRow(0, 4, 1, True)]).failed == {0: NOT_FINITE}


def test_step_and_submit_faults_raise_once():
    executor = make_executor()
    executor.faults.submit[1] = OSError("gone")
    executor.faults.steps[1] = RuntimeError("lost")
    with pytest.raises(OSError, match="gone"):
        executor.submit(FIRST)
    pending = executor.submit(FIRST)
    with pytest.raises(RuntimeError, match="lost"):
        pending.result()


def test_steps_take_their_time_one_after_the_other():
    clock, slept = Clock(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    executor = FakeExecutor(make_limits(), step_ms=10, clock=clock, sleep=sleep)
    first = executor.submit(FIRST)
    second = executor.submit(StepPlan(2, [StepRow(0, 3, 1, True)]))
    assert not first.done()
    first.result()
    assert clock.now == pytest.approx(0.010)
    clock.now = 0.015
    second.result()
    assert clock.now == pytest.approx(0.020)
    assert second.done()
    assert slept == pytest.approx([0.010, 0.005])


def test_results_are_read_in_order_and_nothing_is_taken_after_close():
    executor = make_executor()
    executor.submit(FIRST)
    second = executor.submit(StepPlan(2, [StepRow(0, 3, 1, True)]))
    with pytest.raises(PlanViolation, match="out of order"):
        second.result()
    executor.close()
    with pytest.raises(PlanViolation, match="closed"):
        executor.submit(StepPlan(3, [StepRow(0, 4, 1, True, [2])]))


def test_model_stops_when_told_and_not_before():
    stopping = SamplingSpec(stop_token_ids=(EOS_TOKEN_ID,))
    model = FakeModel(eos_after=3)
    assert model.generate(make_request(0, 4, 20, sampling=stopping))[3:] == [EOS_TOKEN_ID]
    late = SamplingSpec(stop_token_ids=(EOS_TOKEN_ID,), min_new_tokens=5)
    assert len(model.generate(make_request(0, 4, 20, sampling=late))) == 6
    ignoring = model.generate(make_request(0, 4, 20, sampling=SamplingSpec()))
    assert len(ignoring) == 20
    assert EOS_TOKEN_ID not in ignoring
    lengths = {len(FakeModel(eos_every=5).generate(make_request(seq_id, 4, 50))) for seq_id in range(20)}
    assert len(lengths) > 5


def test_model_masks_stop_ids_and_keeps_to_its_alphabet():
    model = FakeModel(ALPHABETS["digits"])
    sampling = SamplingSpec(stop_token_ids=(0x30, 0x31), min_new_tokens=40)
    outputs = model.generate(make_request(1, 4, 40, sampling=sampling))
    assert len(outputs) == 40
    assert set(outputs) <= set(range(0x32, 0x3A))
    text = bytes(FakeModel().generate(make_request(1, 4, 40, sampling=SAMPLING))).decode()
    assert text.isprintable()
    assert len(set(text)) > 10


def test_options_come_from_the_model_name_and_the_config():
    config = EngineConfig(
        model="fake:step_ms=5, vocab=bytes,num_blocks=64,alphabet=letters,eos_after=7",
        block_size=16,
        num_blocks=9,
        token_budget=77,
        max_sequences=5,
    )
    executor = make_fake_executor(config)
    limits = executor.limits
    assert (limits.num_blocks, limits.block_size, limits.token_budget, limits.max_sequences) == (64, 16, 77, 5)
    assert (limits.vocab_size, limits.eos_token_ids) == (257, (256,))
    assert executor.step_ms == 5
    assert executor.model == FakeModel(ALPHABETS["letters"], eos_after=7)
    assert make_fake_executor(EngineConfig(model="fake:")).step_ms == 0


def test_options_for_ranks_above_0():
    config = EngineConfig(model="fake:step_ms=5,rank_step_ms=7,rank_alphabet=digits", tensor_parallel=2)
    own, other = make_fake_executor(config), make_fake_executor(config, rank=1)
    assert (own.step_ms, own.model) == (5, FakeModel())
    assert (other.step_ms, other.model) == (7, FakeModel(ALPHABETS["digits"]))


def test_hooks_come_from_the_model_name():
    model = "fake:raise_on=BANE,raise_after=3,nan_on=BAD,hang_on=x y,oom_above=7,raise_at=9,prefill_ms=0.5"
    executor = make_fake_executor(EngineConfig(model=model))
    faults = executor.faults
    assert faults.hooks_for(list(b"a BANE of BADness")) == {Hook.RAISE: 3, Hook.NAN: 0}
    assert faults.hooks_for(list(b"x y")) == {Hook.HANG: 0}
    assert faults.hooks_for(list(b"BAN BA x")) == {}
    assert (faults.oom_above, list(faults.steps), executor.prefill_ms) == (7, [9], 0.5)
    assert make_fake_executor(EngineConfig(model="fake:rank_hang_on=x")).faults.hooks_for(list(b"x")) == {}


def test_a_marked_prompt_raises_from_its_output_tokens_on():
    executor = make_executor()
    executor.faults.markers[Hook.RAISE] = Marker((9,), after=1)
    run(executor, 1, [StepRow(0, 0, 2, True)], new=[new(0, [9, 1], [0])])
    with pytest.raises(RuntimeError, match="a marked request is in the batch"):
        run(executor, 2, [StepRow(0, 2, 1, True, [1])])


def test_a_lost_device_never_comes_back():
    executor = make_executor()
    executor.faults.markers[Hook.LOSE] = Marker((9,))
    for step, token_id in ((1, 9), (2, 8)):
        rows, first = [StepRow(step, 0, 1, True)], new(step, [token_id], [step])
        with pytest.raises(RuntimeError, match="CUDA error: device-side assert"):
            run(executor, step, rows, new=[first])


def test_prompts_take_their_time():
    clock = Clock()
    executor = FakeExecutor(make_limits(), step_ms=1, prefill_ms=10, clock=clock, sleep=lambda s: None)
    executor.submit(FIRST)
    decode = executor.submit(StepPlan(2, [StepRow(0, 3, 1, True)]))
    clock.now = 0.0319
    assert not decode.done()
    clock.now = 0.0321
    assert decode.done()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("llama", "is not a fake model"),
        ("fake:rank_steps=5", "'rank_steps=5' of the fake model is unknown"),
        ("fake:steps=5", "'steps=5' of the fake model is unknown"),
        ("fake:step_ms", "'step_ms' of the fake model is unknown"),
        ("fake:step_ms=5,step_ms=6", "twice"),
        ("fake:step_ms=-1", "step_ms of the fake model is '-1'"),
        ("fake:step_ms=nan", "0 to 60000"),
        ("fake:step_ms=fast", "0 to 60000"),
        ("fake:num_blocks=0", "whole number above 0"),
        ("fake:num_blocks=1e3", "whole number above 0"),
        ("fake:block_size=3", "power of two"),
        ("fake:vocab=llama", "must be one of bytes"),
        ("fake:alphabet=greek", "must be one of printable"),
        ("fake:eos_after=x", "whole number above 0"),
        ("fake:oom_above=0", "whole number above 0"),
        ("fake:prefill_ms=fast", "prefill_ms of the fake model is 'fast'"),
        ("fake:nan_on=", "nan_on of the fake model needs a text"),
        ("fake:nan_after=3", "nan_on of the fake model needs a text"),
    ],
)
def test_bad_options_are_refused(model: str, message: str):
    with pytest.raises(ConfigError, match=message):
        make_fake_executor(EngineConfig(model=model))


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_sequence_may_cross_the_border_only_without_recomputation(recomputes: bool):
    executor = make_executor(rope_border=4, recomputes_at_border=recomputes)
    run(executor, 1, [StepRow(0, 0, 4, True)], new=[new(0, [1, 2, 3, 4], [0, 1])])
    crossing = StepRow(0, 4, 1, True, [2])
    if recomputes:
        with pytest.raises(PlanViolation, match="slot 0 computes position 4 on top of keys rotated for at most 4"):
            run(executor, 2, [crossing])
    else:
        run(executor, 2, [crossing])


@pytest.mark.parametrize(
    ("recomputes", "first", "second", "is_sound"),
    [
        (True, 4, 5, False),
        (True, 5, 7, True),
        (False, 3, 4, True),
        (False, 4, 5, False),
        (False, 5, 7, False),
        (False, 6, 6, True),
    ],
)
def test_cells_of_another_rotary_regime_are_not_this_sequences(
    recomputes: bool, first: int, second: int, is_sound: bool
):
    executor = make_executor(rope_border=4, recomputes_at_border=recomputes)
    run(executor, 1, [StepRow(0, 0, first, True)], new=[new(0, [7] * first, [0, 1, 2])])
    reader = new(1, [7] * second, [0, 4, 5, 6])
    if is_sound:
        run(executor, 2, [StepRow(1, 2, second - 2, True)], new=[reader])
    else:
        with pytest.raises(PlanViolation, match="reads another sequence's KV at positions 0 to 1"):
            run(executor, 2, [StepRow(1, 2, second - 2, True)], new=[reader])
