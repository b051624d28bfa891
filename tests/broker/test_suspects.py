# SPDX-License-Identifier: Apache-2.0
"""Who is suspected when groups die, where suspects may run, and that the culprit alone is ended."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mii_zmq.broker import suspects
from mii_zmq.broker.records import RequestState
from mii_zmq.broker.suspects import ALONE_WAIT_S, APART_WAIT_S, Quarantine, fingerprint
from mii_zmq.errors import PoisonRequest
from mii_zmq.protocol import Message, TokenDelta, TokenRows, Verb, encode
from tests.broker.bench import Bench, packed, request_id, row
from tests.broker.test_state import bench_with, numbers_at
from tests.broker.test_waiting import make_request

GOODBYE = encode(Verb.DISCONNECT, header={"reason": "the engine process was killed by signal 9"})
incarnations = itertools.count(100)


def restart(bench: Bench, name: str) -> None:
    bench.ready(name, incarnation=next(incarnations))


def beat(bench: Bench, seconds: float, *names: str) -> None:
    """Time passes; these groups live."""
    for _ in range(round(seconds / 0.25)):
        for group in bench.state.workers.by_address.values():
            if group.name in names:
                group.last_seen = bench.now
        bench.now += 0.25
        bench.perform(bench.state.tick(bench.now))


class TestExamples:
    def test_lone_stream_outlives_two_crashes_but_not_a_third_without_progress(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.tokens("w", row(1, 0, [1, 2, 3, 4]))
        for name in ("w", "v"):
            bench.worker(name, GOODBYE)
            restart(bench, "v")
        bench.worker("v", GOODBYE)
        error = bench.error("c")
        assert (error["code"], error["retryable"], error["emitted_tokens"]) == ("poison_request", False, 4)
        assert bench.state.counters.retries == 2

    def test_stream_that_gets_on_in_between_outlives_any_number(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        for turn in range(8):
            ids = list(range(4 * turn, 4 * turn + 4))
            bench.tokens("w", row(1, turn, ids, offset=4 * turn))
            bench.worker("w", GOODBYE)
            restart(bench, "w")
        bench.final("w", 1)
        assert bench.token_ids("c", 1) == list(range(32))
        assert bench.verbs("c", 1)[-1] == "FINAL"

    @pytest.mark.parametrize("stream", [True, False])
    def test_two_unrelated_crashes_condemn_nobody(self, stream: bool) -> None:
        """A kill from outside looks like a request's fault, and may meet the same request twice."""
        bench = bench_with("w", "v")
        bench.generate("c", 1, stream=stream)
        for _ in range(2):
            name = "w" if len(bench.state.workers.by_address[(b"w",)].requests) else "v"
            bench.worker(name, GOODBYE)
            restart(bench, name)
        bench.generate("c", 2)
        on_trial = bench.state.requests.by_id[request_id(1)].group
        assert on_trial is not None
        assert list(on_trial.requests) == [request_id(1)]
        bench.final(on_trial.name, 1)
        assert "ERROR" not in bench.verbs("c")
        assert bench.state.counters.quarantined == 0

    def test_request_that_kills_before_its_first_token_costs_three_groups(self) -> None:
        bench = bench_with("w", "v", max_attempts=3)
        for number in range(1, 6):
            bench.generate("c", number)
            at = "w" if number in numbers_at(bench, "w") else "v"
            bench.tokens(at, row(number, 0, [1, 2, 3, 4]))
        bench.generate("c", 9)
        first, second = ("w", "v") if 9 in numbers_at(bench, "w") else ("v", "w")
        bench.worker(first, GOODBYE)
        # The others go on at once, and this one when they have shown that it was none of them.
        moved = [number for number in numbers_at(bench, first) if number != 9]
        assert set(moved) <= set(numbers_at(bench, second))
        assert 9 not in numbers_at(bench, second)
        for number in moved:
            bench.tokens(second, row(number, 1, [5, 6, 7, 8], offset=4))
        beat(bench, 0.25, second)
        assert numbers_at(bench, second)[-1] == 9
        bench.worker(second, GOODBYE)
        assert bench.state.num_unfinished == 6
        for name in ("x", "y"):
            restart(bench, name)
        assert {1, 2, 3, 4, 5} == set(numbers_at(bench, "x"))
        assert numbers_at(bench, "y") == [9]
        bench.worker("y", GOODBYE)
        assert bench.error("c")["code"] == "poison_request"
        assert bench.last("c", Verb.ERROR).request_id == request_id(9)
        assert bench.state.num_unfinished == 5
        assert bench.state.counters.quarantined == 1

    def test_likeness_of_the_culprit_is_refused_until_its_time_is_up(self) -> None:
        bench = bench_with("w", quarantine_s=30)
        bench.generate("c", 1, body={"prompt": "deadly"})
        for name in ("w", "v", "v"):
            bench.worker(name, GOODBYE)
            restart(bench, "v")
        assert bench.error("c")["code"] == "poison_request"
        bench.generate("c", 2, body={"prompt": "deadly"})
        error = bench.error("c")
        assert (error["code"], error["retryable"]) == ("poison_request", False)
        assert "refused for another 30 s" in error["message"]
        assert bench.state.counters.poison_refusals == bench.state.counters.refused == 1
        bench.generate("c", 3, body={"prompt": "deadly", "params": {"seed": 1}})
        bench.ready("n", deployment="n", incarnation=5)
        bench.generate("c", 4, body={"prompt": "deadly"}, deployment="n")
        assert bench.verbs("c", 3) == bench.verbs("c", 4) == ["ACCEPTED"]
        beat(bench, 30.5, "v", "n")
        assert bench.state.status(bench.now)["num_quarantined"] == 0
        bench.generate("c", 5, body={"prompt": "deadly"})
        assert bench.verbs("c", 5) == ["ACCEPTED"]

    def test_likeness_that_waits_is_ended_too(self) -> None:
        bench = Bench()
        bench.ready("w", max_requests=1)
        bench.generate("c", 1, body={"prompt": "deadly"})
        bench.generate("c", 2, body={"prompt": "deadly"})
        bench.generate("c", 3)
        bench.worker("w", GOODBYE)
        for incarnation in (1, 2):
            bench.ready("v", max_requests=1, incarnation=incarnation)
            bench.worker("v", GOODBYE)
        assert bench.verbs("c", 1)[-1] == bench.verbs("c", 2)[-1] == "ERROR"
        bench.ready("u", max_requests=1)
        assert numbers_at(bench, "u") == [3]

    def test_after_two_crashes_each_suspect_runs_alone_until_it_has_got_on(self) -> None:
        bench = bench_with("w")
        for number in (1, 2):
            bench.generate("c", number)
            bench.tokens("w", row(number, 0, [1, 2, 3, 4]))
        for name in ("w", "v"):
            bench.worker(name, GOODBYE)
            restart(bench, "v")
        bench.generate("c", 3)
        assert numbers_at(bench, "v") == [1, 2, 1]
        bench.tokens("v", row(1, 1, [5, 6, 7, 8], offset=4))
        beat(bench, 0.5, "v")
        assert numbers_at(bench, "v") == [1, 2, 1]
        bench.final("v", 1)
        assert numbers_at(bench, "v") == [1, 2, 1, 2]
        bench.tokens("v", row(2, 1, [5, 6, 7, 8], offset=4))
        beat(bench, 0.25, "v")
        assert numbers_at(bench, "v") == [1, 2, 1, 2, 3]

    def test_suspect_does_not_wait_for_ever_for_a_group_of_its_own(self) -> None:
        bench = bench_with("w")
        for number in (1, 2):
            bench.generate("c", number)
        for _ in range(2):
            beat(bench, APART_WAIT_S + 0.5, "w")
            bench.worker("w", GOODBYE)
            restart(bench, "w")
        assert numbers_at(bench, "w")[-1] == 1
        beat(bench, ALONE_WAIT_S + 0.5, "w")
        error = bench.error("c")
        assert (error["code"], error["retryable"]) == ("worker_lost", True)
        assert bench.state.num_unfinished == 1

    def test_leaving_after_a_drain_is_no_crash(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        for name in ("w", "v", "u", "t"):
            bench.worker(name, encode(Verb.DRAIN))
            bench.worker(name, encode(Verb.DISCONNECT))
            restart(bench, chr(ord(name) - 1))
        request = bench.state.requests.by_id[request_id(1)]
        assert (request.crashes, request.attempt) == (0, 4)

    def test_no_group_for_a_while_ends_with_what_was_delivered(self) -> None:
        bench = bench_with("w", group_wait_s=5)
        bench.generate("c", 1)
        bench.tokens("w", row(1, 0, [1, 2]))
        bench.worker("w", GOODBYE)
        bench.advance(4.5)
        assert bench.verbs("c", 1)[-1] == "TOKENS"
        bench.advance(1)
        error = bench.error("c")
        assert (error["code"], error["retryable"], error["emitted_tokens"]) == ("worker_lost", True, 2)

    def test_final_that_was_lost_comes_from_another_group_once(self) -> None:
        bench = bench_with("w", "v")
        bench.generate("c", 1)
        bench.tokens("w", row(1, 0, [1, 2], "ab", "length"))
        bench.worker("w", GOODBYE)
        again = bench.last("v", Verb.GENERATE)
        assert (again.raw, again.header["first_seq"]) == ([packed([1, 2])], 1)
        bench.tokens("v", row(1, 1, [], "", "length", offset=2))
        bench.final("v", 1)
        assert bench.verbs("c", 1) == ["ACCEPTED", "TOKENS", "FINAL"]


def test_quarantine_is_bounded_and_lets_the_oldest_go() -> None:
    quarantine = Quarantine(60)
    for number in range(suspects.MAX_BARRED + 1):
        request = make_request(number)
        request.body = b"%d" % number
        quarantine.add(request, float(number) / 1000)
    assert len(quarantine) == suspects.MAX_BARRED
    quarantine.check("m", b"0", 1.0)
    with pytest.raises(PoisonRequest):
        quarantine.check("m", b"1", 1.0)
    quarantine.tick(60.5)
    assert 0 < len(quarantine) < suspects.MAX_BARRED


def test_fingerprint_is_of_deployment_and_body() -> None:
    assert len({fingerprint("m", b"a"), fingerprint("m", b"b"), fingerprint("n", b"a"), fingerprint("mb", b"")}) == 4


class Fleet:
    """Groups that compute: each request's token at position p is p; a deadly one ends its group at a position."""

    def __init__(self, num_groups: int, deadly: dict[int, int], lengths: dict[int, int]) -> None:
        self.bench = Bench(heartbeat_ms=500)
        self.names = [f"g{index}" for index in range(num_groups)]
        self.deadly = deadly
        self.lengths = lengths
        self.num_crashes = 0
        self.read: dict[str, int] = dict.fromkeys(self.names, 0)
        self.running: dict[str, dict[int, list[int]]] = {name: {} for name in self.names}
        for name in self.names:
            restart(self.bench, name)

    def step(self) -> None:
        """Every group computes one token per request, and is back a moment after it died."""
        for name in self.names:
            where = (name.encode(),)
            messages = self.bench.received[where]
            for message in messages[self.read[name] :]:
                self.hear(name, message)
            self.read[name] = len(messages)
            self.compute(name)
        self.bench.now += 0.05
        for group in self.bench.state.workers.by_address.values():
            group.last_seen = self.bench.now
        self.bench.perform(self.bench.state.tick(self.bench.now))

    def kill(self, name: str) -> None:
        """What it was sent and has not read is lost."""
        self.running[name].clear()
        self.bench.worker(name, GOODBYE)
        self.read[name] = len(self.bench.received[(name.encode(),)])
        restart(self.bench, name)

    def hear(self, name: str, message: Message) -> None:
        number = int.from_bytes(message.request_id, "big")
        if message.verb is Verb.GENERATE:
            resumed = len(b"".join(message.raw)) // 4
            self.running[name][number] = [message.header["first_seq"], resumed]
        elif message.verb is Verb.CANCEL:
            self.running[name].pop(number, None)

    def compute(self, name: str) -> None:
        running = self.running[name]
        if any(self.deadly.get(number) == at for number, (_, at) in running.items()):
            self.num_crashes += 1
            self.kill(name)
            return
        for number, state in list(running.items()):
            seq, at = state
            is_last = at + 1 == self.lengths[number]
            rows = TokenRows()
            rows.add(TokenDelta(request_id(number), seq, at, packed([at]), b"x", "length" if is_last else None))
            self.bench.worker(name, rows.to_frames(0))
            state[:] = seq + 1, at + 1
            if is_last:
                del running[number]
                self.bench.final(name, number, "length")


@pytest.mark.slow
@given(
    num_groups=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=16),
    victim=st.integers(0, 15),
    dies_at=st.one_of(st.just(0), st.integers(0, 29)),
    arrivals=st.lists(st.integers(0, 6), min_size=16, max_size=16),
)
@settings(max_examples=60, deadline=None)
def test_culprit_is_ended_and_everybody_else_finishes_exactly(
    num_groups: int, lengths: list[int], victim: int, dies_at: int, arrivals: list[int]
) -> None:
    number_of: dict[int, int] = {index + 1: length for index, length in enumerate(lengths)}
    culprit = victim % len(lengths) + 1
    number_of[culprit] = max(number_of[culprit], dies_at + 1)
    fleet = Fleet(num_groups, {culprit: dies_at}, number_of)
    for number in number_of:
        fleet.bench.generate("c", number)
        for _ in range(arrivals[number - 1]):
            fleet.step()
    for _ in range(600):
        if fleet.bench.state.num_unfinished == 0:
            break
        fleet.step()
    assert fleet.bench.state.num_unfinished == 0
    for number, length in number_of.items():
        verbs = fleet.bench.verbs("c", number)
        if number == culprit:
            assert verbs[-1] == "ERROR"
            assert fleet.bench.token_ids("c", number) == list(range(dies_at))
        else:
            assert verbs[-1] == "FINAL"
            assert fleet.bench.token_ids("c", number) == list(range(length))
    assert fleet.bench.error("c")["code"] == "poison_request"
    assert fleet.num_crashes == 3
    assert [verb for verb in fleet.bench.verbs("c") if verb == "ERROR"] == ["ERROR"]


