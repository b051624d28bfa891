# SPDX-License-Identifier: Apache-2.0
"""An actor between a scripted engine and recorded broker links, without sockets or processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from mii_zmq import transport
from mii_zmq.errors import MiiError
from mii_zmq.protocol import GenerateBody, Load, Message, Ready, Verb, decode, encode
from mii_zmq.tokenizer import FAKE_EOS, load_tokenizer
from mii_zmq.worker.actor import Actor
from mii_zmq.worker.engine_channel import OutputRow, StepReport, ids_to_bytes, load_values
from mii_zmq.worker.intake import Intake
from mii_zmq.worker.plan import EngineLimits, SequenceRequest
from mii_zmq.worker.request_accounts import RequestAccounts
from mii_zmq.worker.request_spans import RequestSpans
from mii_zmq.worker.watchdog import Watchdog

LIMITS = EngineLimits(
    vocab_size=257,
    max_model_len=256,
    num_blocks=8,
    block_size=64,
    max_sequences=8,
    token_budget=64,
    eos_token_ids=(FAKE_EOS,),
    hidden_size=3,
)
NO_LOAD = load_values(Load())
PATIENCE_S = 30


class ScriptedEngine:
    """Records what the actor asks; the test gives out the rows."""

    def __init__(self) -> None:
        self.added: asyncio.Queue[SequenceRequest] = asyncio.Queue()
        self.cancelled: list[int] = []
        self.resets: list[int] = []
        self.is_full = False
        self.lost: MiiError | None = None

    def declare_lost(self, error: MiiError) -> None:
        self.lost = error

    def add(self, request: SequenceRequest) -> None:
        if self.is_full:
            raise transport.PeerFull("full")
        self.added.put_nowait(request)

    def cancel(self, seq_ids: Sequence[int]) -> None:
        self.cancelled.extend(seq_ids)

    def reset_prefix_cache(self, number: int) -> None:
        if self.is_full:
            raise transport.PeerFull("full")
        self.resets.append(number)


class RecordingLink:
    """A broker link without a socket."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.endpoint = f"test-{index}"
        self.registered = asyncio.Event()
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.is_gone = False

    def send(self, frames: Sequence[bytes]) -> bool:
        if not self.is_gone:
            self.sent.put_nowait(decode(list(frames)))
        return not self.is_gone

    def close(self, reason: str) -> None:
        self.is_gone = True

    async def take(self, verb: Verb) -> Message:
        async with asyncio.timeout(PATIENCE_S):
            message = await self.sent.get()
        assert message.verb is verb, message
        return message


class Harness:
    def __init__(self, num_links: int = 1, spans: RequestSpans | None = None) -> None:
        self.engine = ScriptedEngine()
        self.links = [RecordingLink(index) for index in range(num_links)]
        ready = Ready(group="g", incarnation=bytes(16), deployment="d", max_requests=8, max_model_len=256)
        intake = Intake(load_tokenizer("fake:"), LIMITS)
        self.watchdog = Watchdog(30.0)
        self.actor = Actor(self.engine, intake, ready, 2, self.watchdog, RequestAccounts(spans))  # type: ignore[arg-type]
        self.actor.links = self.links  # type: ignore[assignment]

    @property
    def link(self) -> RecordingLink:
        return self.links[0]

    def send(self, verb: Verb, request_id: bytes, *, link: int = 0, raw: Sequence[bytes] = (), **parts: Any) -> None:
        message = decode(encode(verb, request_id, parts.get("header"), parts.get("body", b"\x80"), raw))
        self.actor.on_broker_message(self.links[link], message)  # type: ignore[arg-type]

    def generate(
        self,
        number: int = 1,
        *,
        prompt: str = "hello",
        stream: bool = True,
        link: int = 0,
        client: int = 7,
        resume: Sequence[int] = (),
        header: dict[str, Any] | None = None,
        **params: Any,
    ) -> bytes:
        request_id = number.to_bytes(16, "big")
        fields = {"deployment": "d", "stream": stream, "client": client, **(header or {})}
        raw = (ids_to_bytes(resume),) if resume else ()
        body = GenerateBody(prompt=prompt, params=params)
        self.send(Verb.GENERATE, request_id, link=link, raw=raw, header=fields, body=body)
        return request_id

    async def added(self) -> SequenceRequest:
        async with asyncio.timeout(PATIENCE_S):
            return await self.engine.added.get()

    def step(self, *rows: OutputRow) -> None:
        self.actor.on_step(StepReport(1, rows, NO_LOAD))

    def assert_empty(self) -> None:
        assert self.actor.num_requests == 0
        assert not self.actor._by_seq
        assert all(link.sent.empty() for link in self.links)


def row(seq_id: int, text: str | bytes | Sequence[int] = "", finish: str | None = None, **more: Any) -> OutputRow:
    ids = text if not isinstance(text, str | bytes) else list(text.encode() if isinstance(text, str) else text)
    return OutputRow(
        seq_id,
        ids,
        finish,
        more.get("cached", 0),
        more.get("error"),
        more.get("logprobs"),
        more.get("prompt_scores"),
        more.get("timing"),
    )
