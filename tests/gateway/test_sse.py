# SPDX-License-Identifier: Apache-2.0
"""Answers on real sockets: first byte, clients that vanish or do not read, errors on the way, the gateway's end."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest

from mii_zmq.errors import Overloaded, WorkerLost
from mii_zmq.gateway.state import Gateway
from tests.gateway.fake_client import FakeClient
from tests.gateway.reading import post, read_events

PATIENCE_S = 30

DOORS = [
    ("/mii/fake", {"prompts": "a", "stream": True}),
    ("/v1/completions", {"model": "fake", "prompt": "a", "stream": True}),
    ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": "a"}], "stream": True}),
]


async def next_event(response: aiohttp.ClientResponse) -> dict[str, object]:
    line = await response.content.readuntil(b"\n\n")
    return json.loads(line.removeprefix(b"data: "))


def ask_with_a_small_buffer(address: tuple[str, int], body: object, num_bytes: int = 4096) -> socket.socket:
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)
    reader.connect(address)
    reader.sendall(raw_post(body))
    return reader


def raw_post(body: object) -> bytes:
    data = json.dumps(body).encode()
    head = b"POST /mii/fake HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(data) + data


@pytest.fixture
def by_hand(broker: FakeClient) -> FakeClient:
    broker.answer = lambda generation: None
    return broker


@pytest.mark.parametrize(("path", "body"), DOORS)
async def test_tokens_arrive_one_by_one(
    path: str, body: object, http: aiohttp.ClientSession, by_hand: FakeClient
) -> None:
    opening = asyncio.create_task(http.post(path, json=body).__aenter__())
    generation = await by_hand.next_generation()
    generation.push("x")
    async with await opening as response:
        assert response.status == 200
        seen = json.dumps(await next_event(response))
        if "role" in seen:
            seen = json.dumps(await next_event(response))
        assert '"x"' in seen
        generation.push("y")
        assert '"y"' in json.dumps(await next_event(response))
        generation.finish("stop")
        assert (await read_events(response))[-1] == "[DONE]"
    assert not generation.is_cancelled.is_set()


@pytest.mark.parametrize(("path", "body"), DOORS)
async def test_an_error_before_the_first_token_has_its_status(
    path: str, body: object, http: aiohttp.ClientSession, by_hand: FakeClient
) -> None:
    by_hand.answer = lambda generation: generation.fail(Overloaded("full"))
    async with http.post(path, json=body) as response:
        assert response.status == 503
        assert response.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(("path", "body"), DOORS)
async def test_an_error_within_a_stream_is_its_last_event(
    path: str, body: object, http: aiohttp.ClientSession, by_hand: FakeClient, gateway: Gateway
) -> None:
    opening = asyncio.create_task(http.post(path, json=body).__aenter__())
    generation = await by_hand.next_generation()
    generation.push("x", "y")
    generation.fail(WorkerLost("the group is gone"))
    async with await opening as response:
        assert response.status == 200
        *_, last = await read_events(response)
    error = json.loads(last)
    if path.startswith("/v1/"):
        assert error["error"]["code"] == "worker_lost"
    else:
        assert error == {"message": "the group is gone", "code": "worker_lost"}
    assert sum(gateway.metrics.stream_errors.values()) == 1


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_vanishes_cancels_its_requests(
    num_tokens: int, stream: bool, http: aiohttp.ClientSession, by_hand: FakeClient, gateway: Gateway
) -> None:
    request = asyncio.create_task(post(http, "/mii/fake", {"prompts": ["a", "b"], "stream": stream}))
    generations = [await by_hand.next_generation() for _ in range(2)]
    for generation in generations:
        generation.push(*"x" * num_tokens)
    request.cancel()
    async with asyncio.timeout(PATIENCE_S):
        for generation in generations:
            await generation.is_cancelled.wait()
    await asyncio.gather(request, return_exceptions=True)
    async with http.get("/health/live") as response:
        assert response.status == 200
    assert gateway.metrics.num_in_flight == 0
    assert gateway.metrics.http_requests["/mii/{deployment}", "499"] == 1


async def test_a_reader_that_does_not_read_is_cut(
    address: tuple[str, int], by_hand: FakeClient, gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    gateway.write_timeout_s = 0.1
    with ask_with_a_small_buffer(address, {"prompts": "a", "stream": True}):
        generation = await by_hand.next_generation()
        pushed = 0
        async with asyncio.timeout(PATIENCE_S):
            while not generation.is_cancelled.is_set():
                generation.push("x" * 10_000)
                pushed += 10_000
                await asyncio.sleep(0)
                if pushed > 2_000_000:
                    await generation.is_cancelled.wait()
    assert gateway.metrics.num_slow_readers == 1
    by_hand.answer = FakeClient().answer
    assert (await post(http, "/mii/fake", {"prompts": "a"}))[0] == 200


async def test_a_reader_that_stops_before_the_last_bytes_is_cut(
    address: tuple[str, int], by_hand: FakeClient, gateway: Gateway
) -> None:
    gateway.write_timeout_s = 0.1
    with ask_with_a_small_buffer(address, {"prompts": "a", "stream": True}):
        generation = await by_hand.next_generation()
        assert gateway.door is not None
        (transport,) = gateway.door.connections
        assert isinstance(transport, asyncio.Transport)
        async with asyncio.timeout(PATIENCE_S):
            # As much as fits into the buffers and no more, so that only the last write has to wait.
            while transport.get_write_buffer_size() <= transport.get_write_buffer_limits()[1]:
                generation.push("x" * 1000)
                while generation.has_deltas:
                    await asyncio.sleep(0)
            generation.finish()
            assert await gateway.drain(PATIENCE_S)
    assert gateway.metrics.num_slow_readers == 1


async def test_whoever_does_not_read_a_whole_answer_is_cut(
    address: tuple[str, int], by_hand: FakeClient, gateway: Gateway
) -> None:
    gateway.write_timeout_s = 0.1
    with ask_with_a_small_buffer(address, {"prompts": "a"}):
        generation = await by_hand.next_generation()
        generation.push("x" * 4_000_000)
        generation.finish()
        assert gateway.door is not None
        async with asyncio.timeout(PATIENCE_S):
            while gateway.door.connections:
                await asyncio.sleep(0.01)
    assert gateway.metrics.num_slow_readers == 1
    assert gateway.metrics.http_requests["/mii/{deployment}", "499"] == 1


async def test_whoever_leaves_the_rest_of_an_answer_is_cut(
    address: tuple[str, int], by_hand: FakeClient, gateway: Gateway
) -> None:
    """The rest fits into the buffer of the connection, so that writing it has ended."""
    assert gateway.door is not None
    gateway.door.unread_timeout_s = 0.1
    with ask_with_a_small_buffer(address, {"prompts": "a"}) as reader:
        generation = await by_hand.next_generation()
        ((transport, connection),) = gateway.door.connections.items()
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        generation.push("x" * 60_000)
        generation.finish()
        async with asyncio.timeout(PATIENCE_S):
            while gateway.door.connections:
                await asyncio.sleep(0.01)
        assert connection.is_idle
        assert len(b"".join(iter(lambda: reader.recv(4096), b""))) < 60_000
    assert gateway.metrics.http_requests["/mii/{deployment}", "200"] == 1
    assert gateway.metrics.num_slow_readers == 1


async def test_the_rest_of_one_answer_is_not_held_against_the_next(
    address: tuple[str, int], by_hand: FakeClient, gateway: Gateway
) -> None:
    assert gateway.door is not None
    with ask_with_a_small_buffer(address, {"prompts": "a"}) as reader:
        generation = await by_hand.next_generation()
        ((transport, connection),) = gateway.door.connections.items()
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        generation.push("x" * 60_000)
        generation.finish()
        async with asyncio.timeout(PATIENCE_S):
            while not connection.is_idle:
                await asyncio.sleep(0.01)
        assert connection._unread_timer is not None
        reader.sendall(raw_post({"prompts": "b"}))
        second = await by_hand.next_generation()
        assert connection._unread_timer is None
        second.finish()
        async with asyncio.timeout(PATIENCE_S):
            while not connection.is_idle:
                await asyncio.sleep(0.01)
        assert connection._unread_timer is not None


@pytest.mark.slow
async def test_whoever_reads_a_whole_answer_slowly_gets_it(
    address: tuple[str, int], by_hand: FakeClient, gateway: Gateway
) -> None:
    """It takes longer than the write timeout, and some of it is always taken within that."""
    gateway.write_timeout_s = 1.0
    loop = asyncio.get_running_loop()
    with ask_with_a_small_buffer(address, {"prompts": "a"}, 65536) as reader:
        generation = await by_hand.next_generation()
        generation.push("x" * 2_000_000)
        generation.finish()
        reader.setblocking(False)
        started, received = loop.time(), bytearray()
        async with asyncio.timeout(PATIENCE_S):
            while received.count(b"x") < 2_000_000:
                some = await loop.sock_recv(reader, 65536)
                assert some
                received += some
                await asyncio.sleep(0.05)
        assert loop.time() - started > gateway.write_timeout_s
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    assert json.loads(body)[0]["generated_text"] == "x" * 2_000_000
    assert gateway.metrics.num_slow_readers == 0


async def test_draining_refuses_new_requests_and_finishes_running_ones(
    http: aiohttp.ClientSession, by_hand: FakeClient, gateway: Gateway
) -> None:
    opening = asyncio.create_task(http.post(*DOORS[0][:1], json=DOORS[0][1]).__aenter__())
    generation = await by_hand.next_generation()
    generation.push("x")
    async with await opening as response:
        draining = asyncio.create_task(gateway.drain(30))
        await next_event(response)
        for path in ("/health/ready", "/health", "/healthz"):
            async with http.get(path) as health:
                assert health.status == 503
        async with http.get("/health/live") as health:
            assert health.status == 200
        async with http.post("/mii/fake", json={"prompts": "a"}) as refused:
            assert refused.status == 503
            assert refused.headers["Connection"] == "close"
            assert refused.headers["Retry-After"] == "1"
        assert not draining.done()
        generation.push("y")
        generation.finish()
        assert (await read_events(response))[-1] == "[DONE]"
    assert await draining is True


async def test_what_cannot_finish_in_time_is_told_so(
    http: aiohttp.ClientSession, by_hand: FakeClient, gateway: Gateway
) -> None:
    opening = asyncio.create_task(http.post(*DOORS[1][:1], json=DOORS[1][1]).__aenter__())
    waiting = asyncio.create_task(post(http, "/mii/fake", {"prompts": ["a", "b"]}))
    generations = [await by_hand.next_generation() for _ in range(3)]
    streamed = next(generation for generation in generations if generation.stream)
    streamed.push("x")
    async with await opening as response:
        await next_event(response)
        assert await gateway.drain(0.01) is False
        assert json.loads((await read_events(response))[-1])["error"]["code"] == "draining"
    assert (await waiting)[0] == 503
    assert all(generation.is_cancelled.is_set() for generation in generations)
