# SPDX-License-Identifier: Apache-2.0
"""Gateways that die or leave, and clients that vanish, do not read, or repeat themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mii_zmq import transport
from mii_zmq.protocol import GenerateHeader, Hello, Message, Verb, iterate_tokens, new_request_id
from tests.broker.peers import Client
from tests.faults.harness.baseline import GREEDY, ask, metric, resident_kb
from tests.faults.harness.expectation import expect
from tests.faults.harness.fault_proxy import FaultProxy
from tests.faults.harness.fleet import Fleet, is_running, wait_until
from tests.faults.harness.reader import Stream, open_post, read_response
from tests.stack import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WRITE_TIMEOUT_S = 30.0
"""Of the gateway."""


def text_of(prompt: str, num_tokens: int) -> str:
    return expect(prompt, max_new_tokens=num_tokens, ignore_eos=True).text


def running(fleet: Fleet) -> int:
    return sum(int(group["load"].get("running", 0)) for group in fleet.groups_status().values())


def generated(fleet: Fleet) -> int:
    """Tokens so far, of all groups."""
    return sum(int(group["load"].get("generated_tokens", 0)) for group in fleet.groups_status().values())


def used_blocks(fleet: Fleet) -> int:
    return sum(int(group["load"].get("used_blocks", 0)) for group in fleet.groups_status().values())


def test_a_killed_gateway_has_its_requests_cancelled(fleet: Fleet) -> None:
    """Row 14: its clients see a broken connection."""
    streams = [Stream(fleet.url(), f"row 14 {index}", 8000) for index in range(4)]
    for stream in streams:
        stream.wait_for(3)
    wait_until(lambda: used_blocks(fleet) > 0, "the streams run")
    fleet.kill("gateway 1")
    # Uncancelled, they would take half a minute.
    seconds = wait_until(lambda: used_blocks(fleet) == 0, "all blocks are free", 15.0)
    print(f"all blocks were free {seconds:.2f} s after the kill")
    assert all(stream.end().is_broken for stream in streams)


def accepts(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 10).close()
    except OSError:
        return False
    return True


def test_a_gateway_that_is_told_to_end_finishes_its_streams(fleet: Fleet) -> None:
    """Row 15."""
    streams = [Stream(fleet.url(), f"row 15 {index}", 800) for index in range(5)]
    for stream in streams:
        stream.wait_for(3)
    idle = socket.create_connection(("127.0.0.1", int(fleet.url().rpartition(":")[2])), 10)
    idle.sendall(b"GET /health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
    assert read_response(idle)[0] == 200
    child = fleet.members["gateway 1"].child
    assert child is not None
    child.process.send_signal(signal.SIGTERM)
    # Nobody is told no: a new connection is not made, an unused one is closed.
    wait_until(lambda: not accepts(fleet.url()), "it takes no new connections")
    idle.settimeout(PATIENCE_S)
    assert idle.recv(1) == b""
    idle.close()
    assert all(stream.is_alive() for stream in streams)
    for index, stream in enumerate(streams):
        stream.end()
        assert (stream.error, stream.is_done, stream.text) == (None, True, text_of(f"row 15 {index}", 800))
    assert child.process.wait(PATIENCE_S) == 0


@pytest.mark.long
def test_a_stopped_gateway_costs_its_clients_time_only(fleet: Fleet) -> None:
    """Row 14, for a gateway that comes back: what it missed is made up for."""
    streams = [Stream(fleet.url(), f"stop {index}", 1200) for index in range(4)]
    for stream in streams:
        stream.wait_for(3)
    pid = fleet.pids()["gateway 1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: fleet.status()["num_unfinished"] == 0, "its requests have ended", 3.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    for index, stream in enumerate(streams):
        stream.end()
        assert (stream.error, stream.text) == (None, text_of(f"stop {index}", 1200))


@pytest.mark.long
@pytest.mark.parametrize("bytes_per_s", [1, 0])
def test_a_reader_that_hardly_reads(new_fleet: Callable[..., Fleet], bytes_per_s: int) -> None:
    """Rows 18 and 19: one byte a second, or none; the others feel nothing, memory stays, and the reader is cut."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=0,num_blocks=4096", groups=1)
    pid = fleet.pids()["gateway 1"]
    with FaultProxy(fleet.url()) as proxy:
        proxy.to_client.bytes_per_s = bytes_per_s or None
        proxy.to_client.is_paused = not bytes_per_s
        body = {"prompts": ["slow"], "n": 16, "stream": True, "max_new_tokens": 8000, **GREEDY}
        peer = open_post(proxy.url, "/mii/m", body, receive_buffer=4096)
        wait_until(lambda: metric(fleet.url(), "mii_gateway_requests_in_flight") == 1, "it runs")
        before_kb = resident_kb(pid)
        started = time.monotonic()
        while metric(fleet.url(), "mii_gateway_slow_readers_total") == 0:
            assert ask(fleet, "others", 50) == text_of("others", 50)
            assert time.monotonic() - started < WRITE_TIMEOUT_S + 20
            assert resident_kb(pid) - before_kb < 60_000
            time.sleep(0.2)
        peer.close()
    wait_until(lambda: used_blocks(fleet) == 0, "its blocks are free")


