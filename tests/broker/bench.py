# SPDX-License-Identifier: Apache-2.0
"""Drives a `BrokerState` without sockets: a hand-moved clock, decoded messages per peer, dead addresses that bounce."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mii_zmq.broker.records import Action, Address, Note, ToClient
from mii_zmq.broker.request_spans import RequestSpans
from mii_zmq.broker.state import BrokerState
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
    iterate_tokens,
)
from mii_zmq.tracing import Tracing


def address(name: str) -> Address:
    return (name.encode(),)


def request_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def packed(ids: list[int]) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def row(
    number: int, seq: int, ids: list[int], text: str = "", reason: str | None = None, offset: int | None = None
) -> TokenDelta:
    """A row whose token offset is its seq (one id per row), unless it is given."""
    at = seq if offset is None else offset
    return TokenDelta(request_id(number), seq, at, packed(ids), text.encode(), reason)


class Bench:
    """Names stand for addresses; what a peer received is in `received[name]`."""

    def __init__(self, tracing: Tracing | None = None, **settings: Any) -> None:
        self.now = 1000.0
        self.state = BrokerState(BrokerConfig(**settings), bytes(range(16)), self.now)
        self.spans = None if tracing is None else RequestSpans(tracing)
        self.state.requests.traces = tracing is not None
        self.received: dict[Address, list[Message]] = defaultdict(list)
        self.raw_frames: dict[Address, list[list[bytes]]] = defaultdict(list)
        self.dead: set[Address] = set()

    # What peers do.

    def client(
        self, name: str | Address, verb: Verb, number: int | None = None, header: Any = None, **more: Any
    ) -> None:
        where = address(name) if isinstance(name, str) else name
        message = decode(encode(verb, NO_ID if number is None else request_id(number), header, **more))
        if self.spans is not None and verb is Verb.GENERATE:
            self.spans.enter(message, self.now)
        self.perform(self.state.client_message(where, message, self.now))

    def hello(self, name: str, batch: bool = True) -> None:
        self.client(name, Verb.HELLO, header={"batch": batch})

    def generate(
        self, client: str | Address, number: int, /, *, stream: bool = True, raw: Any = (), **header: Any
    ) -> None:
        body = header.pop("body", {"prompt": f"request {number}"})
        values = GenerateHeader(deployment=header.pop("deployment", "m"), stream=stream, **header)
        self.client(client, Verb.GENERATE, number, values, body=body, raw=raw)

    def worker(self, name: str, frames: list[bytes]) -> None:
        self.perform(self.state.worker_message(address(name), decode(frames), frames, self.now))

    def ready(self, name: str, group: str | None = None, *, incarnation: int = 1, **fields: Any) -> None:
        values: dict[str, Any] = {"deployment": "m", "max_requests": 8, "max_model_len": 2048, **fields}
        ready = Ready(group=group or name, incarnation=request_id(incarnation), **values)
        self.worker(name, encode(Verb.READY, header=ready))

    def heartbeat(self, name: str, state: str = "ready", incarnation: int = 1, **load: Any) -> None:
        header = WorkerHeartbeat(incarnation=request_id(incarnation), state=state, load=Load(**load))
        self.worker(name, encode(Verb.HEARTBEAT, header=header))

    def tokens(self, name: str, *rows: TokenDelta, client: int = 0) -> None:
        builder = TokenRows()
        for delta in rows:
            builder.add(delta)
        self.worker(name, builder.to_frames(client))

    def final(self, name: str, number: int, reason: str = "stop") -> None:
        body = FinalBody(finish_reason=reason, prompt_length=1, generated_length=1)
        self.worker(name, encode(Verb.FINAL, request_id(number), FinalHeader(finish_reason=reason), body))

    def advance(self, seconds: float, heartbeats: tuple[str, ...] = (), clients: tuple[str, ...] = ()) -> None:
        """Let time pass in steps of a tick, with heartbeats of the named workers and clients."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.1)
            for name in heartbeats:
                self.heartbeat(name)
            for name in clients:
                self.client(name, Verb.HEARTBEAT)
            self.perform(self.state.tick(self.now))

    def kill(self, name: str) -> None:
        """The connection is gone; the broker learns of it when it sends, or misses heartbeats."""
        self.dead.add(address(name))

    # What the broker does.

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Note):
                assert self.spans is not None
                self.spans.on_note(action, self.now)
                continue
            if action.address in self.dead:
                gone = self.state.client_gone if isinstance(action, ToClient) else self.state.worker_gone
                self.perform(gone(action.address, self.now))
                continue
            assert all(isinstance(frame, bytes) for frame in action.frames)
            self.received[action.address].append(decode(action.frames))
            self.raw_frames[action.address].append(list(action.frames))
        self.state.check()

    # What was seen.

    def verbs(self, name: str | Address, number: int | None = None) -> list[str]:
        where = address(name) if isinstance(name, str) else name
        messages = self.received[where]
        return [m.verb.name for m in messages if number is None or m.request_id == request_id(number)]

    def last(self, name: str | Address, verb: Verb | None = None) -> Message:
        where = address(name) if isinstance(name, str) else name
        return [m for m in self.received[where] if verb is None or m.verb is verb][-1]

    def error(self, name: str | Address) -> dict[str, Any]:
        return self.last(name, Verb.ERROR).header

    def token_ids(self, name: str, number: int) -> list[int]:
        ids = b""
        for message in self.received[address(name)]:
            if message.verb is Verb.TOKENS:
                ids += b"".join(d.token_ids for d in iterate_tokens(message) if d.request_id == request_id(number))
        return memoryview(ids).cast("i").tolist()

    def clear(self) -> None:
        self.received.clear()
        self.raw_frames.clear()
