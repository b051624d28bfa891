# SPDX-License-Identifier: Apache-2.0
"""Aborts and resets through real processes: two gateways, a broker, two groups."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mii_zmq.process import Child, spawn
from tests.stack import PATIENCE_S, Stack, http, stream_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.start_group("one", "fake:step_ms=2,block_size=4")
        stack.start_group("two", "fake:step_ms=2,block_size=4")
        stack.start_gateway()
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="module")
def other(stack: Stack) -> Iterator[str]:
    """A second gateway's address."""
    options = ["--port", "0", "--brokers", stack.client_endpoint, "--admin-endpoints"]
    gateway: Child = spawn("mii_zmq.gateway", options, "gateway-2")
    try:
        url = gateway.wait_ready(PATIENCE_S)["url"].rstrip("/")
        stack.wait_for(lambda: http(url + "/health/ready")[0] == 200)
        yield url
    finally:
        gateway.stop(PATIENCE_S)


def post(url: str, path: str, body: Any) -> tuple[int, Any]:
    status, data = http(url + path, body)
    return status, json.loads(data)


def test_an_abort_reaches_a_stream_of_another_gateway(stack: Stack, other: str) -> None:
    body = {"model": "m", "prompt": "endless", "max_tokens": 8000, "ignore_eos": True}
    events = stream_events(stack.url, "/v1/completions", body)
    first = next(events)
    status, found = post(other, "/abort_request", {"request_id": [first["id"], "nobody"]})
    assert (status, found) == (200, {"aborted": [first["id"]], "not_found": ["nobody"], "num_requests": 1})
    *_, last = _until_closed(events)
    assert last["error"]["code"] == "cancelled"
    stack.wait_for(lambda: stack.used_blocks() == 0)


def _until_closed(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A stream that ends with an error has no [DONE]."""
    try:
        yield from events
    except AssertionError:
        return


def test_all_that_runs(stack: Stack, other: str) -> None:
    answers: list[int] = []
    body = {"model": "m", "prompt": "endless", "max_tokens": 8000, "ignore_eos": True}
    threads = [
        threading.Thread(target=lambda: answers.append(http(stack.url + "/v1/completions", body)[0])) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    stack.wait_for(lambda: sum(group["num_requests"] for group in stack.groups_status().values()) == 5)
    assert post(other, "/abort_request", {"abort_all": True})[1]["num_requests"] == 5
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == [499] * 5


def test_resetting_reaches_every_group(stack: Stack, other: str) -> None:
    def num_cached(num_requests: int) -> int:
        """Tokens of these requests' prompts that came from a cache, by their answers: heartbeats tell of them later."""
        prompts = ["the same long prompt, again and again"] * num_requests
        status, answer = post(stack.url, "/v1/completions", {"model": "m", "prompt": prompts, "max_tokens": 2})
        assert status == 200, answer
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    # So many that each group gets some.
    num_cached(8)
    assert num_cached(8) > 0
    assert post(other, "/reset_prefix_cache", {"model": "m"}) == (200, {"model": "m", "groups": ["one", "two"]})
    assert num_cached(1) == 0
    assert num_cached(8) > 0
    assert post(other, "/reset_prefix_cache", {})[0] == 200
    assert num_cached(1) == 0
    assert post(stack.url, "/reset_prefix_cache", {})[0] == 403
