# SPDX-License-Identifier: Apache-2.0
"""Which requests are refused, why, and when they may come back; and how tenants share what there is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mii_zmq.broker.admission import DrainRate
from mii_zmq.protocol import Verb
from tests.broker.bench import Bench


def small_bench(max_requests: int = 1, **settings: Any) -> Bench:
    bench = Bench(**settings)
    bench.ready("w", max_requests=max_requests)
    return bench


def at_worker(bench: Bench) -> list[int]:
    messages = bench.received[(b"w",)]
    return [int.from_bytes(m.request_id, "big") for m in messages if m.verb is Verb.GENERATE]


def rejections(bench: Bench) -> dict[str, int]:
    return dict(bench.state.counters.rejections)


def test_bound_by_tokens() -> None:
    bench = small_bench(max_queued_tokens=1000)
    bench.generate("c", 1, num_tokens=5000)
    bench.generate("c", 2, num_tokens=5000)
    # Larger than the bound, but there was nobody to wait behind.
    assert bench.verbs("c", 2) == ["ACCEPTED"]
    bench.generate("c", 3, num_tokens=1)
    error = bench.error("c")
    assert (error["code"], error["retryable"]) == ("overloaded", True)
    assert error["retry_after_ms"] > 0
    assert rejections(bench) == {"tokens": 1}
    assert bench.state.status(bench.now)["deployments"]["m"]["waiting_tokens"] == 5000


def test_a_tenant_alone_may_have_the_whole_queue() -> None:
    bench = small_bench(max_queued_requests=4)
    for number in range(1, 6):
        bench.generate("c", number, tenant="a")
    assert "ERROR" not in bench.verbs("c")
    bench.generate("c", 6, tenant="a")
    assert bench.error("c")["code"] == "overloaded"
    assert rejections(bench) == {"requests": 1}


@pytest.mark.parametrize("bound", ["requests", "tokens"])
def test_beside_others_it_has_its_share(bound: str) -> None:
    limits = {"max_queued_requests": 4} if bound == "requests" else {"max_queued_tokens": 400}
    bench = small_bench(**limits)
    bench.generate("c", 1, tenant="a", num_tokens=100)
    bench.generate("d", 2, tenant="b", num_tokens=100)
    for number in (3, 4, 5):
        bench.generate("c", number, tenant="a", num_tokens=100)
    error = bench.error("c")
    assert (error["code"], error["retryable"]) == ("tenant_overloaded", True)
    assert rejections(bench) == {"tenant": 1}
    bench.generate("d", 6, tenant="b", num_tokens=100)
    assert "ERROR" not in bench.verbs("d")
    bench.state.requests.cancel(list(bench.state.requests.by_id.values()), None, bench.now)
    # The other one has not been heard of for a while.
    bench.advance(11, ("w",))
    for number in range(10, 15):
        bench.generate("c", number, tenant="a", num_tokens=100)
    assert rejections(bench) == {"tenant": 1}


def test_tenants_take_turns_at_the_groups() -> None:
    bench = small_bench(max_requests=1)
    for number in range(1, 9):
        bench.generate("c", number, tenant="loud", num_tokens=10)
    bench.generate("d", 11, tenant="quiet", num_tokens=10)
    bench.generate("d", 12, tenant="quiet", num_tokens=10)
    while bench.state.num_unfinished:
        bench.final("w", at_worker(bench)[-1])
    order = at_worker(bench)
    assert max(order.index(11), order.index(12)) <= 5
    assert [n for n in order if n < 10] == list(range(1, 9))


def test_a_tenant_runs_its_share_only_while_others_want_something() -> None:
    bench = small_bench(max_requests=4)
    for number in range(1, 9):
        bench.generate("c", number, tenant="loud", num_tokens=1)
    assert at_worker(bench) == [1, 2, 3, 4]
    for number in range(11, 15):
        bench.generate("d", number, tenant="quiet", num_tokens=1000)
    bench.final("w", 1)
    bench.final("w", 2)
    assert at_worker(bench)[4:] == [11, 12]
    bench.final("w", 11)
    bench.final("w", 12)
    assert at_worker(bench)[6:] == [13, 14]
    for number in (13, 14):
        bench.final("w", number)
    assert at_worker(bench)[8:] == [5, 6]


def test_a_share_of_all_is_no_limit() -> None:
    bench = small_bench(max_requests=2, tenant_share=1.0)
    for number in (1, 2):
        bench.generate("c", number, tenant="loud", num_tokens=1)
    bench.generate("c", 3, tenant="loud", num_tokens=1)
    bench.generate("d", 11, tenant="quiet", num_tokens=1)
    bench.final("w", 1)
    assert len(at_worker(bench)) == 3


def drain_one_per_second(bench: Bench, first: int, count: int) -> None:
    """Requests of 100 tokens each, with others waiting all the time."""
    for number in range(first, first + count + 3):
        bench.generate("c", number, num_tokens=100)
    for number in range(first, first + count):
        bench.advance(1.0, ("w",))
        bench.final("w", number)


def test_a_deadline_that_cannot_be_kept_is_refused_at_once() -> None:
    bench = small_bench()
    drain_one_per_second(bench, 1, 20)
    bench.advance(0.1, ("w",))
    assert bench.state.requests.deployments["m"].drain_rate.per_s == pytest.approx(100, rel=0.15)
    # Two wait, which takes two seconds.
    bench.generate("d", 101, deadline_ms=1000)
    error = bench.error("d")
    assert (error["code"], error["retryable"]) == ("overloaded", True)
    assert rejections(bench) == {"deadline": 1}
    bench.generate("d", 102, deadline_ms=4000)
    bench.generate("d", 103, deadline_ms=1000, tenant="new")
    bench.generate("d", 104, deadline_ms=1000, priority=-1)
    assert rejections(bench) == {"deadline": 1}


def test_retry_after_follows_the_measured_rate() -> None:
    bench = small_bench(max_queued_requests=1)
    for number in (1, 2, 3):
        bench.generate("d", number, num_tokens=100)
    # Nothing is known yet.
    assert bench.error("d")["retry_after_ms"] == 1000
    bench = small_bench(max_queued_requests=23)
    drain_one_per_second(bench, 1, 20)
    for number in range(100, 125):
        bench.generate("d", number, num_tokens=100)
    assert bench.error("d")["retry_after_ms"] == pytest.approx(2300, rel=0.15)


def test_light_load_is_not_taken_for_the_limit() -> None:
    rate = DrainRate()
    for _ in range(100):
        rate.num_tokens += 10
        rate.tick(0.1, is_saturated=False)
    assert rate.per_s == 0
    for _ in range(100):
        rate.num_tokens += 10
        rate.tick(0.1, is_saturated=True)
    assert rate.per_s == pytest.approx(100, rel=0.02)
    for _ in range(100):
        rate.tick(0.1, is_saturated=False)
    assert rate.per_s == pytest.approx(100, rel=0.02)


def test_refusals_are_counted_by_reason() -> None:
    bench = small_bench(max_client_requests=2)
    bench.generate("c", 1, deployment="nope")
    bench.generate("c", 2, deadline_ms=-1)
    bench.generate("c", 3, tenant="x" * 500)
    bench.generate("c", 4)
    bench.generate("c", 5)
    bench.generate("c", 6)
    bench.state.drain()
    bench.generate("d", 7)
    assert rejections(bench) == {"unknown_deployment": 1, "invalid_request": 2, "connection": 1, "draining": 1}
    assert bench.state.status(bench.now)["counters"]["rejections"] == rejections(bench)


def test_interrupted_requests_go_first_whatever_their_tenant_has() -> None:
    bench = Bench()
    bench.ready("w", max_requests=2)
    for number in (1, 2, 3, 4):
        bench.generate("c", number, tenant="loud")
    bench.generate("d", 11, tenant="quiet")
    bench.kill("w")
    bench.advance(3.5)
    bench.ready("v", max_requests=2)
    given = Counter(int.from_bytes(m.request_id, "big") for m in bench.received[(b"v",)] if m.verb is Verb.GENERATE)
    assert set(given) <= {1, 2}
    assert given
