# SPDX-License-Identifier: Apache-2.0
"""Headers that do not come, and a door that is closed while clients stand in it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest
from aiohttp import web

from mii_zmq.gateway.app import listen, make_runner, open_door
from mii_zmq.gateway.door import Door
from mii_zmq.gateway.state import Gateway
from tests.gateway.fake_client import FakeClient

PATIENCE_S = 20
T = TypeVar("T")
REQUEST = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
async def door(app: web.Application) -> AsyncIterator[Door]:
    listener = listen("127.0.0.1", 0)
    runner = make_runner(app)
    await runner.setup()
    door = await open_door(runner, listener)
    yield door
    await door.close()
    await runner.cleanup()


def address_of(door: Door) -> tuple[str, int]:
    host, port = door._listener.getsockname()[:2]
    return host, port


async def read_all(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def until(find: Callable[[], T]) -> T:
    """What is found at last."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := find()):
            await asyncio.sleep(0.005)
    return found


@pytest.mark.parametrize("sent", [b"", b"GET /heal"], ids=["nothing", "a part"])
async def test_a_header_that_does_not_come_ends_the_connection(door: Door, sent: bytes) -> None:
    door.header_timeout_s = 0.1
    reader, writer = await asyncio.open_connection(*address_of(door))
    writer.write(sent)
    assert await read_all(reader) == b""
    writer.close()
    assert door.num_late_headers == 1
    assert door.connections == {}


async def test_the_second_header_of_a_connection_has_its_time_as_well(door: Door) -> None:
    reader, writer = await asyncio.open_connection(*address_of(door))
    writer.write(REQUEST)
    assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
    door.header_timeout_s = 0.1
    writer.write(b"G")
    assert b"HTTP/1.1" not in await read_all(reader)
    writer.close()
    assert door.num_late_headers == 1
    assert door.connections == {}


async def test_an_idle_connection_and_a_long_answer_are_no_late_headers(
    door: Door, broker: FakeClient, gateway: Gateway
) -> None:
    """No time runs: a short one, waited for, would at times run out between a header's first byte and its last one."""
    broker.answer = lambda generation: None
    reader, writer = await asyncio.open_connection(*address_of(door))
    writer.write(REQUEST[:10])
    (connection,) = await until(lambda: [c for c in door.connections.values() if not c.is_idle])
    assert connection._timer is not None
    writer.write(REQUEST[10:])
    answer = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 OK" in answer
    await reader.readexactly(int(answer.lower().partition(b"content-length:")[2].split()[0]))
    await until(lambda: connection.is_idle)
    assert connection._timer is None
    body = b'{"prompts": "a"}'
    writer.write(b"POST /mii/fake HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                 % len(body))  # fmt: skip
    await until(lambda: connection.is_serving)
    # The body has its own time.
    assert connection._timer is None
    writer.write(body)
    generation = await broker.next_generation()
    assert connection._timer is None
    generation.push("x")
    generation.finish()
    await reader.readuntil(b" 200 OK")
    writer.close()
    assert door.num_late_headers == 0


async def test_closing_serves_everybody_whose_connection_was_made(door: Door, gateway: Gateway) -> None:
    """Connections that the kernel has made and nobody has accepted."""
    host, port = address_of(door)
    # No turn of the event loop: they are in the kernel's queue when the door closes.
    peers = [socket.create_connection((host, port)) for _ in range(20)]
    for peer in peers[:10]:
        peer.sendall(REQUEST)
    gateway.is_leaving = True
    await door.close()
    for peer in peers[10:]:
        peer.sendall(REQUEST)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))
    for peer in peers:
        reader, writer = await asyncio.open_connection(sock=peer)
        answer = await read_all(reader)
        assert b" 200 OK" in answer
        assert b"connection: close" in answer.lower()
        writer.close()


async def test_only_idle_connections_are_closed(door: Door, broker: FakeClient) -> None:
    broker.answer = lambda generation: None
    idle_reader, idle = await asyncio.open_connection(*address_of(door))
    idle.write(REQUEST)
    await idle_reader.readuntil(b"\r\n\r\n")
    half_reader, half = await asyncio.open_connection(*address_of(door))
    half.write(REQUEST[:10])
    busy_reader, busy = await asyncio.open_connection(*address_of(door))
    head = b"POST /mii/fake HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n"
    busy.write(head + b'{"prom')
    while sum(not connection.is_idle for connection in door.connections.values()) < 2:
        await asyncio.sleep(0.005)
    await door.close()
    door.close_idle()
    await read_all(idle_reader)
    half.write(REQUEST[10:])
    assert b" 200 OK" in await half_reader.readuntil(b"\r\n\r\n")
    busy.write(b'pts": "a"}')
    generation = await broker.next_generation()
    generation.finish()
    assert b" 200 OK" in await busy_reader.readuntil(b"\r\n\r\n")
    for writer in (idle, half, busy):
        writer.close()


async def test_a_request_that_came_behind_another_one_is_no_idle_connection(door: Door, broker: FakeClient) -> None:
    broker.answer = lambda generation: None
    reader, writer = await asyncio.open_connection(*address_of(door))
    head = b"POST /mii/fake HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n"
    writer.write(REQUEST + head + b'{"prompts": "a"}')
    assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
    generation = await broker.next_generation()
    door.close_idle()
    generation.finish()
    async with asyncio.timeout(PATIENCE_S):
        await reader.readuntil(b" 200 OK")
    writer.close()
