# SPDX-License-Identifier: Apache-2.0
"""A broker on real sockets, and scripted clients and workers that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import zmq

from mii_zmq import transport
from mii_zmq.broker.broker import Broker
from mii_zmq.config import BrokerConfig
from mii_zmq.protocol import (
    NO_ID,
    FinalBody,
    FinalHeader,
    GenerateHeader,
    Load,
    Message,
    Ready,
    TokenDelta,
    TokenRows,
    Verb,
    WorkerHeartbeat,
    decode,
    encode,
    new_request_id,
)

TIMEOUT_S = 30.0
BODY = {"prompt": "x"}


class Peer:
    """A DEALER whose messages are read one by one."""

    def __init__(self, context: Any, endpoint: str) -> None:
        self.socket = transport.connect_dealer(context, endpoint)
        self.inbox: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.channel = transport.AsyncSocket(self.socket, self.inbox.put_nowait)

    async def send(self, verb: Verb, request_id: bytes = NO_ID, header: Any = None, **more: Any) -> None:
        await self.send_frames(encode(verb, request_id, header, **more))

    async def send_frames(self, frames: Sequence[bytes]) -> None:
        """Waits for the connection: a DEALER with IMMEDIATE takes nothing before."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    self.channel.send(frames)
                    return
                except transport.PeerFull:
                    await asyncio.sleep(0.005)

    async def receive(self) -> Message:
        frames = await asyncio.wait_for(self.inbox.get(), TIMEOUT_S)
        return decode(frames if frames[0] else frames[1:])

    async def wait_for(self, verb: Verb) -> Message:
        """The next message of this verb; others are passed over."""
        while True:
            message = await self.receive()
            if message.verb is verb:
                return message

    def close(self) -> None:
        self.channel.close(linger_ms=0)


class Client(Peer):
    async def generate(self, *, stream: bool = True, deployment: str = "m", **header: Any) -> bytes:
        request_id = new_request_id()
        values = GenerateHeader(deployment=deployment, stream=stream, **header)
        await self.send(Verb.GENERATE, request_id, values, body=BODY)
        return request_id


class Worker(Peer):
    def __init__(self, context: Any, endpoint: str, group: str = "g") -> None:
        super().__init__(context, endpoint)
        self.group = group
        self.incarnation = new_request_id()

    async def register(self, deployment: str = "m", max_requests: int = 64, **more: Any) -> None:
        ready = Ready(
            group=self.group,
            incarnation=self.incarnation,
            deployment=deployment,
            max_requests=max_requests,
            max_model_len=2048,
            **more,
        )
        await self.send(Verb.READY, header=ready)
        await self.wait_for(Verb.REGISTERED)

    async def heartbeat(self) -> None:
        header = WorkerHeartbeat(incarnation=self.incarnation, state="ready", load=Load())
        await self.send(Verb.HEARTBEAT, header=header)

    async def emit(self, client: int, *rows: TokenDelta) -> None:
        builder = TokenRows()
        for row in rows:
            builder.add(row)
        await self.send_frames(builder.to_frames(client))

    async def finish(self, request_id: bytes, text: str | None = None) -> None:
        body = FinalBody(finish_reason="stop", prompt_length=1, generated_length=1, text=text)
        await self.send(Verb.FINAL, request_id, FinalHeader(finish_reason="stop"), body=body)


class Site:
    """A broker in this process, and the peers of one test."""

    def __init__(self, broker: Broker, context: Any) -> None:
        self.broker = broker
        self.context = context
        self._peers: list[Peer] = []

    def client(self) -> Client:
        self._peers.append(client := Client(self.context, self.broker.client_endpoint))
        return client

    def worker(self, group: str = "g") -> Worker:
        self._peers.append(worker := Worker(self.context, self.broker.worker_endpoint, group))
        return worker

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


@contextlib.asynccontextmanager
async def open_site(run_dir: Path, **settings: Any) -> AsyncIterator[Site]:
    """TCP for clients, ipc for workers. A peer is lost by its silence only where `liveness` is the subject: scripted
    workers send no heartbeats, and a slow machine stalls for longer than any quick test could wait."""
    context = transport.make_context()
    endpoints = {"client_endpoint": "tcp://127.0.0.1:0", "worker_endpoint": f"ipc://{run_dir}/w"}
    with contextlib.ExitStack() as at_end:
        at_end.callback(transport.close_context, context)
        broker = Broker(BrokerConfig(**{"heartbeat_ms": 100, "liveness": 600, **endpoints, **settings}), context)
        at_end.callback(broker.close)
        site = Site(broker, context)
        at_end.callback(site.close)
        yield site


def request_socket(context: Any, endpoint: str) -> Any:
    """A plain REQ socket, as any ZeroMQ binding has it."""
    socket = context.socket(zmq.REQ)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
    socket.connect(endpoint)
    return socket
