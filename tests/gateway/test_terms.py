# SPDX-License-Identifier: Apache-2.0
"""Tenant, priority and deadline: from the HTTP headers of every door to the broker's client."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from mii_zmq.errors import DeadlineExceeded, Overloaded, TenantOverloaded
from mii_zmq.gateway.terms import Terms
from tests.gateway.fake_client import FakeClient

DOORS: list[tuple[str, dict[str, Any]]] = [
    ("/mii/fake", {"prompts": "a"}),
    ("/v1/completions", {"model": "fake", "prompt": "a"}),
    ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "a"}]}),
]


@pytest.mark.parametrize(("path", "body"), DOORS)
async def test_headers_reach_the_broker(
    http: aiohttp.ClientSession, broker: FakeClient, path: str, body: dict[str, Any]
) -> None:
    headers = {"X-MII-Tenant": "org/1", "X-MII-Priority": "-3", "X-MII-Deadline-Ms": "5000"}
    async with http.post(path, json=body, headers=headers) as response:
        assert response.status == 200
    (sent,) = broker.sent
    assert (sent.tenant, sent.priority) == ("org/1", -3)
    assert sent.deadline_s is not None
    assert 4 < sent.deadline_s <= 5


async def test_without_headers_there_are_no_terms(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    async with http.post("/mii/fake", json={"prompts": "a"}) as response:
        assert response.status == 200
    assert (broker.sent[0].tenant, broker.sent[0].priority, broker.sent[0].deadline_s) == ("", 0, None)


async def test_openais_own_priority_wins(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    body = {"model": "fake", "prompt": "a", "priority": 7}
    async with http.post("/v1/completions", json=body, headers={"X-MII-Priority": "1"}) as response:
        assert response.status == 200
    assert broker.sent[0].priority == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-MII-Tenant", "a b"),
        ("X-MII-Tenant", "x" * 201),
        ("X-MII-Priority", "high"),
        ("X-MII-Priority", str(2**31)),
        ("X-MII-Deadline-Ms", "0"),
        ("X-MII-Deadline-Ms", "1e3"),
    ],
)
async def test_wrong_headers_are_named(http: aiohttp.ClientSession, broker: FakeClient, name: str, value: str) -> None:
    async with http.post("/v1/completions", json=DOORS[1][1], headers={name: value}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == name
    assert broker.sent == []


async def test_a_deadline_that_passed_is_504(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.answer = lambda generation: generation.fail(DeadlineExceeded("too late"))
    async with http.post("/v1/completions", json=DOORS[1][1], headers={"X-MII-Deadline-Ms": "1"}) as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(
    "path",
    [
        *(path for path, _ in DOORS), "/v1/responses", "/v1/messages", "/v1/embeddings", "/score", "/rerank",
        "/tokenize", "/detokenize", "/v1/messages/count_tokens",
    ],
)  # fmt: skip
async def test_time_counts_from_before_the_body(http: aiohttp.ClientSession, path: str) -> None:
    """Seen by which of two mistakes is found."""
    async with http.post(path, data=b"{", headers={"X-MII-Deadline-Ms": "0"}) as response:
        assert response.status == 400
        assert "X-MII-Deadline-Ms is '0'" in await response.text()


def test_time_that_is_used_up_on_the_way() -> None:
    with pytest.raises(DeadlineExceeded):
        Terms(deadline=0.0).left_s()


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (Overloaded("full", retry_after_ms=1200), 503, "overloaded", "server_error"),
        (TenantOverloaded("full", retry_after_ms=1200), 429, "rate_limit_exceeded", "rate_limit_error"),
    ],
)
async def test_refusals_say_whose_limit_it_was_and_when_to_come_back(
    http: aiohttp.ClientSession, broker: FakeClient, error: Overloaded, status: int, code: str, kind: str
) -> None:
    broker.answer = lambda generation: generation.fail(error)
    async with http.post("/v1/completions", json=DOORS[1][1]) as response:
        assert response.status == status
        assert response.headers["Retry-After"] == "2"
        answer = (await response.json())["error"]
        assert (answer["code"], answer["type"]) == (code, kind)
