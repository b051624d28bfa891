# SPDX-License-Identifier: Apache-2.0
"""A worker group's connection to a broker that is played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mii_zmq import transport
from mii_zmq.protocol import NO_ID, Message, Ready, Registered, Verb, WorkerHeartbeat, decode, encode
from mii_zmq.worker.broker_link import BrokerLink

PATIENCE_S = 30
ID = bytes(range(16))


class Broker:
    """A link of an idle group, and the broker at its other end."""

    def __init__(self) -> None:
        self.context = transport.make_context()
        socket, endpoint = transport.bind_router(self.context, "tcp://127.0.0.1:0")
        self.inbox: asyncio.Queue[tuple[bytes, Message]] = asyncio.Queue()
        self.socket = transport.AsyncSocket(
            socket, lambda frames: self.inbox.put_nowait((frames[0], decode(frames[1:])))
        )
        self.given: list[Message] = []
        self.link = BrokerLink(self.context, endpoint, 0, self, lambda link, message: self.given.append(message))

    def _on_frames(self, frames: list[bytes]) -> None:
        self.inbox.put_nowait((frames[0], decode(frames[1:])))

    def ready(self, link: int) -> Ready:
        return Ready(group="g", incarnation=bytes(16), deployment="d", max_requests=1, max_model_len=1)

    def heartbeat(self) -> WorkerHeartbeat | None:
        return None

    async def take(self, verb: Verb) -> tuple[bytes, Message]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                peer, message = await self.inbox.get()
                if message.verb is verb:
                    return peer, message


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    made = Broker()
    yield made
    made.link.close("test over")
    made.socket.close(linger_ms=0)
    transport.close_context(made.context)


@pytest.mark.parametrize("position", [0, 2, 3])
async def test_a_request_that_cannot_be_read_is_answered(broker: Broker, position: int) -> None:
    peer, _ = await broker.take(Verb.READY)
    registered = Registered(epoch=bytes(16), heartbeat_ms=60_000, liveness=9)
    broker.socket.send([peer, *encode(Verb.REGISTERED, header=registered)])
    frames = encode(Verb.GENERATE, ID, {"deployment": "d"})
    frames[position] = b"\xc1"
    broker.socket.send([peer, *frames])
    _, answer = await broker.take(Verb.ERROR)
    assert (answer.request_id, answer.header["code"]) == (NO_ID if position == 2 else ID, "protocol")
    broker.socket.send([peer, *encode(Verb.CANCEL, ID)])
    while not broker.given:
        await asyncio.sleep(0.001)
    assert [message.verb for message in broker.given] == [Verb.CANCEL]
