# SPDX-License-Identifier: Apache-2.0
"""Asynchronous client of the broker, used by the gateway and by the Python API; and a loop for synchronous callers.

One DEALER per broker endpoint. A request lives on one of them; its tokens arrive as deltas in order, without gap or
duplicate (checked by token offset), and it ends exactly once. When a broker vanishes and comes back (new epoch), the
unfinished requests are sent again with the token ids already received, so that generation goes on behind them; when it
does not come back in time, they end with BrokerUnavailable. Knows nothing of HTTP or of the model.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mii_zmq import protocol, transport
from mii_zmq.errors import (
    BrokerUnavailable,
    Cancelled,
    InternalError,
    MiiError,
    ProtocolError,
    ServiceError,
    from_wire,
)
from mii_zmq.protocol import FinalBody, GenerateBody, GenerateHeader, Hello, Message, TokenDelta, Verb, Welcome
from mii_zmq.sampling_params import SamplingParams

T = TypeVar("T")

HELLO_INTERVAL_S = (0.01, 0.5)
"""Between two HELLOs to a broker that has not answered: first and longest, doubling."""
BROKER_GRACE_S = 15.0
"""How long unfinished requests wait for a vanished broker."""
_CLOSED = "this client was closed; make a new one"
CHARS_PER_TOKEN = 4
DEFAULT_OUTPUT_TOKENS = 256
"""Guess for routing when a request names no length."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_length: int
    generated_length: int
    num_cached_tokens: int


def fan_out(params: SamplingParams) -> list[dict[str, Any]]:
    """One mapping of options per choice: a request of `n` choices is `n` requests."""
    return [params.for_choice(index).to_mapping() for index in range(params.n)]


