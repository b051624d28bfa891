# SPDX-License-Identifier: Apache-2.0
"""Asynchronous client of the brokers, used by the gateway and by the Python API; and a loop for synchronous callers.

One DEALER per broker endpoint (`client_link`); a request lives on one of them and moves to another one when its broker
fails or shuts down. Knows nothing of HTTP or of the model.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from mii_zmq import protocol, transport
from mii_zmq.client_link import CREDIT, Link
from mii_zmq.errors import BrokerUnavailable, InternalError, ServiceError
from mii_zmq.generation import Completion, Generation
from mii_zmq.protocol import (
    Abort,
    Aborted,
    GenerateBody,
    GenerateHeader,
    PrefixCacheReset,
    ResetPrefixCache,
    Verb,
)
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.trace_context import TraceContext
from mii_zmq.tracing import current_context

__all__ = ["AsyncClient", "BackgroundLoop", "Completion", "Generation", "fan_out"]

T = TypeVar("T")

_CLOSED = "this client was closed; make a new one"
CHARS_PER_TOKEN = 4
DEFAULT_OUTPUT_TOKENS = 256
"""Guess for routing when a request names no length."""

log = logging.getLogger(__name__)


def fan_out(params: SamplingParams) -> list[dict[str, Any]]:
    """One mapping of options per choice: a request of `n` choices is `n` requests."""
    return [params.for_choice(index).to_mapping() for index in range(params.n)]


class AsyncClient:
    """Sends requests to the first broker of its list that answers. Belongs to one event loop; `close` it there.

    When that one fails, its unfinished requests go on with the next one, from the token ids that have arrived; when it
    is back, new requests go there again.
    """

    def __init__(self, endpoints: Sequence[str], *, name: str = "client", credit: int = CREDIT) -> None:
        """`credit`: rows of a stream that may wait here for their reader before the broker merges further ones; 0: any
        number."""
        self._endpoints = tuple(endpoints)
        self._name = name
        self._credit = credit
        self._context: Any = None
        self._links: list[Link] = []
        self._seen: set[str] = set()

    @property
    def is_connected(self) -> bool:
        return any(link.is_up for link in self._links)

    def start(self) -> None:
        """Begin connecting in the background. Idempotent."""
        if not self._links:
            self._context = transport.make_context()
            self._links = [
                Link(self._context, endpoint, self._name, self._seen, self._credit, self._on_change, self._take_over)
                for endpoint in self._endpoints
            ]

    async def connect(self, timeout_s: float = 10.0) -> None:
        """Wait until a broker has answered; raises BrokerUnavailable."""
        self.start()
        waits = [asyncio.ensure_future(link.up.wait()) for link in self._links]
        try:
            done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
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
        name: str = "",
        trace: TraceContext | None = None,
    ) -> Generation:
        """Send one request (`n` in its params must be 1) and return at once.

        `name` is the caller's own for logs and for `abort` (x-request-id), `trace` the span that this is part of (None:
        the one that the calling program is in, if it uses OpenTelemetry).

        While a broker that was there is away (it is restarted in under a second), requests wait for it.

        Raises:
            BrokerUnavailable: no broker is connected, or expected back.
            InvalidRequest, RequestTooLarge: the body cannot be encoded, or exceeds the protocol's limit.
        """
        link = self._choose() or next((link for link in self._links if link.is_up), None)
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
            x_request_id=name,
        )
        trace = trace or current_context()
        if trace is not None:
            header.traceparent, header.tracestate = trace.traceparent, trace.state
        generation = Generation(link, header, protocol.encode_body(body))
        link.submit(generation)
        return generation

    async def status(self, timeout_s: float = 2.0) -> dict[str, Any]:
        """The STATUS body of the broker that a request would go to; raises BrokerUnavailable."""
        link = next((link for link in self._links if link.takes_requests), None)
        link = link or next((link for link in self._links if link.is_up), None)
        if link is None:
            raise BrokerUnavailable(f"no broker answers at {', '.join(self._endpoints)}")
        return await link.status(timeout_s)

    async def abort(
        self,
        *,
        names: Sequence[str] = (),
        request_ids: Sequence[bytes] = (),
        everything: bool = False,
        tenant: str = "",
        timeout_s: float = 5.0,
    ) -> Aborted:
        """End a tenant's requests, whichever client sent them; each ends with Cancelled at its own client.

        Asks every broker that is connected, since none knows of the others' requests.

        Raises:
            BrokerUnavailable: none is, or one of them does not answer; others may have done it.
        """
        header = Abort(tenant=tenant, request_ids=list(request_ids), names=list(names), everything=everything)
        links = [link for link in self._links if link.is_up]
        if not links:
            raise BrokerUnavailable(f"no broker answers at {', '.join(self._endpoints)}", retry_after_ms=1000)
        messages = await asyncio.gather(*(link.ask(Verb.ABORT, header, timeout_s) for link in links))
        answers = [protocol.parse_header(message, Aborted) for message in messages]
        return Aborted(
            num_requests=sum(answer.num_requests for answer in answers),
            request_ids=[request_id for answer in answers for request_id in answer.request_ids],
            names=sorted({name for answer in answers for name in answer.names}),
        )

    async def reset_prefix_cache(self, deployment: str, timeout_s: float = 15.0) -> PrefixCacheReset:
        """Let every group of a deployment forget its cached prefixes; says which have and which have not.

        Groups register with all brokers, so one is asked.

        Raises:
            BrokerUnavailable: none answers.
            UnknownDeployment, NoWorkers: there is no such deployment, or no group of it.
        """
        link = next((link for link in self._links if link.is_up), None)
        if link is None:
            raise BrokerUnavailable(f"no broker answers at {', '.join(self._endpoints)}", retry_after_ms=1000)
        message = await link.ask(Verb.RESET_PREFIX_CACHE, ResetPrefixCache(deployment=deployment), timeout_s)
        return protocol.parse_header(message, PrefixCacheReset)

    async def close(self) -> None:
        """Cancel what is unfinished and disconnect."""
        for link in self._links:
            await link.close()
        self._links = []
        if self._context is not None:
            transport.close_context(self._context)
            self._context = None

    def _choose(self) -> Link | None:
        """Where a request goes: the first broker that takes any, else one that is expected back."""
        link = next((link for link in self._links if link.takes_requests), None)
        return link or next((link for link in self._links if link.is_expected), None)

    def _on_change(self) -> None:
        """A broker came or went: no request stays with one that is gone while another one is there."""
        if not any(link.takes_requests for link in self._links):
            return
        for link in self._links:
            if not link.is_up and (moved := link.leave()):
                log.warning("the broker at %s is gone; %d requests go on with another one", link.endpoint, len(moved))
                for generation in moved:
                    # Each time anew: the other one may turn out to be gone as well.
                    (self._choose() or link).submit(generation)

    def _take_over(self, generation: Generation) -> bool:
        """Its broker cannot serve it: give it to another one, if there is one that has not said the same."""
        links = [link for link in self._links if link not in generation.refused_by]
        link = next((link for link in links if link.takes_requests), None)
        link = link or next((link for link in links if link.is_expected), None)
        if link is None:
            return False
        link.submit(generation)
        return True


class BackgroundLoop:
    """An event loop in a daemon thread, so that synchronous code can use asynchronous clients from any thread, also
    from inside another running event loop."""

    def __init__(self, name: str = "mii_zmq-client") -> None:
        self._loop = asyncio.new_event_loop()
        self._submitting = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine there and wait for its result; KeyboardInterrupt cancels it.

        Raises:
            ServiceError: the loop was closed, before or while the coroutine ran, or is a parent process's.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise InternalError("a synchronous call was made from the client's own event loop")
        with self._submitting:
            if self._is_closed:
                coroutine.close()
                raise ServiceError(_CLOSED)
            if os.getpid() != self._pid:
                coroutine.close()
                raise ServiceError("this client stayed behind when the process forked; make a new one in the child")
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
        chars = sum(len(str(message.get("content"))) for message in body.messages or ())
        chars += sum(len(str(message["tool_calls"])) for message in body.messages or () if "tool_calls" in message)
        prompt = (chars + (len(str(body.tools)) if body.tools else 0)) // CHARS_PER_TOKEN
    if body.task != "generate":
        return prompt
    output = body.params.get("max_new_tokens")
    return prompt + (output if isinstance(output, int) else DEFAULT_OUTPUT_TOKENS)