@pytest.fixture
async def plain(fleet: Fleet) -> AsyncIterator[Client]:
    """A DEALER that talks to the broker of the shared fleet."""
    context: Any = transport.make_context()
    client = Client(context, fleet.client_endpoints[0])
    yield client
    client.close()
    transport.close_context(context)


async def begin(client: Client, prompt: str, num_tokens: int, **header: Any) -> bytes:
    request_id = header.pop("request_id", None) or new_request_id()
    body = {"prompt": prompt, "params": {"max_new_tokens": num_tokens, **GREEDY}}
    values = GenerateHeader(deployment="m", stream=True, **header)
    await client.send(Verb.GENERATE, request_id, values, body=body)
    return request_id


async def next_output(client: Client, timeout_s: float) -> Message | None:
    """The next message that is no heartbeat, or None; sends heartbeats meanwhile."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        await client.send(Verb.HEARTBEAT)
        with contextlib.suppress(TimeoutError):
            message = await asyncio.wait_for(client.receive(), 0.05)
            if message.verb is not Verb.HEARTBEAT:
                return message
    return None


async def test_a_client_gets_no_more_than_it_granted(fleet: Fleet, plain: Client) -> None:
    """Row 20: at most as many messages as were granted; merged when more is granted; nothing lost."""
    before = await asyncio.to_thread(generated, fleet)

    def is_drawn() -> bool:
        # A report of before it began says that nothing runs, too.
        return generated(fleet) >= before + 100 and not running(fleet)

    await plain.send(Verb.HELLO, header=Hello(name="careful", credit=3))
    await plain.wait_for(Verb.WELCOME)
    request_id = await begin(plain, "row 20", 100)
    text, num_messages, granted = b"", 0, 3
    while True:
        message = await next_output(plain, 0.3)
        if message is None:
            # The rest is merged once all of it has been drawn.
            if num_messages < granted or not await asyncio.to_thread(is_drawn):
                continue
            granted += 2
            await plain.send(Verb.CREDIT, request_id, {"credit": 2})
            continue
        if message.verb is Verb.TOKENS:
            num_messages += 1
            assert num_messages <= granted
            text += b"".join(delta.text for delta in iterate_tokens(message))
        elif message.verb in (Verb.FINAL, Verb.ERROR):
            assert message.verb is Verb.FINAL, message.header
            break
    await plain.send(Verb.DISCONNECT)
    assert text.decode() == text_of("row 20", 100)
    assert num_messages <= 7, "what waited for credit was not merged"


@pytest.mark.parametrize("when", ["before it is read", "at the prompt", "while it writes", "while it waits"])
def test_a_client_that_leaves_frees_its_blocks_at_once(fleet: Fleet, when: str) -> None:
    """Row 21. Nothing is ever written to the one who waits for a whole answer, so no write can fail."""
    prompt = "x" * 7000 if when == "at the prompt" else "leave"
    body = {"prompts": prompt, "stream": when != "while it waits", "max_new_tokens": 1000, **GREEDY}
    before = fleet.status()["counters"]["cancelled"]
    peer = open_post(fleet.url(), "/mii/m", body)
    if when == "while it writes":
        peer.recv(1024)
    elif when == "while it waits":
        wait_until(lambda: used_blocks(fleet) > 0, "it runs")
    elif when == "at the prompt":
        wait_until(lambda: fleet.status()["num_unfinished"] > 0, "it is there", poll_s=0.001)
    peer.shutdown(socket.SHUT_RDWR)
    peer.close()
    seconds = wait_until(lambda: metric(fleet.url(), "mii_gateway_requests_in_flight") == 0, "the gateway knows")
    seconds += wait_until(lambda: fleet.status()["num_unfinished"] == 0, "the broker knows")
    wait_until(lambda: used_blocks(fleet) == 0, "the blocks are free")
    print(f"gateway and broker had forgotten it after {seconds:.3f} s")
    if when != "before it is read":
        assert fleet.status()["counters"]["cancelled"] == before + 1, "it was computed to its end for nobody"


async def test_cancel_may_be_repeated(fleet: Fleet, plain: Client) -> None:
    """Row 47: twice, of unknown ids, after the end; one terminal message, and the connection works on."""
    request_id = await begin(plain, "row 47", 5000)
    await plain.wait_for(Verb.TOKENS)
    for _ in range(3):
        await plain.send(Verb.CANCEL, request_id)
        await plain.send(Verb.CANCEL, new_request_id())
    error = await plain.wait_for(Verb.ERROR)
    assert (error.request_id, error.header["code"]) == (request_id, "cancelled")
    short = await begin(plain, "short", 3)
    terminals: list[Message] = []
    while not terminals:
        message = await plain.receive()
        assert message.request_id == short, f"{message.verb.name} for a request that has ended"
        if message.verb in (Verb.FINAL, Verb.ERROR):
            terminals.append(message)
    await plain.send(Verb.CANCEL, short)
    await begin(plain, "short", 3)
    assert (await plain.wait_for(Verb.FINAL)).header["finish_reason"] == "length"


async def test_the_same_id_twice_runs_once(fleet: Fleet, plain: Client) -> None:
    """Row 48: refused on the same connection; taken over by another one, which gets exactly what was missing."""
    request_id = await begin(plain, "row 48", 1000)
    first = b""
    while len(first) < 20:
        message = await plain.wait_for(Verb.TOKENS)
        first += b"".join(delta.text for delta in iterate_tokens(message))
    await begin(plain, "row 48", 1000, request_id=request_id)
    while (message := await plain.receive()).verb is not Verb.ERROR:
        first += b"".join(delta.text for delta in iterate_tokens(message))
    assert message.header["param"] == "request_id"
    context: Any = transport.make_context()
    other = Client(context, fleet.client_endpoints[0])
    try:
        body = {"prompt": "row 48", "params": {"max_new_tokens": 1000, **GREEDY}}
        header = {"deployment": "m", "stream": True}
        await other.send(Verb.GENERATE, request_id, header, body=body, raw=(array("i", list(first)).tobytes(),))
        second = b""
        while (message := await other.receive()).verb is not Verb.FINAL:
            assert message.verb is not Verb.ERROR, message.header
            if message.verb is Verb.TOKENS:
                second += b"".join(delta.text for delta in iterate_tokens(message))
        assert (first + second).decode() == text_of("row 48", 1000)
        while (message := await plain.receive()).verb is not Verb.ERROR:
            assert message.verb is Verb.TOKENS
        assert message.header["code"] == "cancelled"
    finally:
        other.close()
        transport.close_context(context)


@pytest.mark.long
def test_half_an_answer_is_never_taken_for_a_whole_one(fleet: Fleet) -> None:
    """Row 14, the client's view: a body that was cut off cannot be mistaken for a complete one."""
    with FaultProxy(fleet.url()) as proxy:
        proxy.to_client.cut_after = 600
        peer = open_post(proxy.url, "/mii/m", {"prompts": "cut", "max_new_tokens": 800, **GREEDY})
        _, headers, body = read_response(peer)
        assert len(body) < int(headers["content-length"])
        peer.close()


def test_everything_listens_on_loopback_only(fleet: Fleet) -> None:
    """Row 66: with default settings, every listening socket of every process."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as lines:
            for line in list(lines)[1:]:
                words = line.split()
                if words[3] == "0A":
                    inodes[words[9]] = words[1]
    num_found = 0
    for pid in fleet.pids().values():
        assert is_running(pid)
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            address = inodes.get(target.removeprefix("socket:[").removesuffix("]"))
            if address is not None:
                num_found += 1
                assert address.startswith(("0100007F:", "00000000000000000000000001000000:")), address
    assert num_found == 3
