# SPDX-License-Identifier: Apache-2.0
"""Forks that compile grammars beside each other, among them some that never end."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("xgrammar")

from mii_zmq.errors import InvalidRequest, MiiError
from mii_zmq.worker.compilations import MAX_RUNNING, Compilations
from mii_zmq.worker.grammar_cache import Key
from tests.worker.test_grammar_follower import SLOW, vocabulary

pytestmark = pytest.mark.slow

ENDLESS = [("regex", SLOW + "x" * number) for number in range(MAX_RUNNING + 2)]
SHORT = ("regex", "a+b")


@pytest.fixture
def make() -> Iterator[Callable[..., Compilations]]:
    made: list[Compilations] = []
    ends = socket.socketpair()

    def make(**options: float) -> Compilations:
        made.append(
            Compilations(vocabulary, ends[0].fileno(), **{"timeout_s": 100.0, "memory_mb": 1024, **options})  # type: ignore[arg-type]
        )
        return made[-1]

    yield make
    for compilations in made:
        compilations.close()
    for end in ends:
        end.close()


def outcomes_of(
    compilations: Compilations, is_wanted: Callable[[Key], bool] = lambda key: True
) -> list[tuple[Key, str | MiiError | None]]:
    """The next ones."""
    while True:
        outcomes = compilations.advance(is_wanted)
        if outcomes:
            return outcomes
        poll = select.poll()
        until = compilations.register(poll)
        assert until is not None
        poll.poll(1000 * max(0.0, until - time.monotonic()) + 1)


def test_a_short_one_is_done_before_long_ones_that_came_first(make: Callable[..., Compilations]) -> None:
    compilations = make(trial_s=100.0)
    for key in (*ENDLESS, SHORT):
        compilations.add("", key)
    ((key, outcome),) = outcomes_of(compilations)
    assert key == SHORT
    assert isinstance(outcome, str)


def test_one_that_its_trial_did_not_end_is_compiled_in_its_turn(make: Callable[..., Compilations]) -> None:
    compilations = make(timeout_s=0.5, trial_s=0.0)
    for key in ENDLESS:
        compilations.add("", key)
    refused: list[Key] = []
    while len(refused) < len(ENDLESS):
        for key, outcome in outcomes_of(compilations):
            assert isinstance(outcome, InvalidRequest)
            refused.append(key)
    assert sorted(refused) == sorted(ENDLESS)


def test_what_nobody_wants_is_not_compiled(make: Callable[..., Compilations]) -> None:
    compilations = make()
    compilations.add("", SHORT)
    assert outcomes_of(compilations, lambda key: False) == [(SHORT, None)]
    compilations.add("", SHORT)
    assert isinstance(outcomes_of(compilations)[0][1], str)
