# SPDX-License-Identifier: Apache-2.0
"""The order of the queue: priority, interrupted requests, tenants by turns, admission."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mii_zmq.broker.records import Client, Deployment, Request
from mii_zmq.broker.waiting import MAX_IDLE_TENANTS, WaitingQueue


def make_request(order: int, priority: int = 0, tenant: str = "", num_tokens: int = 1, again: bool = False) -> Request:
    return Request(
        request_id=order.to_bytes(16, "big"),
        client=Client(1, (b"c",), 0.0),
        deployment=Deployment("m", 0.0),
        header={},
        body=b"",
        raw=(),
        stream=True,
        accepted_at=0.0,
        priority=priority,
        order=order,
        num_tokens=num_tokens,
        num_bytes=0,
        tenant=tenant,
        assigned_at=float(again),
    )


def served(queue: WaitingQueue, count: int | None = None) -> list[Request]:
    taken: list[Request] = []
    while len(taken) != count and (request := queue.first()) is not None:
        queue.take(request)
        taken.append(request)
    return taken


def filled(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for request in requests:
        queue.push(request)
    return queue


def test_priority_then_interrupted_ones_then_admission() -> None:
    requests = [make_request(1), make_request(2, -1), make_request(3), make_request(4, again=True), make_request(5, 1)]
    assert [r.order for r in served(filled(*requests))] == [2, 4, 1, 3, 5]


def test_tenants_take_turns_however_much_one_of_them_wants() -> None:
    queue = filled(*(make_request(n, tenant="loud") for n in range(100)))
    served(queue, 10)
    queue.push(make_request(200, tenant="quiet"))
    queue.push(make_request(201, tenant="quiet"))
    assert [r.tenant for r in served(queue, 5)].count("quiet") == 2


def test_turns_are_measured_in_tokens() -> None:
    queue = filled(
        *(make_request(n, tenant="large", num_tokens=90) for n in range(20)),
        *(make_request(100 + n, tenant="small", num_tokens=10) for n in range(100)),
    )
    assert Counter(r.tenant for r in served(queue, 50)) == {"large": 5, "small": 45}


def test_who_comes_back_has_neither_credit_nor_a_clean_record() -> None:
    queue = filled(*(make_request(n, tenant="a", num_tokens=10) for n in range(50)))
    queue.push(make_request(100, tenant="b", num_tokens=100))
    assert any(r.tenant == "b" for r in served(queue, 2))
    queue.push(make_request(101, tenant="b", num_tokens=100))
    assert [r.tenant for r in served(queue, 8)] == ["a"] * 8
    assert "b" in [r.tenant for r in served(queue, 3)]


def test_parked_tenants_are_passed_over() -> None:
    a, b, again = make_request(1, tenant="a"), make_request(2, tenant="b"), make_request(3, again=True, tenant="a")
    queue = filled(a, b, again)
    assert queue.first() is again
    queue.take(again)
    queue.park(a)
    assert queue.first() is b
    queue.park(b)
    assert queue.first() is None
    queue.unpark()
    assert queue.first() is a


def test_what_is_ahead_of_a_new_request() -> None:
    queue = filled(
        *(make_request(n, tenant="loud", num_tokens=10) for n in range(10)),
        make_request(20, tenant="quiet", num_tokens=10),
        make_request(21, -5, num_tokens=7),
        make_request(22, 5, num_tokens=1000),
        make_request(23, num_tokens=3, again=True),
    )
    assert queue.num_tokens == 1120
    assert queue.tokens_ahead(0, "loud") == 7 + 3 + 100 + 10
    assert queue.tokens_ahead(0, "quiet") == 7 + 3 + 10 + 10
    assert queue.tokens_ahead(0, "new") == 7 + 3
    assert queue.tokens_ahead(-6, "new") == 0
    assert queue.of_tenant("loud") == (10, 100)


def test_tenants_that_come_once_are_forgotten() -> None:
    queue = filled(make_request(0, tenant="first"))
    for number in range(1, 3000):
        queue.push(make_request(number, tenant=f"tenant {number}"))
        served(queue, 1)
    assert len(queue._classes[0]._times) <= MAX_IDLE_TENANTS


def test_entries_of_requests_that_left_are_dropped() -> None:
    requests = [make_request(number) for number in range(1000)]
    queue = filled(*requests)
    for request in requests[1:]:
        queue.discard(request)
        queue.discard(request)
    line = queue._classes[0].lines[""]
    assert len(line._heap) < 100
    assert served(queue) == requests[:1]
    assert (len(queue), queue.num_tokens, queue.num_tenants) == (0, 0, 0)


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"), st.integers(-1, 1), st.sampled_from("abc"), st.integers(1, 50), st.sampled_from([0, 0, 1])
        ),
        st.tuples(st.sampled_from(["take", "discard", "hold", "park"])),
    ),
    max_size=80,
)


@pytest.mark.slow
@given(steps=STEPS)
@settings(max_examples=100, deadline=None)
def test_nobody_is_lost_and_no_tenant_is_ahead(steps: list[Any]) -> None:
    """Against a plain set: what is first has the best priority; interrupted ones lead; a tenant is in order."""
    queue = WaitingQueue()
    model: set[Request] = set()
    for number, step in enumerate(steps):
        if step[0] == "push":
            request = make_request(number, step[1], step[2], step[3], bool(step[4]))
            queue.push(request)
            model.add(request)
        elif model:
            first = queue.first()
            assert first is not None
            best = min(r.priority for r in model)
            same = {r for r in model if r.priority == best}
            again = {r for r in same if r.assigned_at}
            assert first in (again or same)
            mine = again or {r for r in same if r.tenant == first.tenant}
            assert first.order == min(r.order for r in mine)
            if step[0] == "take":
                queue.take(first)
                model.remove(first)
            elif step[0] == "discard":
                victim = min(model, key=lambda r: (r.order * 7919) % 101)
                queue.discard(victim)
                model.remove(victim)
            elif step[0] == "hold":
                queue.discard(first)
                queue.push(first)
            else:
                queue.park(first)
                other = queue.first()
                assert other is None or (other.tenant, other.priority) != (first.tenant, first.priority) or again
                queue.unpark()
        assert len(queue) == len(model)
        assert set(queue) == model
        assert queue.num_tokens == sum(r.num_tokens for r in model)
    assert set(served(queue)) == model


@pytest.mark.slow
@given(
    costs=st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.integers(1, 100), min_size=30, max_size=30), min_size=2, max_size=4
    ),
    count=st.integers(1, 30),
)
@settings(max_examples=100, deadline=None)
def test_tenants_that_all_wait_get_the_same(costs: dict[str, list[int]], count: int) -> None:
    queue = WaitingQueue()
    for tenant, sizes in costs.items():
        for index, size in enumerate(sizes):
            queue.push(make_request(1000 * ord(tenant) + index, tenant=tenant, num_tokens=size))
    given: Counter[str] = Counter(dict.fromkeys(costs, 0))
    for request in served(queue, count):
        given[request.tenant] += request.num_tokens
    assert max(given.values()) - min(given.values()) <= 100
