# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from mii_zmq.worker.step_budget import GOOD_STEPS, StepBudget


def steps_until_raised(budget: StepBudget) -> int:
    for count in range(1, 100_000):
        if budget.note_good_step():
            return count
    raise AssertionError("never raised")


def test_it_halves_what_did_not_fit_down_to_one_token():
    budget = StepBudget(64)
    assert budget.shrink(40)
    assert budget.tokens == 20
    assert budget.shrink(64)
    assert budget.tokens == 10
    for expected in (5, 2, 1):
        assert budget.shrink(budget.tokens)
        assert budget.tokens == expected
    assert not budget.shrink(1)
    assert budget.tokens == 1


def test_good_steps_raise_it_to_the_limit_and_every_relapse_makes_that_slower():
    budget = StepBudget(16)
    assert not budget.note_good_step()
    budget.shrink(16)
    assert steps_until_raised(budget) == GOOD_STEPS
    assert budget.tokens == 10
    budget.shrink(10)
    assert budget.tokens == 5
    assert steps_until_raised(budget) == 2 * GOOD_STEPS
    while budget.tokens < 16:
        budget.note_good_step()
    assert not any(budget.note_good_step() for _ in range(1000))
    budget.shrink(16)
    assert steps_until_raised(budget) == GOOD_STEPS, "at the limit the past is forgotten"
