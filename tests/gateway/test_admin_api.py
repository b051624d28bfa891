# SPDX-License-Identifier: Apache-2.0
"""/abort_request and /reset_prefix_cache at a gateway, with and without --admin-endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mii_zmq.config import GatewayConfig
from mii_zmq.gateway.app import listen, make_app, make_runner, open_door
from tests.gateway.fake_client import FakeClient
from tests.gateway.reading import post, read_events

COMPLETIONS = "/v1/completions"
ASKED = {"model": "fake", "prompt": "a"}


@pytest.fixture
async def admin(broker: FakeClient) -> AsyncIterator[aiohttp.ClientSession]:
    """A gateway of its own with --admin-endpoints."""
    listener = listen("127.0.0.1", 0)
    runner = make_runner(make_app(GatewayConfig(port=0, admin_endpoints=True), broker))
    await runner.setup()
    port = listener.getsockname()[1]
    door = await open_door(runner, listener)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session
    await door.close()
    await runner.cleanup()


@pytest.fixture(autouse=True)
def hold(broker: FakeClient) -> None:
    """Requests are answered by nobody."""
    broker.answer = lambda generation: None


async def test_an_unstreamed_request_by_the_header_that_its_client_chose(
    http: aiohttp.ClientSession, broker: FakeClient
) -> None:
    async def ask() -> tuple[int, Any]:
        async with http.post(COMPLETIONS, json=ASKED, headers={"X-Request-ID": "mine"}) as response:
            return response.status, await response.json()

    request = asyncio.ensure_future(ask())
    generation = await broker.next_generation()
    assert generation.name == "mine"
    assert await post(http, "/abort_request", {"request_id": "mine"}) == (
        200, {"aborted": ["mine"], "not_found": [], "num_requests": 1},
    )  # fmt: skip
    status, found = await request
    assert (status, found["error"]["code"]) == (499, "cancelled")
    assert await post(http, "/abort_request", {"rid": ["mine", "mine"]}) == (
        200, {"aborted": [], "not_found": ["mine"], "num_requests": 0},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        (COMPLETIONS, ASKED, "cmpl-"),
        ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "a"}]}, "chatcmpl-"),
        ("/v1/responses", {"model": "fake", "input": "a"}, "resp_"),
        (
            "/v1/messages",
            {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
            "msg_",
        ),
    ],
)
async def test_a_stream_by_its_own_id(
    http: aiohttp.ClientSession, broker: FakeClient, path: str, body: dict[str, Any], prefix: str
) -> None:
    broker.answer = lambda generation: generation.push("one")
    async with http.post(path, json={**body, "stream": True}) as response:
        head = b""
        while prefix.encode() not in head:
            head += await response.content.readany()
        own_id = head[head.index(prefix.encode()) :].split(b'"')[0].decode()
        status, found = await post(http, "/abort_request", {"request_id": own_id})
        assert (status, found["aborted"]) == (200, [own_id])
        rest = (await response.content.read()).decode()
    assert "aborted" in rest.strip().split("\n\n")[-1], "the last event says so"


async def test_the_header_of_a_stream(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.answer = lambda generation: generation.push("x")
    async with http.post(COMPLETIONS, json={**ASKED, "stream": True, "n": 2}) as response:
        status, found = await post(http, "/abort_request", {"request_id": response.headers["X-Request-ID"]})
        assert (status, found["num_requests"]) == (200, 2)
        events = await read_events(response)
    assert json.loads(events[-1])["error"]["code"] == "cancelled"


async def test_embeddings_end_as_a_whole(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    async def ask() -> tuple[int, Any]:
        body = {"model": "fake", "input": ["a", "b"]}
        async with http.post("/v1/embeddings", json=body, headers={"X-Request-ID": "mine"}) as response:
            return response.status, await response.json()

    request = asyncio.ensure_future(ask())
    for _ in range(2):
        await broker.next_generation()
    found = (await post(http, "/abort_request", {"request_id": "mine"}))[1]
    assert found["num_requests"] == 2
    assert (await request)[0] == 499


async def test_only_the_tenant_s_own(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.answer = lambda generation: generation.push("x")
    headers = {"X-Request-ID": "mine", "X-MII-Tenant": "t"}
    async with http.post(COMPLETIONS, json={**ASKED, "stream": True}, headers=headers) as response:
        assert (await post(http, "/abort_request", {"request_id": "mine"}))[1]["num_requests"] == 0
        async with http.post("/abort_request", json={"request_id": "mine"}, headers={"X-MII-Tenant": "t"}) as found:
            assert (await found.json())["num_requests"] == 1
        await response.read()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "request_id"),
        ({"request_id": []}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": ["x" * 201]}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": ["x"] * 1025}, "request_id"),
        ({"request_ids": "x"}, "request_ids"),
        ({"abort_all": "yes"}, "abort_all"),
    ],
)
async def test_bad_aborts(http: aiohttp.ClientSession, body: dict[str, Any], param: str) -> None:
    status, found = await post(http, "/abort_request", body)
    assert status == 400
    assert param in found["message"]


async def test_all_of_a_tenant_is_for_admins(
    http: aiohttp.ClientSession, admin: aiohttp.ClientSession, broker: FakeClient
) -> None:
    broker.answer = lambda generation: generation.push("x")
    async with http.post(COMPLETIONS, json={**ASKED, "stream": True}) as response:
        status, found = await post(http, "/abort_request", {"abort_all": True})
        assert status == 403
        assert "--admin-endpoints" in found["message"]
        # Another gateway on another port: what this one carries is found all the same.
        assert (await post(admin, "/abort_request", {"abort_all": True}))[1]["num_requests"] == 1
        await response.read()


async def test_resetting_is_for_admins(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    status, found = await post(http, "/reset_prefix_cache", {"model": "fake"})
    assert status == 403
    assert "--admin-endpoints" in found["message"]
    assert broker.resets == []


async def test_reset(admin: aiohttp.ClientSession, broker: FakeClient) -> None:
    assert await post(admin, "/reset_prefix_cache", {"model": "fake"}) == (
        200, {"model": "fake", "groups": ["fake-0"]},
    )  # fmt: skip
    assert await post(admin, "/reset_prefix_cache", {}) == (
        400, {"message": "model is missing; served: fake, org/fake-7b"},
    )  # fmt: skip
    for name in ("nobody", "no name"):
        assert (await post(admin, "/reset_prefix_cache", {"model": name}))[0] == 404
    assert broker.resets == ["fake"]


async def test_the_only_deployment_need_not_be_named(admin: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.deployments = ("fake",)
    async with admin.post("/reset_prefix_cache") as response:
        assert response.status == 200
    assert (await post(admin, "/reset_prefix_cache", {"model": None}))[0] == 200
    assert broker.resets == ["fake", "fake"]


async def test_groups_that_have_not_are_named(admin: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.failed_resets = {"fake-1": "it did not answer within 10 s"}
    status, found = await post(admin, "/reset_prefix_cache", {"model": "fake"})
    assert status == 503
    assert "'fake-1': it did not answer within 10 s" in found["message"]
    assert found["message"].endswith("Groups that have: fake-0")


async def test_without_a_broker(admin: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.is_connected = False
    assert (await post(admin, "/abort_request", {"request_id": "x"}))[0] == 503


async def test_routes_are_there_in_any_case(app: web.Application) -> None:
    paths = {route.resource.canonical for route in app.router.routes() if route.resource is not None}
    assert {"/abort_request", "/reset_prefix_cache"} <= paths
