# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from mii_zmq.errors import InternalError
from mii_zmq.worker.plan import SamplingSpec
from mii_zmq.worker.residency import Residency
from mii_zmq.worker.sequence import PlannedStep, Sequence, make_sequence
from tests.engine_driver import make_limits, make_request

LIMITS = make_limits(num_blocks=8, block_size=4, max_sequences=2)


def make(seq_id: int, num_prompt: int) -> Sequence:
    return make_sequence(make_request(seq_id, num_prompt, 2), LIMITS, 0.0, seq_id)


def admit(residency: Residency, planned: PlannedStep, sequence: Sequence) -> bool:
    residency.estimate(sequence)
    sequence.in_prefill = residency.admit(planned, sequence)
    return sequence.in_prefill


def test_a_started_prompt_has_its_remainder_set_aside():
    residency, planned = Residency(LIMITS, "m", True), PlannedStep(1)
    first, second, third = make(1, 18), make(2, 9), make(3, 8)
    assert admit(residency, planned, first)
    assert (residency.num_reserved_blocks, residency.blocks.num_used) == (5, 0)
    assert not admit(residency, planned, second)
    residency.grow_chunk(planned, residency.open_chunk(planned, first), 6)
    assert (residency.num_reserved_blocks, residency.blocks.num_used) == (3, 2)
    assert admit(residency, planned, third)
    assert not residency.has_free_block or residency.blocks.num_free - residency.num_reserved_blocks == 1
    residency.check([first, third])


def test_the_watermark_does_not_bind_an_empty_engine():
    residency = Residency(LIMITS, "m", True)
    assert admit(residency, PlannedStep(1), make(1, 30))
    assert not residency.has_free_block


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 3),
        ({"sampling": SamplingSpec(pooling="last"), "max_new_tokens": 0}, 3),
        ({"sampling": SamplingSpec(pooling="mean"), "max_new_tokens": 0}, 11),
        ({"sampling": SamplingSpec(pooling="first"), "max_new_tokens": 0}, 11),
        ({"score_prompt": True}, 11),
    ],
)
def test_what_a_prompt_may_not_borrow_is_expected_to_be_computed(fields: dict[str, Any], expected: int) -> None:
    limits = make_limits(num_blocks=8, block_size=4, max_sequences=2, hidden_size=8, scores_prompts=True)
    residency, planned, prompt = Residency(limits, "m", True), PlannedStep(1), list(range(11))
    first = make_sequence(make_request(1, prompt, 2), limits, 0.0, 1)
    assert admit(residency, planned, first)
    residency.grow_chunk(planned, residency.open_chunk(planned, first), 11)
    second = make_sequence(make_request(2, prompt, **fields), limits, 0.0, 2)
    assert residency.estimate(second) == expected
    assert residency.admit(planned, second)
    assert second.num_uncomputed_tokens == expected


def test_slots_run_out():
    residency, planned = Residency(LIMITS, "m", True), PlannedStep(1)
    assert [admit(residency, planned, make(seq_id, 2)) for seq_id in (1, 2, 3)] == [True, True, False]


def test_only_slots_that_the_executor_holds_are_reported_as_freed():
    residency = Residency(LIMITS, "m", True)
    first, second = make(1, 2), make(2, 2)
    for step, sequence in enumerate((first, second), 1):
        planned = PlannedStep(step)
        admit(residency, planned, sequence)
        residency.grow_chunk(planned, residency.open_chunk(planned, sequence), 2)
        if sequence is second:
            residency.release(first)
        residency.seal(planned)
    assert planned.freed_slots == [0]
    residency.unseal(planned)
    residency.release(second)
    later = PlannedStep(2)
    residency.seal(later)
    assert later.freed_slots == [0]
    residency.check([])


def test_check_finds_wrong_counts():
    residency, sequence = Residency(LIMITS, "m", True), make(1, 18)
    admit(residency, PlannedStep(1), sequence)
    residency.num_reserved_blocks -= 1
    with pytest.raises(InternalError, match="4 blocks are set aside, sequences say 5"):
        residency.check([sequence])
    residency.num_reserved_blocks += 1
    sequence.slot = 1
    with pytest.raises(InternalError, match="slots"):
        residency.check([sequence])
    residency.reset([sequence])
    residency.check([])
