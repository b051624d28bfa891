# SPDX-License-Identifier: Apache-2.0
"""A broker of which the test decides every move, and the worker process that talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from mii_zmq import transport
from mii_zmq.process import Child, spawn
from mii_zmq.protocol import (
    GenerateBody,
    Message,
    Registered,
    TokenDelta,
    Verb,
    decode,
    encode,
    iterate_tokens,
)

PATIENCE_S = 110.0
"""A process that imports torch beside other tests has taken a minute; a test's own limit is two."""


class ScriptedBroker:
    """A ROUTER. Answers READY with REGISTERED and HEARTBEAT with HEARTBEAT unless told otherwise.

    Groups report every 50 ms. They take its silence for its end only after a time that no stall of a slow machine
    lasts; a test whose subject that is makes `liveness` small.
    """

    def __init__(
        self, context: Any, endpoint: str = "tcp://127.0.0.1:0", *, heartbeat_ms: int = 50, liveness: int = 600
    ) -> None:
        socket, self.endpoint = transport.bind_router(context, endpoint)
        self.epoch = bytes(16)
        self.registers = True
        self.answers_heartbeats = True
        self.heartbeat_ms = heartbeat_ms
        self.liveness = liveness
        self.peer = b""
        self.heartbeats: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        """Everything but heartbeats."""
        self._has_registered = False
        self._socket = transport.AsyncSocket(socket, self._on_frames)

    def send(
        self, verb: Verb, request_id: bytes = bytes(16), header: Any = None, body: Any = b"\x80", *raw: bytes
    ) -> None:
        self._socket.send([self.peer, *encode(verb, request_id, header, body, raw)])

    def generate(self, number: int, prompt: str = "hello", *, resume: bytes = b"", **more: Any) -> bytes:
        request_id = number.to_bytes(16, "big")
        fields = {name: more.pop(name) for name in ("stream", "client", "deadline_ms") if name in more}
        header = {"deployment": "d", "stream": True, **fields}
        self.send(
            Verb.GENERATE, request_id, header, GenerateBody(prompt=prompt, params=more), *([resume] if resume else [])
        )
        return request_id

    async def take(self, verb: Verb) -> Message:
        """The next message, which must be of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            message = await self.messages.get()
        assert message.verb is verb, message
        return message

    async def skip_to(self, verb: Verb) -> Message:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.messages.get()
                if message.verb is verb:
                    return message

    async def collect(self, request_id: bytes) -> tuple[list[TokenDelta], Message]:
        """All rows of one request and its terminal message; other requests' messages are dropped."""
        deltas: list[TokenDelta] = []
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.messages.get()
                if message.verb is Verb.TOKENS:
                    deltas += [delta for delta in iterate_tokens(message) if delta.request_id == request_id]
                elif message.request_id == request_id:
                    return deltas, message

    async def heartbeat_with(self, **load: Any) -> dict[str, Any]:
        """Wait for a heartbeat whose load has these values (0 where it names none)."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                heartbeat = await self.heartbeats.get()
                if all(heartbeat["load"].get(name, 0) == value for name, value in load.items()):
                    return heartbeat

    def close(self) -> None:
        self._socket.close(linger_ms=0)

    def _on_frames(self, frames: list[bytes]) -> None:
        self.peer, message = frames[0], decode(frames[1:])
        if message.verb is Verb.HEARTBEAT:
            self.heartbeats.put_nowait(message.header)
            if self.answers_heartbeats and not self._has_registered:
                self.send(Verb.DISCONNECT, header={"reason": "not registered"})
            elif self.answers_heartbeats:
                self.send(Verb.HEARTBEAT, header={"epoch": self.epoch})
            return
        self.messages.put_nowait(message)
        if message.verb is Verb.READY and self.registers:
            self._has_registered = True
            header = Registered(epoch=self.epoch, heartbeat_ms=self.heartbeat_ms, liveness=self.liveness)
            self.send(Verb.REGISTERED, header=header)


@dataclass
class Stage:
    """A worker process, the broker that it registered with, and what READY said."""

    worker: Child
    broker: ScriptedBroker
    context: Any
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def engine_pid(self) -> int:
        pid: int = self.ready["info"]["engine_pid"]
        return pid

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.to_thread(self.worker.process.wait)

    def terminate(self) -> None:
        self.worker.process.send_signal(signal.SIGTERM)

    def end_broker(self) -> None:
        """Close the broker and wait until its port is free: a socket's own close ends in zmq's thread, later."""
        self.broker.close()
        transport.close_context(self.context)


@contextlib.contextmanager
def open_context() -> Iterator[Any]:
    context = transport.make_context()
    try:
        yield context
    finally:
        transport.close_context(context)


@contextlib.contextmanager
def worker_process(*arguments: str) -> Iterator[Child]:
    worker = spawn("mii_zmq.worker", arguments, "worker")
    try:
        yield worker
    finally:
        worker.kill()


@contextlib.asynccontextmanager
async def staged(model: str = "fake:", *arguments: str, **broker_options: Any) -> AsyncIterator[Stage]:
    """A worker group with the test engine, registered with a scripted broker."""
    with open_context() as context:
        broker = ScriptedBroker(context, **broker_options)
        try:
            options = (f"--model={model}", "--deployment=d", f"--brokers={broker.endpoint}", "--group=g", *arguments)
            with worker_process(*options) as worker:
                ready = await broker.take(Verb.READY)
                yield Stage(worker, broker, context, ready.header)
        finally:
            broker.close()
