# SPDX-License-Identifier: Apache-2.0
"""Peers that exhaust what a process has, or send what nobody should: the service goes on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from mii_zmq.config import GatewayConfig
from mii_zmq.gateway import app as gateway_app
from tests.faults.harness.baseline import ask, check_alive, resident_kb
from tests.faults.harness.expectation import expect
from tests.faults.harness.fleet import Fleet, wait_until
from tests.faults.harness.reader import Stream, read_response
from tests.gateway.fake_client import FakeClient
from tests.stack import PATIENCE_S, http

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GREETING = bytes.fromhex("ff00000000000000017f") + bytes((3, 0)) + b"NULL" + bytes(16) + bytes(1) + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


@contextlib.contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(count)]


def test_noise_on_every_port(fleet: Fleet, rng: random.Random) -> None:
    """Row 32: HTTP, TLS, random bytes, and random frames behind a right handshake, while a stream runs."""
    stream = Stream(fleet.url(), "row 32", 300)
    ports = [port_of(e) for e in (*fleet.client_endpoints, *fleet.worker_endpoints, fleet.url())]
    for index in range(300):
        with socket.create_connection(("127.0.0.1", rng.choice(ports)), 10) as peer, contextlib.suppress(OSError):
            peer.settimeout(0.05)
            start = rng.choice([b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", GREETING, GREETING + READY])
            peer.sendall(start + rng.randbytes(rng.choice([0, 1, 10, 100, 1000])))
            if index % 10 == 0:
                peer.recv(100)
    stream.end()
    assert (stream.error, stream.text) == (None, expect("row 32", max_new_tokens=300, ignore_eos=True).text)


@pytest.mark.long
@pytest.mark.xfail(strict=True, reason="no guard in front of the ROUTER: an unfinished message grows without bound")
def test_a_message_that_never_ends_does_not_take_all_memory(fleet: Fleet) -> None:
    """Row 30: frames of half a MiB with the mark that more follow, for ever."""
    pid = fleet.pids()["broker 1"]
    before_kb = resident_kb(pid)
    frame = b"\x03" + (2**19).to_bytes(8, "big") + bytes(2**19)
    try:
        with socket.create_connection(("127.0.0.1", port_of(fleet.client_endpoints[0])), 10) as peer:
            peer.settimeout(10)
            peer.sendall(GREETING + READY)
            with contextlib.suppress(OSError):
                for _ in range(400):
                    peer.sendall(frame)
            check_alive(fleet)
            assert resident_kb(pid) - before_kb < 64 * 1024
    finally:
        fleet.kill("broker 1")


@pytest.mark.long
@pytest.mark.parametrize("victim", ["broker 1", "gateway 1"])
def test_too_many_connections(new_fleet: Callable[..., Fleet], victim: str) -> None:
    """Row 34: with few descriptors and many idle strangers, those who are connected are served; then all goes on."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=2", groups=1)
    stream = Stream(fleet.url(), "row 34", 3000)
    stream.wait_for(3)
    resource.prlimit(fleet.pids()[victim], resource.RLIMIT_NOFILE, (128, 128))
    port = port_of(fleet.client_endpoints[0] if victim == "broker 1" else fleet.url())
    with connections(port, 300):
        count = len(stream.texts)
        stream.wait_for(min(2000, count + 100))
        assert fleet.is_alive(victim)
    stream.end()
    assert (stream.error, stream.text) == (None, expect("row 34", max_new_tokens=3000, ignore_eos=True).text)
    wait_until(lambda: http(fleet.url() + "/health/ready")[0] == 200, "it is ready again")
    check_alive(fleet)


@pytest.mark.long
@pytest.mark.parametrize("output", ["standard error", "standard output"])
def test_a_full_disk_under_the_logs(new_fleet: Callable[..., Fleet], output: str) -> None:
    """Row 49: every line fails with ENOSPC; requests do not."""
    fleet = new_fleet(**{"error_path" if output == "standard error" else "output_path": Path("/dev/full")})
    fleet.add_broker()
    fleet.add_gateway(wait=False)
    fleet.add_group("group 1", "fake:step_ms=1")
    fleet.revive()
    assert ask(fleet, "full", 20) == expect("full", max_new_tokens=20, ignore_eos=True).text
    assert http(fleet.url() + "/mii/nobody", {"prompts": "x"})[0] == 404
    fleet.restart("group 1")
    fleet.revive()
    check_alive(fleet)


def test_a_body_in_a_hundred_thousand_chunks(fleet: Fleet) -> None:
    """Row 65: slow for its sender, not for the others."""
    pid = fleet.pids()["gateway 1"]
    before_kb = resident_kb(pid)
    body = b'{"prompts": "%b", "max_new_tokens": 1}' % (b"x" * 100_000)
    chunks = b"".join(b"1\r\n" + body[i : i + 1] + b"\r\n" for i in range(len(body))) + b"0\r\n\r\n"
    head = b"POST /mii/m HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port_of(fleet.url())), 60) as peer:
        peer.sendall(head)
        half = len(chunks) // 2
        peer.sendall(chunks[:half])
        check_alive(fleet)
        peer.sendall(chunks[half:])
        status, _, answer = read_response(peer)
    assert status == 400, answer
    assert b"100000" in answer
    assert resident_kb(pid) - before_kb < 20_000


@pytest.mark.parametrize("sent", [b"", b"POST /mii/m HT", b"POST /mii/m HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"idle"])
async def test_slow_and_idle_connections_are_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 64: nothing, half a request line, half a header, and a kept connection after an answer."""
    monkeypatch.setattr(gateway_app, "KEEPALIVE_TIMEOUT_S", 0.4)
    listener = gateway_app.listen("127.0.0.1", 0)
    runner = gateway_app.make_runner(gateway_app.make_app(GatewayConfig(port=0), FakeClient()))  # type: ignore[arg-type]
    await runner.setup()
    await web.SockSite(runner, listener).start()
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n" if sent == b"idle" else sent)
        await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()
        await runner.cleanup()
