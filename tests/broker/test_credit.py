# SPDX-License-Identifier: Apache-2.0
"""Slow readers: what is beyond their credit is merged, sent with the next grant, and in the end cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mii_zmq.protocol import FinalHeader, Verb, encode, iterate_tokens
from tests.broker.bench import Bench, packed, request_id, row


def bench_with_credit(
    credit: int, batch: bool = False, workers: tuple[str, ...] = ("w", "v"), **settings: Any
) -> Bench:
    bench = Bench(**settings)
    for name in workers:
        bench.ready(name)
    bench.client("c", Verb.HELLO, None, {"credit": credit, "batch": batch})
    bench.clear()
    return bench


def text(bench: Bench, number: int) -> str:
    parts = []
    for message in bench.received[(b"c",)]:
        if message.verb is Verb.TOKENS:
            parts += [d.text for d in iterate_tokens(message) if d.request_id == request_id(number)]
    return b"".join(parts).decode()


def num_rows(bench: Bench, number: int) -> int:
    messages = [m for m in bench.received[(b"c",)] if m.verb is Verb.TOKENS]
    return sum(d.request_id == request_id(number) for message in messages for d in iterate_tokens(message))


def test_rows_beyond_the_credit_wait_and_go_out_as_one() -> None:
    bench = bench_with_credit(2)
    bench.generate("c", 1)
    for seq in range(6):
        bench.tokens("w", row(1, seq, [seq], "abcdef"[seq]))
    assert text(bench, 1) == "ab"
    bench.client("c", Verb.CREDIT, 1, {"credit": 1})
    merged = next(iter(iterate_tokens(bench.last("c"))))
    assert (merged.seq, merged.token_offset, merged.token_ids, merged.text) == (5, 2, packed([2, 3, 4, 5]), b"cdef")
    assert bench.state.counters.merged_rows == 1
    assert bench.state.counters.forwarded_tokens == 6
    bench.client("c", Verb.CREDIT, None, {"credit": 1, "request_ids": [request_id(1), request_id(9)]})
    bench.tokens("w", row(1, 6, [6], "g"))
    assert text(bench, 1) == "abcdefg"


def test_the_end_waits_behind_the_text_but_the_group_does_not() -> None:
    bench = bench_with_credit(1)
    bench.generate("c", 1)
    bench.tokens("w", row(1, 0, [0], "a"))
    bench.tokens("w", row(1, 1, [1], "b", "stop"))
    bench.final("w", 1)
    assert bench.verbs("c", 1) == ["ACCEPTED", "TOKENS"]
    assert not any(group.requests for group in bench.state.workers.by_address.values())
    assert bench.state.num_unfinished == 1
    bench.kill("w")
    bench.kill("v")
    bench.advance(4.0, clients=("c",))
    bench.state.drain()
    assert not bench.state.is_finished
    bench.client("c", Verb.CREDIT, 1, {"credit": 5})
    assert bench.verbs("c", 1) == ["ACCEPTED", "TOKENS", "TOKENS", "FINAL"]
    assert bench.state.is_finished


def test_a_deadline_does_not_end_what_is_complete() -> None:
    bench = bench_with_credit(1)
    bench.generate("c", 1, deadline_ms=500)
    bench.tokens("w", row(1, 0, [0], "a"))
    bench.tokens("w", row(1, 1, [1], "b"))
    bench.final("w", 1)
    bench.advance(4.0, ("w", "v"), ("c",))
    bench.client("c", Verb.CREDIT, 1, {"credit": 1})
    assert bench.verbs("c", 1)[-1] == "FINAL"


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_reader_without_a_sign_is_cut_after_a_time(is_complete: bool) -> None:
    bench = bench_with_credit(1, slow_reader_s=5)
    bench.generate("c", 1)
    bench.generate("c", 2)
    for seq in range(3):
        bench.tokens("w", row(1, seq, [seq], "x"))
    if is_complete:
        bench.final("w", 1)
    bench.advance(4.8, ("w", "v"), ("c",))
    assert "ERROR" not in bench.verbs("c")
    bench.advance(0.5, ("w", "v"), ("c",))
    error = bench.error("c")
    assert (error["code"], error["emitted_tokens"]) == ("slow_consumer", 1)
    assert ("CANCEL" in bench.verbs("w")) is not is_complete
    assert bench.state.counters.slow_consumers == 1
    assert bench.state.num_unfinished == 1


def test_a_sign_of_life_starts_the_time_anew() -> None:
    bench = bench_with_credit(1, slow_reader_s=5)
    bench.generate("c", 1)
    for seq in range(10):
        bench.tokens("w", row(1, seq, [seq], "x"))
        if seq % 3 == 2:
            bench.advance(3.0, ("w", "v"), ("c",))
            bench.client("c", Verb.CREDIT, 1, {"credit": 1})
    assert "ERROR" not in bench.verbs("c")


def test_a_reader_is_cut_when_too_much_waits() -> None:
    bench = bench_with_credit(1, workers=("w",), slow_reader_bytes=100)
    bench.generate("c", 1)
    bench.generate("c", 2)
    for seq in range(10):
        bench.tokens("w", row(1, seq, [seq], "x" * 20), row(2, seq, [seq], "y"))
        bench.client("c", Verb.CREDIT, 2, {"credit": 1})
    assert bench.error("c")["code"] == "slow_consumer"
    assert bench.state.requests.held_bytes < 200
    assert text(bench, 2) == "y" * 10


def test_other_requests_of_the_connection_feel_nothing() -> None:
    bench = bench_with_credit(2, batch=True, workers=("w",))
    bench.generate("c", 1)
    bench.generate("c", 2)
    for seq in range(6):
        bench.tokens("w", row(1, seq, [seq], "a"), row(2, seq, [seq], "b"), client=1)
        bench.client("c", Verb.CREDIT, 2, {"credit": 1})
    assert (text(bench, 1), text(bench, 2)) == ("aa", "b" * 6)


def test_a_lost_group_does_not_lose_what_is_withheld() -> None:
    bench = bench_with_credit(1)
    bench.generate("c", 1)
    for seq in range(6):
        bench.tokens("w", row(1, seq, [seq], "abcdef"[seq]))
    bench.worker("w", encode(Verb.DISCONNECT))
    again = bench.last("v", Verb.GENERATE)
    assert (again.raw, again.header["first_seq"]) == ([packed(list(range(6)))], 6)
    bench.tokens("v", row(1, 6, [6], "g", "stop"))
    bench.final("v", 1)
    bench.client("c", Verb.CREDIT, 1, {"credit": 1})
    assert text(bench, 1) == "abcdefg"
    assert bench.verbs("c", 1)[-1] == "FINAL"


def test_who_is_cut_with_a_deadline_behind_him_ends_once() -> None:
    bench = bench_with_credit(1, workers=("w",), slow_reader_s=1)
    bench.generate("c", 1)
    bench.generate("c", 2, deadline_ms=500)
    for seq in range(2):
        bench.tokens("w", row(1, seq, [seq], "x"), row(2, seq, [seq], "x"))
    bench.advance(0.8, ("w",), ("c",))
    bench.worker("w", encode(Verb.DRAIN))
    bench.worker("w", encode(Verb.DISCONNECT))
    bench.advance(0.4, clients=("c",))
    assert [bench.verbs("c", number).count("ERROR") for number in (1, 2)] == [1, 1]
    assert bench.state.num_unfinished == 0


def test_an_error_of_the_group_does_not_count_what_was_withheld() -> None:
    bench = bench_with_credit(1)
    bench.generate("c", 1)
    for seq in range(3):
        bench.tokens("w", row(1, seq, [seq], "x"))
    bench.worker("w", encode(Verb.ERROR, request_id(1), {"code": "internal", "message": "no", "emitted_tokens": 3}))
    assert bench.error("c") == {"code": "internal", "message": "no", "emitted_tokens": 1}


def test_without_credit_in_hello_nothing_is_withheld() -> None:
    bench = bench_with_credit(0)
    bench.generate("c", 1)
    for seq in range(300):
        bench.tokens("w", row(1, seq, [seq], "x"))
    assert num_rows(bench, 1) == 300


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4)),
        st.tuples(st.just("credit"), st.tuples(st.integers(1, 3), st.integers(1, 4))),
        st.tuples(st.just("final"), st.integers(1, 3)),
        st.tuples(st.just("take over"), st.none()),
        st.tuples(st.just("time"), st.none()),
    ),
    max_size=60,
)


def letters(start: int, end: int) -> str:
    return "".join(chr(97 + i % 26) for i in range(start, end))


class Streams:
    """Three streams whose tokens are 0, 1, 2 ... wherever they run."""

    def __init__(self, credit: int, batch: bool) -> None:
        self.bench = bench_with_credit(credit, batch=batch)
        self.granted = Counter(dict.fromkeys((1, 2, 3), credit))
        self.made = Counter[int]()
        self.seqs = Counter[int]()
        self.num_groups = 0
        for number in self.granted:
            self.bench.generate("c", number)

    def group_of(self, number: int) -> str | None:
        request = self.bench.state.requests.by_id.get(request_id(number))
        return request.group.name if request is not None and request.group is not None else None

    def rows(self, counts: list[tuple[int, int]]) -> None:
        for name in {name for number, _ in counts if (name := self.group_of(number))}:
            rows = []
            for number, count in counts:
                if self.group_of(number) == name:
                    start, end = self.made[number], self.made[number] + count
                    ids = list(range(start, end))
                    rows.append(row(number, self.seqs[number], ids, letters(start, end), offset=start))
                    self.seqs[number] += 1
                    self.made[number] = end
            self.bench.tokens(name, *rows, client=1)

    def credit(self, number: int, count: int) -> None:
        self.granted[number] += count
        self.bench.client("c", Verb.CREDIT, number, {"credit": count})

    def final(self, number: int) -> None:
        name = self.group_of(number)
        if name is not None:
            self.bench.worker(name, encode(Verb.FINAL, request_id(number), FinalHeader(finish_reason="stop")))

    def take_over(self) -> None:
        self.num_groups += 1
        victim = next(iter(self.bench.state.workers.by_address))[0].decode()
        self.bench.ready(f"n{self.num_groups}")
        self.bench.worker(victim, encode(Verb.DRAIN))
        self.bench.worker(victim, encode(Verb.DISCONNECT))


@pytest.mark.slow
@given(steps=STEPS, credit=st.integers(1, 3), batch=st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_interleaving_of_rows_and_credit_gives_the_exact_text(steps: Any, credit: int, batch: bool) -> None:
    """Groups leave and others take over. Nothing is twice, nothing is missing, no row goes without credit."""
    streams = Streams(credit, batch)
    bench = streams.bench
    last = [("rows", [(1, 1), (2, 1), (3, 1)]), ("final", 1), ("final", 2), ("final", 3)]
    for kind, value in [*steps, *last]:
        match kind:
            case "rows":
                streams.rows(value)
            case "credit":
                streams.credit(*value)
            case "final":
                streams.final(value)
            case "take over":
                streams.take_over()
            case "time":
                bench.advance(0.3, clients=("c",))
        assert all(num_rows(bench, number) <= count for number, count in streams.granted.items())
    for number in streams.granted:
        bench.client("c", Verb.CREDIT, number, {"credit": 1})
        assert text(bench, number) == letters(0, streams.made[number])
        assert bench.token_ids("c", number) == list(range(streams.made[number]))
        assert bench.verbs("c", number)[-1] == "FINAL"
    assert bench.state.num_unfinished == 0
    assert bench.state.requests.held_bytes == 0
