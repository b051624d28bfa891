# SPDX-License-Identifier: Apache-2.0
"""Whose grammar is compiled when, in made-up time."""

from __future__ import annotations

import random
from collections import Counter

from mii_zmq.worker.compile_queue import CompileQueue

TRIAL_S = 0.5


def make_queue(max_running: int = 1) -> CompileQueue[str]:
    return CompileQueue(max_running, TRIAL_S)


def turns(queue: CompileQueue[str], number: int) -> list[str]:
    """The keys that get an ordinary turn one after the other; attempts come to nothing."""
    found: list[str] = []
    while len(found) < number:
        key = queue.next(0.0)
        assert key is not None
        if key == queue.trial:
            queue.overdue(TRIAL_S)
        else:
            found.append(key)
            queue.end(key)
    return found


def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    queue = make_queue()
    for key in ("a1", "a2", "a3"):
        queue.add("a", key, 1)
    queue.add("b", "b1", 1)
    assert turns(queue, 1) == ["a1"]
    queue.add("c", "c1", 1)
    queue.add("b", "b2", 1)
    assert turns(queue, 5) == ["b1", "a2", "c1", "b2", "a3"]
    assert queue.next(0.0) is None
    assert queue.trial is None


def test_beside_those_that_run_the_shortest_one_gets_a_trial() -> None:
    queue = make_queue(2)
    for number, size in enumerate((9, 9, 9, 9, 3)):
        queue.add("", f"{number}", size)
    assert [queue.next(0.0) for _ in range(4)] == ["0", "1", "4", None]
    assert (queue.trial, queue.deadline) == ("4", TRIAL_S)
    queue.end("4")
    assert [queue.next(1.0), queue.next(1.0)] == ["2", None]
    queue.add("", "5", 2)
    assert queue.overdue(1.4) is None
    assert queue.overdue(1.5) == "2"
    assert queue.next(1.5) == "5"
    # It keeps its place, and gets no second trial.
    queue.end("5")
    assert [queue.next(1.6), queue.overdue(9.0), queue.next(9.0)] == ["3", "3", None]
    queue.end("0")
    assert queue.next(9.0) == "2"


def test_a_trial_whose_turn_comes_goes_on() -> None:
    queue = make_queue()
    queue.add("", "a", 1)
    queue.add("", "b", 1)
    assert [queue.next(0.0), queue.next(0.0)] == ["a", "b"]
    queue.end("a")
    assert queue.next(0.1) is None
    assert (queue.trial, queue.deadline, queue.overdue(9.0)) == (None, None, None)
    queue.add("", "c", 1)
    queue.add("", "d", 1)
    assert [queue.next(0.2), queue.next(0.2)] == ["c", None]
    queue.end("b")
    assert queue.next(0.3) == "d"


def test_tenants_take_turns_at_trials_too() -> None:
    queue = make_queue()
    queue.add("a", "running", 1)
    assert queue.next(0.0) == "running"
    for number in range(5):
        queue.add("a", f"a{number}", 1)
    queue.add("b", "b", 100)
    found: list[str] = []
    for _ in range(3):
        found.append(queue.next(0.0))
        queue.overdue(TRIAL_S)
    assert found == ["a0", "b", "a1"]


class Simulation:
    """Keys of any length come at any time; those that are short to compile end in their trial."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.queue = make_queue(self.draw.randint(1, 3))
        self.now = 0.0
        self.needs: dict[str, float] = {}
        self.started: dict[str, float] = {}
        self.ended: Counter[str] = Counter()
        self.line: dict[str, str] = {}
        """Tenants of those whose turn has not come."""
        self.patience: dict[str, int] = {}
        """Ordinary turns that others may have before a key's own."""

    def come(self) -> None:
        tenant, key = self.draw.choice("abc"), str(len(self.needs))
        self.needs[key] = self.draw.choice((0.1, 0.4, 3.0))
        self.line[key] = tenant
        self.patience[key] = 3 * list(self.line.values()).count(tenant)
        self.queue.add(tenant, key, self.draw.randint(1, 50))

    def end(self) -> None:
        for key, since in list(self.started.items()):
            if self.now - since >= self.needs[key]:
                self.queue.end(key)
                del self.started[key]
                self.line.pop(key, None)
                self.ended[key] += 1

    def start(self) -> None:
        key: str | None = ""
        while key is not None:
            tried, key = self.queue.trial, self.queue.next(self.now)
            if tried is not None and self.queue.trial != tried:
                self.give_turn(tried)
            if key is not None:
                assert key not in self.started
                self.started[key] = self.now
                if key != self.queue.trial:
                    self.give_turn(key)

    def give_turn(self, key: str) -> None:
        del self.line[key]
        for waiting in self.line:
            self.patience[waiting] -= 1
            assert self.patience[waiting] >= 0

    def stop(self) -> None:
        stopped = self.queue.overdue(self.now)
        if stopped is not None:
            del self.started[stopped]

    def check(self) -> None:
        in_turn = [key for key in self.started if key != self.queue.trial]
        assert len(in_turn) <= self.queue.max_running
        assert len(in_turn) == self.queue.max_running or not self.line
        assert len(self.started) <= self.queue.max_running + 1


def test_whatever_comes_everyone_has_a_turn_in_time_and_ends_once() -> None:
    for seed in range(60):
        simulation = Simulation(seed)
        while len(simulation.needs) < 60 or simulation.started:
            if len(simulation.needs) < 60 and simulation.draw.random() < 0.4:
                simulation.come()
            simulation.end()
            simulation.start()
            simulation.stop()
            simulation.check()
            simulation.now += 0.1
        assert simulation.ended == Counter(simulation.needs.keys())


def test_a_short_one_behind_long_ones_waits_no_longer_than_a_trial() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        queue, now = make_queue(2), 0.0
        for number in range(8):
            queue.add("", f"long{number}", draw.randint(100, 1000))
        arrives = draw.uniform(0.0, 5.0)
        is_there = False
        while True:
            if not is_there and now >= arrives:
                queue.add("", "short", 50)
                is_there = True
            queue.overdue(now)
            found = set()
            while (key := queue.next(now)) is not None:
                found.add(key)
            if "short" in found:
                break
            assert now < arrives + TRIAL_S + 0.1
            now += 0.05
