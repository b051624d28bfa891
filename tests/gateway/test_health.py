# SPDX-License-Identifier: Apache-2.0
"""Live, started and ready, each in the states in which they differ."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

from mii_zmq.gateway.state import Gateway
from mii_zmq.telemetry import LoopLag
from tests.gateway.fake_client import FakeClient


async def get(http: aiohttp.ClientSession, path: str) -> tuple[int, dict[str, Any]]:
    async with http.get(path) as response:
        return response.status, await response.json()


async def test_a_full_queue_is_not_ready(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    ordinary = broker.status

    async def full(timeout_s: float = 2.0) -> dict[str, Any]:
        status = await ordinary(timeout_s)
        status["deployments"]["fake"]["takes_requests"] = False
        return status

    broker.status = full  # type: ignore[method-assign]
    status, body = await get(http, "/health/ready?deployment=fake")
    assert (status, body["code"]) == (503, "no_workers")
    status, body = await get(http, "/health/ready")
    assert (status, body["deployments"]) == (200, ["org/fake-7b"])


async def test_started_stays_so(http: aiohttp.ClientSession, broker: FakeClient, gateway: Gateway) -> None:
    broker.is_connected = False
    assert (await get(http, "/health/started"))[0] == 503
    broker.is_connected, deployments = True, broker.deployments
    broker.deployments = ()
    assert (await get(http, "/health/started"))[0] == 503
    broker.deployments = deployments
    # The gateway keeps a status for a moment.
    gateway._status = None
    assert (await get(http, "/health/started"))[0] == 200
    broker.is_connected = False
    assert (await get(http, "/health/started"))[0] == 200


async def test_told_to_end_it_is_not_ready_but_serves_what_is_under_way(
    http: aiohttp.ClientSession, gateway: Gateway
) -> None:
    gateway.is_leaving = True
    status, body = await get(http, "/health/ready")
    assert (status, body["code"]) == (503, "draining")
    assert (await get(http, "/health/live"))[0] == 200
    async with http.get("/healthz") as response:
        assert response.status == 503
    async with http.post("/mii/fake", json={"prompts": "a"}) as response:
        assert response.status == 200
        assert response.headers["Connection"] == "close"
    assert await gateway.drain(10)
    async with http.post("/mii/fake", json={"prompts": "a"}) as response:
        assert response.status == 503
        assert response.headers["Connection"] == "close"
        assert int(response.headers["Retry-After"]) >= 1


async def test_live_shows_what_held_up_the_loop(http: aiohttp.ClientSession, gateway: Gateway) -> None:
    status, body = await get(http, "/health/live")
    assert status == 200
    time.sleep(0.2)  # noqa: ASYNC251 - this is what is to be noticed
    await asyncio.sleep(0)
    _, body = await get(http, "/health/live")
    assert body["event_loop_lag_s"] >= 0.05


async def test_a_loop_that_stood_still_until_now_is_not_live() -> None:
    lag = LoopLag()
    assert lag.is_moving
    lag.start()
    lag._due -= LoopLag.STALL_S + 1
    assert not lag.is_moving
    assert lag.worst_s >= LoopLag.STALL_S
    lag.stop()
    assert lag.is_moving
