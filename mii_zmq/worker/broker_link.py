# SPDX-License-Identifier: Apache-2.0
"""One broker, seen from a worker group: registration, heartbeats, and noticing that the broker is gone or new.

READY is repeated until REGISTERED; after DISCONNECT, after `liveness` silent intervals, and after any message that
could not be sent, the group registers again and lists the requests it still runs, so that both sides agree again. A
heartbeat is sent only when the group gives one out (it does not while its engine hangs). Knows nothing of requests
but their ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mii_zmq import transport
from mii_zmq.errors import MiiError
from mii_zmq.protocol import (
    NO_ID,
    Disconnect,
    ErrorHeader,
    Message,
    Ready,
    Registered,
    Verb,
    WorkerHeartbeat,
    decode,
    encode,
    parse_header,
    readable_id,
)

READY_INTERVAL_S = (0.05, 1.0)
"""Between two READYs: first and longest, doubling."""
UNREACHABLE_WARNING_S = 5.0

log = logging.getLogger(__name__)


class Group(Protocol):
    """What a link asks of its group."""

    def ready(self, link: int) -> Ready | None:
        """The registration to send; None while draining."""
        ...

    def heartbeat(self) -> WorkerHeartbeat | None:
        """None while the engine does not report."""
        ...


class BrokerLink:
    """The connection to one broker. `on_message` gets every message that concerns requests or the whole group."""

    def __init__(
        self,
        context: Any,
        endpoint: str,
        index: int,
        group: Group,
        on_message: Callable[[BrokerLink, Message], None],
    ) -> None:
        self.endpoint = endpoint
        self.index = index
        self.registered = asyncio.Event()
        self._group = group
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._epoch = b""
        self._heartbeat_s = READY_INTERVAL_S[1]
        self._liveness = 1
        self._last_heard = self._unreachable_since = time.monotonic()
        self._ready_interval_s = READY_INTERVAL_S[0]
        self._is_warned = False
        self._refusal = ""
        self._socket = transport.AsyncSocket(transport.connect_dealer(context, endpoint), self._on_frames)
        self._timer = self._loop.call_soon(self._tick)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message. False: it is lost, and the group registers again so that the broker learns of it."""
        if self._try_send(frames):
            return True
        if self.registered.is_set():
            log.info("the broker at %s takes no messages; registering again", self.endpoint)
            self._register_again()
        return False

    def close(self, reason: str) -> None:
        """Tell the broker that the group is gone, and close the socket."""
        self._timer.cancel()
        if self.registered.is_set():
            self._try_send(encode(Verb.DISCONNECT, header=Disconnect(reason=reason)))
            self.registered.clear()
        self._socket.close()

    def _try_send(self, frames: Sequence[bytes]) -> bool:
        try:
            self._socket.send(frames)
        except (transport.PeerFull, transport.PeerGone):
            return False
        return True

    def _tick(self) -> None:
        if self.registered.is_set():
            silent_s = time.monotonic() - self._last_heard
            if silent_s > self._liveness * self._heartbeat_s:
                log.warning("the broker at %s has been silent for %.1f s; registering again", self.endpoint, silent_s)
                self._register_again()
                return
            heartbeat = self._group.heartbeat()
            if heartbeat is not None:
                self._try_send(encode(Verb.HEARTBEAT, header=heartbeat))
            self._schedule(self._heartbeat_s)
            return
        ready = self._group.ready(self.index)
        if ready is not None:
            self._try_send(encode(Verb.READY, header=ready))
        self._warn_if_unreachable()
        self._schedule(self._ready_interval_s)
        self._ready_interval_s = min(2 * self._ready_interval_s, READY_INTERVAL_S[1])

    def _warn_if_unreachable(self) -> None:
        if not self._is_warned and time.monotonic() - self._unreachable_since > UNREACHABLE_WARNING_S:
            self._is_warned = True
            log.warning("no broker has answered at %s yet; still trying", self.endpoint)

    def _schedule(self, delay_s: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _register_again(self) -> None:
        self.registered.clear()
        self._unreachable_since = time.monotonic()
        self._is_warned = False
        self._schedule(self._ready_interval_s)

    def _on_frames(self, frames: list[bytes]) -> None:
        self._last_heard = time.monotonic()
        try:
            message = decode(frames)
        except MiiError as error:
            log.warning("refused a message from the broker at %s: %s", self.endpoint, error.message)
            # It may be a request, which somebody waits for.
            self._try_send(encode(Verb.ERROR, readable_id(frames), error.to_wire()))
            return
        try:
            if message.verb is Verb.REGISTERED:
                self._on_registered(parse_header(message, Registered))
            elif message.verb is Verb.DISCONNECT:
                self._on_disconnect(parse_header(message, Disconnect))
            elif message.verb is Verb.ERROR and message.request_id == NO_ID:
                log.warning("the broker at %s says: %s", self.endpoint, parse_header(message, ErrorHeader).message)
            elif message.verb is not Verb.HEARTBEAT:
                self._on_message(self, message)
        except MiiError as error:
            log.warning("dropped a message from the broker at %s: %s", self.endpoint, error.message)
        except Exception:
            # Whatever happens on one message, the link goes on.
            log.exception("failed on a message from the broker at %s", self.endpoint)

    def _on_registered(self, header: Registered) -> None:
        self._heartbeat_s = max(0.01, header.heartbeat_ms / 1000)
        self._liveness = max(1, header.liveness)
        self._ready_interval_s = READY_INTERVAL_S[0]
        self._refusal = ""
        if header.epoch != self._epoch:
            log.info("registered with the broker at %s", self.endpoint)
        self._epoch = header.epoch
        if not self.registered.is_set():
            self.registered.set()
            self._schedule(0)

    def _on_disconnect(self, header: Disconnect) -> None:
        if self.registered.is_set():
            log.info("the broker at %s ended the registration: %s", self.endpoint, header.reason)
            self._register_again()
        elif header.reason != self._refusal:
            log.warning("the broker at %s does not register this group: %s", self.endpoint, header.reason)
        self._refusal = header.reason
