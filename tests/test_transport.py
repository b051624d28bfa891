# SPDX-License-Identifier: Apache-2.0
"""The socket policy on real sockets: gone and full peers, own routing ids, taken endpoints, the asyncio bridge."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from mii_zmq import transport
from mii_zmq.errors import ConfigError
from mii_zmq.transport import AsyncSocket, BlockingSocket, PeerFull, PeerGone

TIMEOUT_S = 30


@pytest.fixture
def context() -> Iterator[Any]:
    context = transport.make_context()
    yield context
    transport.close_context(context)


async def send(channel: AsyncSocket, frames: list[bytes]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                return channel.send(frames)
            except PeerFull:
                await asyncio.sleep(0.005)


async def test_router_and_dealer_exchange_messages(context: Any) -> None:
    router, endpoint = transport.bind_router(context, "tcp://127.0.0.1:0")
    assert int(endpoint.rsplit(":", 1)[1]) > 0
    asked: asyncio.Queue[list[bytes]] = asyncio.Queue()
    answered: asyncio.Queue[list[bytes]] = asyncio.Queue()
    server = AsyncSocket(router, asked.put_nowait)
    client = AsyncSocket(transport.connect_dealer(context, endpoint), answered.put_nowait)
    for number in range(600):
        await send(client, [b"%d" % number, b""])
    for number in range(600):
        peer, *frames = await asyncio.wait_for(asked.get(), TIMEOUT_S)
        assert frames == [b"%d" % number, b""]
        server.send([peer, b"answer"])
    for _ in range(600):
        assert await asyncio.wait_for(answered.get(), TIMEOUT_S) == [b"answer"]
    client.close()
    server.close()


async def test_unknown_peer_is_gone(context: Any) -> None:
    router, _ = transport.bind_router(context, "tcp://127.0.0.1:0")
    server = AsyncSocket(router, lambda frames: None)
    with pytest.raises(PeerGone):
        server.send([b"\0\1\2\3\4", b"x"])
    server.close()
    with pytest.raises(PeerGone):
        server.send([b"\0\1\2\3\4", b"x"])


async def test_dealer_without_connection_is_full(context: Any, tmp_path: Path) -> None:
    client = AsyncSocket(transport.connect_dealer(context, f"ipc://{tmp_path}/nobody"), lambda frames: None)
    with pytest.raises(PeerFull):
        client.send([b"x"])
    client.close(linger_ms=0)


async def test_messages_of_peers_with_ids_of_their_own_are_dropped(context: Any) -> None:
    router, endpoint = transport.bind_router(context, "tcp://127.0.0.1:0")
    received: asyncio.Queue[list[bytes]] = asyncio.Queue()
    server = AsyncSocket(router, received.put_nowait)
    stranger = context.socket(zmq.DEALER)
    stranger.set(zmq.ROUTING_ID, b"chosen")
    stranger.connect(endpoint)
    stranger.send(b"dropped")
    client = AsyncSocket(transport.connect_dealer(context, endpoint), lambda frames: None)
    await send(client, [b"kept"])
    assert (await asyncio.wait_for(received.get(), TIMEOUT_S))[1:] == [b"kept"]
    assert received.empty()
    for socket in (client, server):
        socket.close(linger_ms=0)
    stranger.close(linger=0)


async def test_slow_messages_leave_turns_to_others(context: Any) -> None:
    router, endpoint = transport.bind_router(context, "tcp://127.0.0.1:0")
    handled: list[bytes] = []
    done = asyncio.Event()
    handled_at_turn: list[int] = []
    loop = asyncio.get_running_loop()

    def on_message(frames: list[bytes]) -> None:
        if not handled:
            loop.call_later(0, lambda: handled_at_turn.append(len(handled)))
        handled.append(frames[1])
        end = time.monotonic() + 0.005
        while time.monotonic() < end:
            pass
        if len(handled) == 200:
            done.set()

    client = AsyncSocket(transport.connect_dealer(context, endpoint), lambda frames: None)
    await send(client, [b"0"])
    for index in range(1, 200):
        client.send([str(index).encode()])
    server = AsyncSocket(router, on_message)
    async with asyncio.timeout(TIMEOUT_S):
        await done.wait()
    assert handled == [str(index).encode() for index in range(200)]
    assert handled_at_turn[0] < 200
    for socket in (client, server):
        socket.close(linger_ms=0)


async def test_callback_that_raises_does_not_stop_the_socket(context: Any) -> None:
    router, endpoint = transport.bind_router(context, "tcp://127.0.0.1:0")
    received: asyncio.Queue[bytes] = asyncio.Queue()
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, problem: problems.append(problem["exception"]))

    def on_message(frames: list[bytes]) -> None:
        received.put_nowait(frames[1])
        if frames[1] == b"bad":
            raise ValueError("boom")

    server = AsyncSocket(router, on_message)
    client = AsyncSocket(transport.connect_dealer(context, endpoint), lambda frames: None)
    for frame in (b"bad", b"bad", b"good"):
        await send(client, [frame])
    assert [await asyncio.wait_for(received.get(), TIMEOUT_S) for _ in range(3)] == [b"bad", b"bad", b"good"]
    assert len(problems) == 2
    client.close()
    server.close()


BACKLOG = """
import asyncio, sys, zmq
from mii_zmq import transport