class Generation:
    """One request in progress. Iterate for lists of new TokenDeltas, or await `result()`; do one of both, once."""

    __slots__ = (
        "_deltas",
        "_done",
        "_error",
        "_link",
        "_token_ids",
        "_waiter",
        "body",
        "final",
        "header",
        "is_sent",
        "request_id",
    )

    def __init__(self, link: _Link, header: GenerateHeader, body: bytes) -> None:
        self.request_id = protocol.new_request_id()
        self.header = header
        self.body = body
        self.final: FinalBody | None = None
        self.is_sent = False
        self._link = link
        self._deltas: list[TokenDelta] = []
        self._token_ids = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._error: MiiError | None = None
        self._done = False

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
        return deltas

    async def result(self) -> Completion:
        """Wait for the end. Raises the MiiError with which the request ended."""
        parts: list[bytes] = []
        async for deltas in self:
            parts.extend(delta.text for delta in deltas)
        final = self.final
        assert final is not None
        text = final.text if final.text is not None else b"".join(parts).decode()
        return Completion(
            text=text,
            token_ids=memoryview(bytes(self._token_ids)).cast("i").tolist(),
            finish_reason=final.finish_reason,
            prompt_length=final.prompt_length,
            generated_length=final.generated_length,
            num_cached_tokens=final.num_cached_tokens,
        )

    def cancel(self) -> None:
        """Stop generating and forget the request; idempotent, and harmless after the end."""
        if not self._done:
            self._link.cancel(self)
            self.fail(Cancelled("the request was cancelled"))

    def to_frames(self) -> list[bytes]:
        """The GENERATE message, with the token ids received so far as resume."""
        self.header.seen = self.header.deployment in self._link.seen
        raw = (bytes(self._token_ids),) if self._token_ids else ()
        return protocol.encode(Verb.GENERATE, self.request_id, self.header, self.body, raw)

    def on_delta(self, delta: TokenDelta) -> None:
        expected = len(self._token_ids) // 4
        if self._done or delta.token_offset < expected:
            return
        if delta.token_offset > expected:
            self.cancel()
            self._error = ProtocolError(f"tokens {expected} to {delta.token_offset} of the stream are missing")
            return
        self._token_ids += delta.token_ids
        self._deltas.append(delta)
        self._wake()

    def on_final(self, final: FinalBody, token_ids: bytes) -> None:
        if final.text is not None:
            self._token_ids = bytearray(token_ids)
        self.final = final
        self._done = True
        self._wake()

    def fail(self, error: MiiError) -> None:
        if not self._done:
            self._error = error
            self._done = True
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncClient:
    """Sends requests to the first broker that answers. Belongs to one event loop; `close` it there."""

    def __init__(self, endpoints: Sequence[str], *, name: str = "client") -> None:
        self._endpoints = tuple(endpoints)
        self._name = name
        self._context: Any = None
        self._links: list[_Link] = []

    @property
    def is_connected(self) -> bool:
        return any(link.is_up for link in self._links)

    def start(self) -> None:
        """Begin connecting in the background. Idempotent."""
        if not self._links:
            self._context = transport.make_context()
            self._links = [_Link(self._context, endpoint, self._name) for endpoint in self._endpoints]

    async def connect(self, timeout_s: float = 10.0) -> None:
        """Wait until a broker has answered; raises BrokerUnavailable."""
        self.start()
        waits = [asyncio.ensure_future(link.up.wait()) for link in self._links]
        done, pending = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if not done:
            raise BrokerUnavailable(f"no broker answered at {', '.join(self._endpoints)} within {timeout_s:g} s")

    def generate(
        self,
        deployment: str,
        body: GenerateBody,
        *,
        stream: bool,
        tenant: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Generation:
        """Send one request (`n` in its params must be 1) and return at once.

        While a broker that was there is away (it is restarted in under a second), requests wait for it.

        Raises:
            BrokerUnavailable: no broker is connected, or expected back.
            InvalidRequest, RequestTooLarge: the body cannot be encoded, or exceeds the protocol's limit.
        """
        link = next((link for link in self._links if link.is_up), None)
        link = link or next((link for link in self._links if link.is_expected), None)
        if link is None:
            raise BrokerUnavailable(
                f"no broker answers at {', '.join(self._endpoints)}; is it running?", retry_after_ms=1000
            )
        header = GenerateHeader(
            deployment=deployment,
            stream=stream,
            tenant=tenant,
            priority=priority,
            deadline_ms=None if deadline_s is None else max(1, int(deadline_s * 1000)),
            num_tokens=_estimate_tokens(body),
        )
        generation = Generation(link, header, protocol.encode_body(body))
        link.submit(generation)
        return generation

    async def status(self, timeout_s: float = 2.0) -> dict[str, Any]:
        """The broker's STATUS body; raises BrokerUnavailable."""
        link = next((link for link in self._links if link.is_up), None)
        if link is None:
            raise BrokerUnavailable(f"no broker answers at {', '.join(self._endpoints)}")
        return await link.status(timeout_s)

    async def close(self) -> None:
        """Cancel what is unfinished and disconnect."""
        for link in self._links:
            await link.close()
        self._links = []
        if self._context is not None:
            transport.close_context(self._context)
            self._context = None


class _Link:
    """The connection to one broker: handshake, heartbeats, and the requests that live on it."""

    def __init__(self, context: Any, endpoint: str, name: str) -> None:
        self.endpoint = endpoint
        self.up = asyncio.Event()
        self.seen: set[str] = set()
        """Deployments that this broker, or its predecessor, was known to serve."""
        self._hello = Hello(name=name, batch=True)
        self._epoch: bytes | None = None
        self._heartbeat_s = 0.5
        self._liveness = 6
        self._heard = time.monotonic()
        self._down = asyncio.Event()
        self._down_since = self._heard
        self._was_up = False
        self._generations: dict[bytes, Generation] = {}
        self._statuses: dict[bytes, asyncio.Future[dict[str, Any]]] = {}
        self._socket = transport.AsyncSocket(transport.connect_dealer(context, endpoint), self._on_frames)
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def is_up(self) -> bool:
        return self.up.is_set()

    @property
    def is_expected(self) -> bool:
        """Down, but not for long enough to be given up."""
        return self._was_up and not self.is_up and time.monotonic() - self._down_since < BROKER_GRACE_S

    def submit(self, generation: Generation) -> None:
        """Send now, or with the next WELCOME if the broker is away."""
        self._generations[generation.request_id] = generation
        if self.is_up:
            self._try_send(generation)

    def _try_send(self, generation: Generation) -> None:
        try:
            self._socket.send(generation.to_frames())
            generation.is_sent = True
        except transport.PeerFull:
            # Not connected, or a broker that does not read: find out by HELLO, send again after WELCOME.
            generation.is_sent = False
            self._set_down()

    def _set_down(self) -> None:
        if self.is_up:
            self._down_since = time.monotonic()
        self.up.clear()
        self._down.set()

    def cancel(self, generation: Generation) -> None:
        if self._generations.pop(generation.request_id, None) is not None:
            with contextlib.suppress(transport.PeerFull, transport.PeerGone):
                self._socket.send(protocol.encode(Verb.CANCEL, generation.request_id))

    async def status(self, timeout_s: float) -> dict[str, Any]:
        request_id = protocol.new_request_id()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._statuses[request_id] = future
        try:
            self._socket.send(protocol.encode(Verb.STATUS, request_id))
            return await asyncio.wait_for(future, timeout_s)
        except (TimeoutError, transport.PeerFull):
            raise BrokerUnavailable(f"the broker at {self.endpoint} did not answer in {timeout_s:g} s") from None
        finally:
            self._statuses.pop(request_id, None)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for generation in list(self._generations.values()):
            generation.cancel()
        with contextlib.suppress(transport.PeerFull, transport.PeerGone):
            if self.is_up:
                self._socket.send(protocol.encode(Verb.DISCONNECT))
        self.up.clear()
        self._socket.close()

    async def _run(self) -> None:
        """Say HELLO until WELCOME comes, then send heartbeats until the broker falls silent; for ever."""
        while True:
            interval_s = HELLO_INTERVAL_S[0]
            while not self.is_up:
                with contextlib.suppress(transport.PeerFull):
                    self._socket.send(protocol.encode(Verb.HELLO, header=self._hello))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.up.wait(), interval_s)
                interval_s = min(2 * interval_s, HELLO_INTERVAL_S[1])
                if not self.is_up and time.monotonic() - self._down_since > BROKER_GRACE_S:
                    self._fail_all(BrokerUnavailable(f"the broker at {self.endpoint} is gone", retry_after_ms=1000))
            while self.is_up:
                try:
                    self._socket.send(protocol.encode(Verb.HEARTBEAT))
                except transport.PeerFull:
                    self._set_down()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._down.wait(), self._heartbeat_s)
                if time.monotonic() - self._heard > self._liveness * self._heartbeat_s:
                    log.warning("the broker at %s has fallen silent", self.endpoint)
                    self._set_down()

    def _fail_all(self, error: MiiError) -> None:
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.fail(error)

    def _on_frames(self, frames: list[bytes]) -> None:
        self._heard = time.monotonic()
        try:
            self._on_message(protocol.decode(frames))
        except MiiError as error:
            log.warning("a message of the broker was dropped: %s", error)

    def _on_message(self, message: Message) -> None:
        match message.verb:
            case Verb.TOKENS:
                self._on_tokens(message)
            case Verb.FINAL:
                generation = self._generations.pop(message.request_id, None)
                if generation is not None:
                    self.seen.add(generation.header.deployment)
                    generation.on_final(protocol.parse_body(message, FinalBody), b"".join(message.raw[:1]))
            case Verb.ERROR:
                self._on_error(message)
            case Verb.WELCOME:
                self._on_welcome(protocol.parse_header(message, Welcome))
            case Verb.STATUS:
                future = self._statuses.get(message.request_id)
                if future is not None and not future.done():
                    future.set_result(protocol.unpack_map(message.body, "body"))
            case Verb.HEARTBEAT:
                if message.header.get("epoch", self._epoch) != self._epoch:
                    self._set_down()
            case Verb.DISCONNECT:
                self._set_down()
                self._epoch = None
            case _:
                pass

    def _on_tokens(self, message: Message) -> None:
        for delta in protocol.iterate_tokens(message):
            generation = self._generations.get(delta.request_id)
            if generation is not None:
                generation.on_delta(delta)

    def _on_error(self, message: Message) -> None:
        error = from_wire(message.header)
        generation = self._generations.pop(message.request_id, None)
        if generation is not None:
            generation.fail(error)
        elif message.request_id == protocol.NO_ID:
            log.warning("the broker reports: %s", error)

    def _on_welcome(self, welcome: Welcome) -> None:
        self._heartbeat_s = welcome.heartbeat_ms / 1000
        self._liveness = welcome.liveness
        is_new = welcome.epoch != self._epoch
        self._epoch = welcome.epoch
        self.seen.update(welcome.deployments)
        self._was_up = True
        self._down.clear()
        self.up.set()
        again = [g for g in self._generations.values() if is_new or not g.is_sent]
        if again:
            log.warning("the broker at %s is back; sending %d requests again", self.endpoint, len(again))
        for generation in again:
            self._try_send(generation)


