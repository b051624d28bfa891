# SPDX-License-Identifier: Apache-2.0
"""Rows with log-probabilities and lengths of prompts: forwarded, split, merged, and never twice when a request changes
groups."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.logprobs import Entry, Record, decode_records, encode_records
from mii_zmq.protocol import TokenDelta, Verb, iterate_tokens
from tests.broker.bench import Bench, packed, request_id, row


def measured(number: int, seq: int, text: str = "x") -> TokenDelta:
    """A row whose record names its token; the first one of a group also tells the length of the prompt."""
    record = Record(False, Entry(seq, 1, -0.5, text.encode()), ())
    length = 10 * number if seq == 0 else 0
    return row(number, seq, [seq], text)._replace(logprobs=encode_records([record]), prompt_length=length)


def received(bench: Bench, name: str, number: int) -> list[TokenDelta]:
    messages = [message for message in bench.received[(name.encode(),)] if message.verb is Verb.TOKENS]
    return [
        delta for message in messages for delta in iterate_tokens(message) if delta.request_id == request_id(number)
    ]


def check(deltas: list[TokenDelta], num_tokens: int) -> None:
    """Every token once, and with each row the records of its tokens."""
    assert b"".join(delta.token_ids for delta in deltas) == packed(list(range(num_tokens)))
    for delta in deltas:
        records = decode_records(delta.logprobs)
        assert packed([record.chosen.token_id for record in records]) == delta.token_ids


def bench_of(batch: bool, credit: int) -> Bench:
    bench = Bench()
    for name in ("w", "v"):
        bench.ready(name)
    bench.client("c", Verb.HELLO, None, {"credit": credit, "batch": batch})
    bench.client("d", Verb.HELLO, None, {"batch": True})
    bench.clear()
    return bench


@given(
    batch=st.booleans(),
    credit=st.integers(0, 3),
    steps=st.lists(st.sampled_from(("alone", "beside plain", "beside others", "grant")), min_size=1, max_size=12),
)
@settings(max_examples=40, deadline=None)
def test_whatever_happens_to_rows_they_keep_their_records(batch: bool, credit: int, steps: list[str]) -> None:
    bench = Bench()
    bench.ready("w")
    bench.client("c", Verb.HELLO, None, {"credit": credit, "batch": batch})
    bench.hello("d")
    bench.generate("c", 1)
    bench.generate("c", 2)
    bench.generate("d", 3)
    seqs = {1: 0, 2: 0, 3: 0}

    def rows(*numbers: int) -> list[TokenDelta]:
        found = [
            measured(number, seqs[number]) if number != 2 else row(2, seqs[2], [seqs[2]], "y") for number in numbers
        ]
        for number in numbers:
            seqs[number] += 1
        return found

    for step in steps:
        if step == "grant":
            bench.client("c", Verb.CREDIT, None, {"credit": 1, "request_ids": [request_id(1), request_id(2)]})
        else:
            numbers = {"alone": (1,), "beside plain": (1, 2), "beside others": (2, 1, 3)}[step]
            bench.tokens("w", *rows(*numbers))
    bench.client("c", Verb.CREDIT, None, {"credit": 99, "request_ids": [request_id(1), request_id(2)]})
    check(received(bench, "c", 1), seqs[1])
    check(received(bench, "d", 3), seqs[3])
    assert all(delta.logprobs == b"" for delta in received(bench, "c", 2))
    for name, number in (("c", 1), ("d", 3)):
        lengths = [delta.prompt_length for delta in received(bench, name, number)]
        assert lengths == [10 * number, *(0 for _ in lengths[1:])][: len(lengths)]


def test_a_request_that_changes_groups_gets_every_record_once() -> None:
    bench = bench_of(batch=True, credit=0)
    bench.generate("c", 1)
    (first,) = [name for name in ("w", "v") if bench.received[(name.encode(),)]]
    second = "v" if first == "w" else "w"
    for seq in range(3):
        bench.tokens(first, measured(1, seq))
    # A hole: the row between was lost, so the request goes on elsewhere.
    bench.tokens(first, measured(1, 4))
    generate = bench.received[(second.encode(),)][-1]
    assert generate.verb is Verb.GENERATE
    assert generate.raw[0] == packed([0, 1, 2])
    bench.tokens(first, measured(1, 3))
    for seq in range(3, 6):
        bench.tokens(second, measured(1, seq))
    check(received(bench, "c", 1), 6)


def test_withheld_records_count_as_held_bytes() -> None:
    bench = bench_of(batch=True, credit=1)
    bench.generate("c", 1)
    (name,) = [name for name in ("w", "v") if bench.received[(name.encode(),)]]
    bench.tokens(name, measured(1, 0))
    before = bench.state.requests.held_bytes
    waiting = measured(1, 1)
    bench.tokens(name, waiting)
    assert bench.state.requests.held_bytes - before == 2 * len(waiting.token_ids) + 1 + len(waiting.logprobs)