async def main():
    near, far = transport.make_context(), transport.make_context()
    router, endpoint = transport.bind_router(far, "tcp://127.0.0.1:0")
    first = router
    socket = transport.connect_dealer(near, endpoint)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    received = asyncio.Queue()

    def on_message(frames):
        received.put_nowait(frames)
        if not first.closed:
            first.close(linger=30_000)
            assert monitor.poll(30_000)

    dealer = transport.AsyncSocket(socket, on_message)

    async def flood(router):
        while True:
            try:
                dealer.send([b"hello"])
                break
            except transport.PeerFull:
                await asyncio.sleep(0.001)
        peer, _ = router.recv_multipart()
        for _ in range(100):
            router.send_multipart([peer, *[b"frame"] * 7])

    await flood(router)
    await received.get()
    transport.close_context(far)
    far = transport.make_context()
    router, _ = transport.bind_router(far, endpoint)
    while not received.empty():
        received.get_nowait()
    await flood(router)
    for _ in range(100):
        assert await received.get() == [b"frame"] * 7
    dealer.close(0)
    router.close(0)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_peer_that_ends_while_its_messages_are_read() -> None:
    """Where libzmq noticed it in the middle of a message, it aborted the process after the next connection."""
    done = subprocess.run([sys.executable, "-c", BACKLOG], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def test_pair(context: Any) -> None:
    """It has no file that a killed process would leave behind."""
    bound, endpoint = transport.bind_pair(context)
    near, far = BlockingSocket(bound), BlockingSocket(transport.connect_pair(context, endpoint))
    assert endpoint.startswith("ipc://@")
    assert near.receive() is None
    assert near.receive(1) is None
    far.send([b"a", b"b"])
    assert near.receive(TIMEOUT_S * 1000) == [b"a", b"b"]
    near.close()
    far.close()


def test_a_private_message_may_be_larger_than_a_stranger_s(context: Any) -> None:
    """The plan of a step in which many long sequences start: all their tokens."""
    bound, endpoint = transport.bind_pair(context)
    near, far = BlockingSocket(bound), BlockingSocket(transport.connect_pair(context, endpoint))
    plan = [b"P", bytes(transport.MAX_FRAME_BYTES + 1)]
    near.send(plan)
    assert far.receive(10_000) == plan
    far.send(plan)
    assert near.receive(10_000) == plan
    near.close(0)
    far.close(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_other_users_cannot_take_a_pair(context: Any) -> None:
    bound, endpoint = transport.bind_pair(context)
    near = BlockingSocket(bound)
    program = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "stranger = socket.socket(socket.AF_UNIX)\n"
        "stranger.connect('\\0' + sys.argv[1].removeprefix('ipc://@'))\n"
        "assert stranger.recv(1) == b'', 'it was greeted'\n"
    )
    subprocess.run([sys.executable, "-c", program, endpoint], check=True, timeout=TIMEOUT_S)
    far = BlockingSocket(transport.connect_pair(context, endpoint))
    far.send([b"own"])
    assert near.receive(TIMEOUT_S * 1000) == [b"own"]
    near.close()
    far.close()


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_taken_endpoint(context: Any, tmp_path: Path, kind: str) -> None:
    first, endpoint = transport.bind_router(context, "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{tmp_path}/e")
    with pytest.raises(ConfigError, match="cannot listen on"):
        transport.bind_router(context, endpoint)
    first.close(linger=0)


def test_socket_file_left_by_a_killed_process_is_no_obstacle(context: Any, tmp_path: Path) -> None:
    import socket

    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "e"))
    stale.close()
    bound, endpoint = transport.bind_router(context, f"ipc://{tmp_path}/e")
    bound.close(linger=0)
    transport.remove_socket_file(endpoint)
    transport.remove_socket_file(endpoint)
    assert not (tmp_path / "e").exists()


def test_long_socket_path(context: Any) -> None:
    with pytest.raises(ConfigError, match="MII_ZMQ_RUN_DIR"):
        transport.bind_router(context, f"ipc:///tmp/{'x' * 120}")


def test_routing_ids() -> None:
    assert transport.is_own_routing_id(b"\0\1\2\3\4")
    assert not transport.is_own_routing_id(b"hello")
    assert not transport.is_own_routing_id(b"\0\1\2\3")


@pytest.mark.slow
def test_slow_peer_is_full_and_others_are_not(context: Any) -> None:
    router, endpoint = transport.bind_router(context, "tcp://127.0.0.1:0")
    slow, fast = (context.socket(zmq.DEALER) for _ in range(2))
    for dealer in (slow, fast):
        dealer.set(zmq.RCVHWM, 1)
        dealer.connect(endpoint)
        dealer.send(b"hello")
    peers = [router.recv_multipart()[0] for _ in range(2)]
    slow_id = peers[0]

    def fill() -> None:
        for _ in range(200_000):
            router.send_multipart([slow_id, bytes(4000)], zmq.DONTWAIT)

    with pytest.raises(zmq.Again):
        fill()
    router.send_multipart([peers[1], b"still works"], zmq.DONTWAIT)
    for dealer in (slow, fast, router):
        dealer.close(linger=0)