class BackgroundLoop:
    """An event loop in a daemon thread, so that synchronous code can use asynchronous clients from any thread, also
    from inside another running event loop."""

    def __init__(self, name: str = "mii_zmq-client") -> None:
        self._loop = asyncio.new_event_loop()
        self._submitting = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine there and wait for its result; KeyboardInterrupt cancels it.

        Raises:
            ServiceError: the loop was closed, before or while the coroutine ran.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise InternalError("a synchronous call was made from the client's own event loop")
        with self._submitting:
            if self._is_closed:
                coroutine.close()
                raise ServiceError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except (KeyboardInterrupt, concurrent.futures.TimeoutError):
            future.cancel()
            raise
        except concurrent.futures.CancelledError:
            raise ServiceError(_CLOSED) from None

    def close(self) -> None:
        """Cancel what runs, whoever waits for it, and end the thread. Idempotent."""
        with self._submitting:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        """Everything submitted before `close` took the lock is a task by now, since callbacks run in order."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Their results reach the waiting threads by callbacks of their own.
        await asyncio.sleep(0)


def _estimate_tokens(body: GenerateBody) -> int:
    if body.prompt_token_ids is not None:
        prompt = len(body.prompt_token_ids)
    elif body.prompt is not None:
        prompt = len(body.prompt) // CHARS_PER_TOKEN
    else:
        prompt = sum(len(str(message.get("content"))) for message in body.messages or ()) // CHARS_PER_TOKEN
    output = body.params.get("max_new_tokens")
    return prompt + (output if isinstance(output, int) else DEFAULT_OUTPUT_TOKENS)
