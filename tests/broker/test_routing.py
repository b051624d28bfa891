# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mii_zmq.broker.records import Client, Deployment, Request
from mii_zmq.broker.routing import WaitingQueue, choose_group, estimate_tokens, retry_after_ms


def make_request(order: int, priority: int = 0) -> Request:
    values: dict[str, Any] = {"header": {}, "body": b"", "raw": (), "stream": True, "accepted_at": 0.0}
    return Request(
        request_id=order.to_bytes(16, "big"),
        client=Client(1, (b"c",), 0.0),
        deployment=Deployment("m", 0.0),
        priority=priority,
        order=order,
        remaining_tokens=1,
        num_bytes=0,
        **values,
    )


@pytest.mark.slow
@given(
    steps=st.lists(
        st.one_of(st.tuples(st.just("push"), st.integers(-2, 2)), st.sampled_from(["pop", "discard"])), max_size=60
    )
)
@settings(max_examples=60, deadline=None)
def test_queue_agrees_with_a_sorted_list(steps: list[Any]) -> None:
    queue = WaitingQueue()
    model: list[Request] = []
    left: list[Request] = []
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            request = left.pop() if left and number % 3 == 0 else make_request(number, step[1])
            queue.push(request)
            model.append(request)
        elif step == "pop" and model:
            first = min(model, key=lambda r: (r.priority, r.order))
            assert queue.first() is queue.pop() is first
            model.remove(first)
        elif step == "discard" and model:
            victim = model.pop(len(model) // 2)
            queue.discard(victim)
        assert len(queue) == len(model)
        assert set(queue) == set(model)


def test_queue_drops_entries_of_requests_that_left() -> None:
    queue = WaitingQueue()
    requests = [make_request(number) for number in range(1000)]
    for request in requests:
        queue.push(request)
    for request in requests[1:]:
        queue.discard(request)
    assert len(queue._heap) < 100
    assert queue.pop() is requests[0]
    with pytest.raises(IndexError):
        queue.pop()


def test_no_groups() -> None:
    assert choose_group([], b"") is None


def test_estimates() -> None:
    assert estimate_tokens(500, 10, 100) == 400
    assert estimate_tokens(5, 10, 100) == 1
    assert estimate_tokens(0, 400, 0) == 228


@pytest.mark.parametrize(
    ("waiting", "rate", "expected"), [(100, 0, 1000), (100, 10, 1000), (1, 1000, 100), (2048, 1, 30_000)]
)
def test_retry_after(waiting: int, rate: float, expected: int) -> None:
    assert retry_after_ms(waiting, rate) == expected
