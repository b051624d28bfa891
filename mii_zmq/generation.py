# SPDX-License-Identifier: Apache-2.0
"""One request as its client sees it: deltas in order, without gap or duplicate (`resume.Delivered`), and one end.

It lives with one broker at a time; what has arrived is kept, so that another one can go on behind it. Its reader takes
what has gathered, and for every so many rows taken the broker is granted more. Knows no sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from mii_zmq import protocol
from mii_zmq.errors import Cancelled, DeadlineExceeded, MiiError, ProtocolError
from mii_zmq.protocol import FinalBody, GenerateHeader, TokenDelta, Verb
from mii_zmq.resume import Delivered, Place

T = TypeVar("T")
R = TypeVar("R")

GRANT = 128
"""Rows that the reader has taken by the next grant."""
DEADLINE_GRACE_S = 2.5
"""A broker ends its requests at most two seconds after their deadlines; after this the client does it."""


class Home(Protocol):
    """The broker that a request is with."""

    seen: set[str]

    def grant(self, generation: Generation) -> None:
        """The request's reader has taken GRANT more rows."""
        ...

    def cancel(self, generation: Generation) -> None:
        """Nobody waits for the request any more."""
        ...


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_length: int
    generated_length: int
    num_cached_tokens: int
    matched_stop: str | None = None
    """The stop string that ended it."""
    logprobs: bytes = b""
    """Records of mii_zmq.logprobs, if they were asked for."""
    embedding: bytes = b""
    """Of the task "embed": float32, little endian."""


class SentAgain(NamedTuple):
    """A request that was under way was sent once more, to another broker or to one that came back."""

    at: float
    """Monotonic time."""
    endpoint: str
    num_tokens: int
    """Output tokens that had arrived."""


class Generation:
    """One request in progress. Iterate for lists of new TokenDeltas, or await `result()`; do one of both, once."""

    __slots__ = (
        "_deadline",
        "_delivered",
        "_deltas",
        "_done",
        "_error",
        "_logprobs",
        "_num_read",
        "_timer",
        "_waiter",
        "body",
        "final",
        "header",
        "is_sent",
        "link",
        "refused_by",
        "request_id",
        "sent_again",
    )

    def __init__(self, link: Home, header: GenerateHeader, body: bytes) -> None:
        self.link = link
        """The broker that it is with; another one once that has failed."""
        self.request_id = protocol.new_request_id()
        self.header = header
        self.body = body
        self.final: FinalBody | None = None
        self.is_sent = False
        self._deadline = None if header.deadline_ms is None else time.monotonic() + header.deadline_ms / 1000
        self._deltas: list[TokenDelta] = []
        self._num_read = 0
        """Rows taken by the reader for which no new credit was given yet."""
        self._delivered = Delivered()
        self._logprobs = b""
        """Of a request that was not streamed."""
        self.sent_again: list[SentAgain] = []
        """Whenever its broker was lost, or could not serve it."""
        self.refused_by: set[Home] = set()
        """Brokers that cannot serve it, while others perhaps can."""
        self._waiter: asyncio.Future[None] | None = None
        self._error: MiiError | None = None
        self._done = False
        self._timer: asyncio.TimerHandle | None = None
        if header.deadline_ms is not None:
            # Ordinarily the broker's word comes first; this is for a broker that is away, or never answers.
            after_s = header.deadline_ms / 1000 + DEADLINE_GRACE_S
            self._timer = asyncio.get_running_loop().call_later(after_s, self._expire)

    @property
    def num_tokens(self) -> int:
        """Output tokens that have arrived."""
        return self._delivered.num_tokens

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        """Everything that arrived since the last call, at least one delta.

        Raises:
            MiiError: the request ended with an error; deltas received before come first.
            StopAsyncIteration: the request ended well; `final` is set.
        """
        while not self._deltas:
            if self._done:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        self._num_read += len(deltas)
        if self._num_read >= GRANT and not self._done:
            self._num_read -= GRANT
            self.link.grant(self)
        return deltas

    async def result(self) -> Completion:
        """Wait for the end. Raises the MiiError with which the request ended."""
        parts: list[bytes] = []
        logprobs: list[bytes] = []
        async for deltas in self:
            parts.extend(delta.text for delta in deltas)
            logprobs.extend(delta.logprobs for delta in deltas)
        final = self.final
        assert final is not None
        text = final.text if final.text is not None else b"".join(parts).decode()
        return Completion(
            text=text,
            token_ids=memoryview(bytes(self._delivered.token_ids)).cast("i").tolist(),
            finish_reason=final.finish_reason,
            prompt_length=final.prompt_length,
            generated_length=final.generated_length,
            num_cached_tokens=final.num_cached_tokens,
            matched_stop=final.matched_stop,
            logprobs=self._logprobs or b"".join(logprobs),
            embedding=final.embedding or b"",
        )

    def cancel(self) -> None:
        """Stop generating and forget the request; idempotent, and harmless after the end."""
        if not self._done:
            self.link.cancel(self)
            self.fail(Cancelled("the request was cancelled"))

    def to_frames(self) -> list[bytes]:
        """The GENERATE message, with the token ids received so far as resume."""
        # Credit begins anew; what waits here was charged to the last one.
        self._num_read = -len(self._deltas)
        self.header.seen = self.header.deployment in self.link.seen
        if self._deadline is not None:
            # At least 1: that it has passed is the broker's to say.
            self.header.deadline_ms = max(1, int(1000 * (self._deadline - time.monotonic())))
        raw = self._delivered.resume_frames()
        return protocol.encode(Verb.GENERATE, self.request_id, self.header, self.body, raw)

    def note_sent_again(self, endpoint: str) -> None:
        self.sent_again.append(SentAgain(time.monotonic(), endpoint, self._delivered.num_tokens))

    def on_delta(self, delta: TokenDelta) -> None:
        if self._done:
            return
        place = self._delivered.take(delta.token_offset, delta.token_ids, delta.finish_reason)
        if place is Place.NEXT:
            self._deltas.append(delta)
            self._wake()
        elif place is Place.HOLE:
            self.cancel()
            missing = f"{self._delivered.num_tokens} to {delta.token_offset}"
            self._error = ProtocolError(f"tokens {missing} of the stream are missing")

    def on_final(self, final: FinalBody, token_ids: bytes = b"", logprobs: bytes = b"") -> None:
        if final.text is not None:
            self._delivered.token_ids = bytearray(token_ids)
            self._logprobs = logprobs
        self.final = final
        self._end()

    def fail(self, error: MiiError) -> None:
        if not self._done:
            self._error = error
            self._end()

    def _expire(self) -> None:
        if not self._done:
            self.link.cancel(self)
            self.fail(DeadlineExceeded("the request's deadline passed, and no broker said so"))

    def _end(self) -> None:
        self._done = True
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def run_each(work: Callable[[int, T], Awaitable[R]], items: Iterable[T], *, at_once: int) -> list[R]:
    """`work(index, item)` for each item, at most `at_once` of them at the same time; the results in the items' order.

    The first failure is raised; it, or a cancellation of the caller, cancels all others, and they have ended on return.
    """
    room = asyncio.Semaphore(at_once)

    async def run(index: int, item: T) -> R:
        async with room:
            return await work(index, item)

    tasks = [asyncio.ensure_future(run(index, item)) for index, item in enumerate(items)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
