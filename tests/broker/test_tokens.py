# SPDX-License-Identifier: Apache-2.0
"""What is remembered of the rows that go through the broker, and what becomes of a stream without that."""

from __future__ import annotations

import pytest

from mii_zmq.protocol import Verb, encode
from tests.broker.bench import Bench, request_id, row
from tests.broker.test_state import numbers_at

GOODBYE = encode(Verb.DISCONNECT, header={"reason": "killed"})


def bench_with_streams(resume: bool) -> Bench:
    """Of request 1 two tokens have come, of request 2 none; both run on w."""
    bench = Bench(resume=resume)
    bench.ready("w")
    bench.hello("c")
    for number in (1, 2):
        bench.generate("c", number)
    bench.tokens("w", row(1, 0, [5], "a"))
    bench.tokens("w", row(1, 1, [6], "b"))
    bench.ready("v")
    return bench


@pytest.mark.parametrize(("resume", "held"), [(True, 8), (False, 0)])
def test_ids_are_held_for_who_may_go_on(resume: bool, held: int) -> None:
    bench = bench_with_streams(resume)
    bodies = sum(request.num_bytes for request in bench.state.requests.by_id.values())
    assert bench.state.requests.held_bytes == bodies + held
    assert bench.token_ids("c", 1) == [5, 6]


def test_without_resume_a_stream_ends_with_its_group() -> None:
    bench = bench_with_streams(resume=False)
    bench.worker("w", GOODBYE)
    error = bench.error("c")
    assert (error["code"], error["retryable"], error["emitted_tokens"]) == ("worker_lost", True, 2)
    assert bench.last("c", Verb.ERROR).request_id == request_id(1)
    assert numbers_at(bench, "v") == [2]
    bench.tokens("v", row(2, 0, [7], "c", "stop"))
    bench.final("v", 2)
    assert bench.verbs("c", 2)[-1] == "FINAL"
    assert bench.state.num_unfinished == 0


def test_without_resume_a_lost_row_ends_the_stream() -> None:
    bench = bench_with_streams(resume=False)
    bench.tokens("w", row(1, 3, [8], "d"))
    assert bench.error("c")["code"] == "worker_lost"
    assert bench.last("w", Verb.CANCEL).request_id == request_id(1)