@pytest.mark.slow
@given(
    num_groups=st.integers(2, 4),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    kills=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_kills_from_outside_condemn_only_who_died_alone(
    num_groups: int, lengths: list[int], kills: list[tuple[int, int]]
) -> None:
    """Groups are killed at random: whoever is ended for it was part of two crashes before, and alone in the third."""
    fleet = Fleet(num_groups, {}, dict(enumerate(lengths, 1)))
    for number in fleet.lengths:
        fleet.bench.generate("c", number)
    condemned: set[int] = set()
    for num_steps, index in kills:
        for _ in range(num_steps):
            fleet.step()
        name = fleet.names[index % num_groups]
        group = fleet.bench.state.workers.by_address[(name.encode(),)]
        before = {request: request.crashes for request in group.requests.values()}
        fleet.kill(name)
        ended = [request for request in before if request.state is RequestState.FINISHED]
        if ended:
            assert list(before.values()) == [2]
            condemned.add(int.from_bytes(ended[0].request_id, "big"))
    for _ in range(600):
        fleet.step()
    assert fleet.bench.state.num_unfinished == 0
    for number, length in fleet.lengths.items():
        verbs = fleet.bench.verbs("c", number)
        assert (verbs[-1] == "ERROR") == (number in condemned)
        if number not in condemned:
            assert fleet.bench.token_ids("c", number) == list(range(length))
