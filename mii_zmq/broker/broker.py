# SPDX-License-Identifier: Apache-2.0
"""The broker's I/O shell: frames from two ROUTER sockets become events, the state's actions become frames.

Decides nothing. A send that finds its peer gone is fed back as an event. A message that cannot be decoded is answered
and counted; an error of the state itself ends the message that it happened to, never the broker. Routing ids are
neither logged nor shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from mii_zmq import transport
from mii_zmq.broker.outbox import Outbox
from mii_zmq.broker.records import Action, Address, Note, ToClient
from mii_zmq.broker.request_spans import RequestSpans
from mii_zmq.broker.state import BrokerState
from mii_zmq.config import BrokerConfig
from mii_zmq.errors import InternalError, MiiError
from mii_zmq.protocol import Verb, decode, readable_id
from mii_zmq.telemetry import LoopLag
from mii_zmq.tracing import Tracing

log = logging.getLogger(__name__)

MAX_TICK_S = 0.1
RETRY_S = 0.01
"""Between two tries at a peer whose queue is full."""
LOG_INTERVAL_S = 1.0
FAREWELL_S = 0.5
"""How long a draining broker stays connected after its last answer: a peer's zmq throws away what it has received but
not yet handed over when the connection ends (ZMQ_IMMEDIATE), and a busy peer takes its time."""


class Broker:
    """Owns both sockets. Made on the event loop that it runs on; `close` ends it."""

    def __init__(self, config: BrokerConfig, context: Any, tracing: Tracing | None = None) -> None:
        """`tracing` is its owner's to close. Raises ConfigError when an endpoint cannot be bound."""
        self._loop = asyncio.get_running_loop()
        clients, self.client_endpoint = transport.bind_router(context, config.client_endpoint)
        try:
            workers, self.worker_endpoint = transport.bind_router(context, config.worker_endpoint)
        except MiiError:
            clients.close(linger=0)
            raise
        self.state = BrokerState(config, os.urandom(16), time.monotonic())
        self._spans = None if tracing is None else RequestSpans(tracing)
        self.state.requests.traces = tracing is not None
        self._complaints = _RateLimit()
        self._clients = transport.AsyncSocket(clients, partial(self._guard, self._on_client_frames))
        self._workers = transport.AsyncSocket(workers, partial(self._guard, self._on_worker_frames))
        self._client_outbox = Outbox(self._clients.send)
        self._worker_outbox = Outbox(self._workers.send)
        self._tick_s = min(MAX_TICK_S, config.heartbeat_ms / 2000)
        self._drain_timeout_s = config.drain_timeout_s
        self._loop_lag = LoopLag()
        self._loop_lag.start()
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self._retry_timer: asyncio.TimerHandle | None = None

    async def drain(self, stop_now: asyncio.Event) -> None:
        """Refuse new requests; return when the accepted ones have ended, time is up, or `stop_now` is set."""
        self.state.drain()
        deadline = time.monotonic() + self._drain_timeout_s
        while not self.state.is_finished and not stop_now.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(self._tick_s / 4)
        if self.state.clients.by_address:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await stop_now.wait()

    def close(self) -> None:
        """End what is unfinished with an error and say goodbye to the workers."""
        self._timer.cancel()
        self._loop_lag.stop()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._perform(self.state.close(time.monotonic()))
        self._clients.close()
        self._workers.close()
        transport.remove_socket_file(self.client_endpoint)
        transport.remove_socket_file(self.worker_endpoint)

    def _guard(self, on_frames: Callable[[list[bytes]], None], frames: list[bytes]) -> None:
        try:
            on_frames(frames)
        except Exception:  # noqa: BLE001 - one message's failure must not end the broker
            self._complaints.log(logging.ERROR, "a bug in the broker, please report it", exc_info=True)
            self._perform(self.state.take_actions())

    def _on_client_frames(self, frames: list[bytes]) -> None:
        # A REQ socket, or a DEALER that imitates one, puts an empty frame in front.
        num_routing = 2 if len(frames) > 1 and not frames[1] else 1
        address = tuple(frames[:num_routing])
        del frames[:num_routing]
        try:
            message = decode(frames)
        except MiiError as error:
            self._complaints.log(logging.WARNING, "refused a message of a client: %s", error.message)
            self._perform(self.state.client_malformed(address, readable_id(frames), error))
            return
        now = time.monotonic()
        trace = self._spans.enter(message, now) if self._spans is not None and message.verb is Verb.GENERATE else ""
        try:
            self._perform(self.state.client_message(address, message, now))
        except Exception:
            failure = InternalError("the broker failed on this message; its log says more")
            if self._spans is not None:
                self._spans.discard(trace)
            self._perform(self.state.client_malformed(address, message.request_id, failure))
            raise

    def _on_worker_frames(self, frames: list[bytes]) -> None:
        address = (frames[0],)
        del frames[0]
        now = time.monotonic()
        try:
            message = decode(frames)
        except MiiError as error:
            self._complaints.log(logging.WARNING, "refused a message on the worker endpoint: %s", error.message)
            self._perform(self.state.worker_malformed(address, error, now))
            return
        self._perform(self.state.worker_message(address, message, frames, now))

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        counters = self.state.counters
        counters.router_full = self._client_outbox.num_full + self._worker_outbox.num_full
        counters.router_unroutable = self._client_outbox.num_unroutable + self._worker_outbox.num_unroutable
        counters.slow_peers = self._client_outbox.num_slow + self._worker_outbox.num_slow
        self.state.loop_lag_s = self._loop_lag.worst_s
        self._perform(self.state.tick(time.monotonic()))

    def _perform(self, actions: list[Action]) -> None:
        if not actions:
            return
        now = time.monotonic()
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            if isinstance(action, ToClient):
                if not self._client_outbox.send(action.address, action.frames, now):
                    waiting.extend(self._client_lost(action.address, now))
            elif isinstance(action, Note):
                if self._spans is not None:
                    self._spans.on_note(action, now)
            elif not self._worker_outbox.send(action.address, action.frames, now):
                waiting.extend(self._worker_lost(action.address, now))
        if self._retry_timer is None and (self._client_outbox.has_backlog or self._worker_outbox.has_backlog):
            self._retry_timer = self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        now = time.monotonic()
        actions: list[Action] = []
        for address in self._client_outbox.retry(now):
            actions += self._client_lost(address, now)
        for address in self._worker_outbox.retry(now):
            actions += self._worker_lost(address, now)
        self._perform(actions)
        if self._retry_timer is None and (self._client_outbox.has_backlog or self._worker_outbox.has_backlog):
            self._retry_timer = self._loop.call_later(RETRY_S, self._retry)

    def _client_lost(self, address: Address, now: float) -> list[Action]:
        return self.state.client_gone(address, now)

    def _worker_lost(self, address: Address, now: float) -> list[Action]:
        return self.state.worker_gone(address, now)


class _RateLimit:
    """Log lines that strangers can cause: one per interval, with the number of those left out."""

    def __init__(self) -> None:
        self._next = 0.0
        self._num_left_out = 0

    def log(self, level: int, text: str, *values: object, exc_info: bool = False) -> None:
        now = time.monotonic()
        if now < self._next:
            self._num_left_out += 1
            return
        if self._num_left_out:
            text += f" ({self._num_left_out} similar ones were not logged)"
        self._next, self._num_left_out = now + LOG_INTERVAL_S, 0
        log.log(level, text, *values, exc_info=exc_info)
