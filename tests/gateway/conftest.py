# SPDX-License-Identifier: Apache-2.0
"""A gateway on a real socket, as in production, with a fake broker client behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from mii_zmq.config import GatewayConfig
from mii_zmq.gateway.app import listen, make_app, make_runner, open_door
from mii_zmq.gateway.state import GATEWAY, Gateway
from tests.gateway.fake_client import FakeClient


@pytest.fixture
def broker() -> FakeClient:
    return FakeClient()


@pytest.fixture
async def app(broker: FakeClient) -> web.Application:
    return make_app(GatewayConfig(port=0), broker)


@pytest.fixture
def gateway(app: web.Application) -> Gateway:
    return app[GATEWAY]


@pytest.fixture
async def address(app: web.Application) -> AsyncIterator[tuple[str, int]]:
    listener = listen("127.0.0.1", 0)
    runner = make_runner(app)
    await runner.setup()
    address = listener.getsockname()
    door = await open_door(runner, listener)
    yield address
    await door.close()
    await runner.cleanup()


@pytest.fixture
async def http(address: tuple[str, int]) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{address[0]}:{address[1]}") as session:
        yield session
