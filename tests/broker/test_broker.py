# SPDX-License-Identifier: Apache-2.0
"""The broker on real sockets: plain, REQ and batching clients, lost workers, slow and hostile peers."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mii_zmq.errors import ConfigError
from mii_zmq.protocol import NO_ID, TAG, Message, TokenDelta, Verb, decode, encode, iterate_tokens, new_request_id
from tests.broker.peers import BODY, TIMEOUT_S, Site, open_site, request_socket

pytestmark = pytest.mark.slow


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with open_site(tmp_path) as site:
        yield site


def row(request_id: bytes, seq: int, text: str = "x") -> TokenDelta:
    return TokenDelta(request_id, seq, seq, bytes(4), text.encode(), None)


async def stream_works(site: Site, worker: Any) -> None:
    """One whole request over a fresh connection."""
    client = site.client()
    request_id = await client.generate()
    assert (await client.receive()).verb is Verb.ACCEPTED
    message = await worker.wait_for(Verb.GENERATE)
    await worker.emit(message.header["client"], row(request_id, 0, "é"))
    await worker.finish(request_id)
    tokens = await client.receive()
    assert [d.text.decode() for d in iterate_tokens(tokens)] == ["é"]
    assert (await client.receive()).verb is Verb.FINAL


async def test_plain_dealer_streams(site: Site) -> None:
    worker = site.worker()
    await worker.register()
    await stream_works(site, worker)


async def test_batching_client_gets_the_rows_of_a_step_in_one_message(site: Site) -> None:
    worker, client = site.worker(), site.client()
    await worker.register()
    await client.send(Verb.HELLO, header={"batch": True, "name": "test"})
    assert (await client.receive()).header["deployments"] == ["m"]
    first, second = await client.generate(), await client.generate()
    number = (await worker.wait_for(Verb.GENERATE)).header["client"]
    await worker.wait_for(Verb.GENERATE)
    await worker.emit(number, row(first, 0, "a"), row(second, 0, "b"))
    message = await client.wait_for(Verb.TOKENS)
    assert [(d.request_id, d.text) for d in iterate_tokens(message)] == [(first, b"a"), (second, b"b")]


async def test_req_socket_gets_one_reply(site: Site) -> None:
    worker = site.worker()
    await worker.register()

    def ask(stream: bool) -> Message:
        plain = request_socket(site.context, site.broker.client_endpoint)
        try:
            header = {"deployment": "m", "stream": stream}
            plain.send_multipart(encode(Verb.GENERATE, new_request_id(), header, BODY))
            return decode(plain.recv_multipart())
        finally:
            plain.close()

    assert (await asyncio.to_thread(ask, True)).verb is Verb.ERROR
    reply = asyncio.create_task(asyncio.to_thread(ask, False))
    message = await worker.wait_for(Verb.GENERATE)
    await worker.finish(message.request_id, "text")
    assert (await reply).verb is Verb.FINAL


async def test_worker_that_closes_before_the_first_token_loses_nothing(site: Site) -> None:
    first, second, client = site.worker("a"), site.worker("b"), site.client()
    await first.register(max_requests=1)
    streamed = await client.generate()
    await first.wait_for(Verb.GENERATE)
    whole = await client.generate(stream=False)
    await second.register()
    assert (await second.wait_for(Verb.GENERATE)).request_id == whole
    first.close()
    retried = await second.wait_for(Verb.GENERATE)
    assert retried.request_id == streamed
    assert retried.header["attempt"] == 1
    for request_id in (streamed, whole):
        await second.finish(request_id)
    assert {(await client.wait_for(Verb.FINAL)).request_id for _ in range(2)} == {streamed, whole}


async def test_worker_that_falls_silent_is_replaced_and_fenced(tmp_path: Path) -> None:
    async with open_site(tmp_path, heartbeat_ms=100, liveness=10) as site:
        first, second, client = site.worker("a"), site.worker("b"), site.client()
        await first.register()
        request_id = await client.generate()
        await first.wait_for(Verb.GENERATE)
        await second.register()
        beating = asyncio.create_task(beat(second))
        try:
            assert (await second.wait_for(Verb.GENERATE)).request_id == request_id
            await first.emit(1, row(request_id, 0))
            await first.wait_for(Verb.DISCONNECT)
            await first.register(in_flight=[request_id])
            assert (await first.wait_for(Verb.CANCEL)).request_id == request_id
            await second.finish(request_id)
            assert (await client.wait_for(Verb.FINAL)).request_id == request_id
        finally:
            beating.cancel()


async def beat(worker: Any) -> None:
    while True:
        await worker.heartbeat()
        await asyncio.sleep(0.05)


async def test_client_that_vanishes_mid_stream_is_cancelled(site: Site) -> None:
    worker, client = site.worker(), site.client()
    await worker.register()
    request_id = await client.generate()
    number = (await worker.wait_for(Verb.GENERATE)).header["client"]
    client.close()
    for seq in range(10_000):
        await worker.emit(number, row(request_id, seq))
        await asyncio.sleep(0.002)
        if site.broker.state.num_unfinished == 0:
            break
    assert (await worker.wait_for(Verb.CANCEL)).request_id == request_id
    assert not site.broker.state.clients.by_address


async def test_slow_client_is_given_up_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mii_zmq.broker.outbox.MAX_BACKLOG_BYTES", 2**20)
    async with open_site(tmp_path) as site:
        worker = site.worker()
        await worker.register()
        slow = request_dealer(site)
        request_id = new_request_id()
        await asyncio.to_thread(
            slow.send_multipart, encode(Verb.GENERATE, request_id, {"deployment": "m", "stream": True})
        )
        number = (await worker.wait_for(Verb.GENERATE)).header["client"]
        text = "x" * 2000
        for first in range(0, 100_000, 50):
            # A plain client gets a message for each row.
            await worker.emit(number, *(row(request_id, seq, text) for seq in range(first, first + 50)))
            await asyncio.sleep(0)
            if site.broker.state.num_unfinished == 0:
                break
        assert (await worker.wait_for(Verb.CANCEL)).request_id == request_id
        site.broker._tick()
        assert site.broker.state.counters.slow_peers == 1
        await stream_works(site, worker)
        slow.close()


def request_dealer(site: Site) -> Any:
    """A DEALER that takes one message into its queue and never reads it."""
    import zmq

    dealer = site.context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 0)
    dealer.set(zmq.RCVHWM, 1)
    dealer.set(zmq.RCVBUF, 4096)
    dealer.connect(site.broker.client_endpoint)
    return dealer


async def test_hostile_messages_leave_it_working(site: Site) -> None:
    worker, stranger = site.worker(), site.client()
    await worker.register()
    noise = random.Random(1)
    sane = encode(Verb.GENERATE, new_request_id(), {"deployment": "m"}, BODY)
    for _ in range(300):
        frames = list(sane)
        for _ in range(noise.randint(1, 3)):
            frames[noise.randrange(len(frames))] = noise.randbytes(noise.choice((0, 1, 6, 16, 40)))
        frames = frames[: noise.randint(1, 8)] + [b""] * noise.choice((0, 0, 3, 20))
        await stranger.send_frames(frames)
    for frames in ([b"\0"] * 7, sane, [TAG, b"\x20", NO_ID, b"\x80", b"\x80"]):
        await site.worker().send_frames(frames)
    fresh = new_request_id()
    await stranger.send_frames([b"MIIZ\x02\x00", sane[1], fresh, *sane[3:]])
    while True:
        error = await stranger.wait_for(Verb.ERROR)
        if "supported: 1.x" in error.header["message"]:
            break
    assert error.request_id == fresh
    await stream_works(site, worker)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", os.urandom(512)]
)
async def test_other_protocols_on_the_port(site: Site, data: bytes) -> None:
    worker = site.worker()
    await worker.register()
    host, port = site.broker.client_endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(data)
        await stream_works(site, worker)


async def test_bug_in_the_state_ends_one_message_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, client = site.worker(), site.client()
    await worker.register()

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setitem(site.broker.state.clients._verbs, Verb.STATUS, fail)
    await client.send(Verb.STATUS, b"s" * 16)
    error = await client.receive()
    assert (error.request_id, error.header["code"]) == (b"s" * 16, "internal")
    await stream_works(site, worker)


async def test_unroutable_garbage_gets_an_answer(site: Site) -> None:
    client = site.client()
    await client.send_frames([TAG])
    error = await client.receive()
    assert (error.verb, error.request_id, error.header["code"]) == (Verb.ERROR, NO_ID, "protocol")


async def test_drain_waits_for_what_was_accepted(site: Site) -> None:
    worker, client = site.worker(), site.client()
    await worker.register()
    request_id = await client.generate()
    await worker.wait_for(Verb.GENERATE)
    draining = asyncio.create_task(site.broker.drain(asyncio.Event()))
    await asyncio.sleep(0)
    await client.generate()
    assert (await client.wait_for(Verb.ERROR)).header["code"] == "draining"
    assert not draining.done()
    await worker.finish(request_id)
    await asyncio.wait_for(draining, TIMEOUT_S)
    assert (await client.wait_for(Verb.FINAL)).request_id == request_id


async def test_last_answers_can_be_read_before_the_connection_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mii_zmq.broker.broker.FAREWELL_S", 3600.0)
    worker, client, stop_now = site.worker(), site.client(), asyncio.Event()
    await worker.register()
    request_id = await client.generate()
    await worker.wait_for(Verb.GENERATE)
    draining = asyncio.create_task(site.broker.drain(stop_now))
    await worker.finish(request_id)
    assert (await client.wait_for(Verb.FINAL)).request_id == request_id
    while not site.broker.state.is_finished:
        await asyncio.sleep(0)
    done, _ = await asyncio.wait([draining], timeout=0.1)
    assert not done
    stop_now.set()
    await asyncio.wait_for(draining, TIMEOUT_S)


async def test_endpoint_in_use(site: Site, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another process does"):
        async with open_site(tmp_path):
            pass
