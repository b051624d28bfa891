# SPDX-License-Identifier: Apache-2.0
"""A client's connection to one broker, and the requests that live on it.

When the broker vanishes and comes back (new epoch), unfinished requests are sent again with the token ids already
received, so that generation goes on behind them; when it does not come back in time, they end with BrokerUnavailable.
Which broker a request goes to is its owner's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from mii_zmq import protocol, transport
from mii_zmq.errors import (
    BrokerUnavailable,
    Draining,
    MiiError,
    NoWorkers,
    ProtocolError,
    UnknownDeployment,
    from_wire,
)
from mii_zmq.generation import GRANT, Generation
from mii_zmq.protocol import Credit, FinalBody, Hello, Message, Verb, Welcome

HELLO_INTERVAL_S = (0.01, 0.5)
"""Between two HELLOs to a broker that has not answered: first and longest, doubling."""
BROKER_GRACE_S = 15.0
"""How long unfinished requests wait for a vanished broker."""
CREDIT = 256
"""Rows of one request that may wait here for their reader; beyond that the broker merges them."""
GRANT_DELAY_S = 0.01
"""Grants of this time leave in one message."""

_ELSEWHERE = (Draining, NoWorkers, UnknownDeployment)
"""What another broker may be able to serve: this one shuts down, or has not (or no longer) heard of the workers."""

log = logging.getLogger(__name__)


class Link:
    """The connection to one broker: handshake, heartbeats, and the requests that live on it.

    `on_change` is called when the broker has come or gone, and may move requests away (`leave`); `take_over` when the
    broker cannot serve one: whether somebody else does.
    """

    def __init__(
        self,
        context: Any,
        endpoint: str,
        name: str,
        seen: set[str],
        credit: int,
        on_change: Callable[[], None],
        take_over: Callable[[Generation], bool],
    ) -> None:
        self.endpoint = endpoint
        self.up = asyncio.Event()
        self.seen = seen
        """Deployments that a broker of the client's was known to serve."""
        self.is_draining = False
        """The broker shuts down; it still finishes what it has."""
        self._on_change = on_change
        self._take_over = take_over
        self._owes_goodbye = False
        """The broker may still work on requests that have been moved away."""
        self._hello = Hello(name=name, batch=True, credit=credit)
        self._grants: Counter[bytes] = Counter()
        self._epoch: bytes | None = None
        self._heartbeat_s = 0.5
        self._liveness = 6
        self._heard = time.monotonic()
        self._down = asyncio.Event()
        self._down_since = self._heard
        self._was_up = False
        self._generations: dict[bytes, Generation] = {}
        self._asked: dict[bytes, asyncio.Future[Message]] = {}
        """Questions to the broker itself, by their ids."""
        self._socket = transport.AsyncSocket(transport.connect_dealer(context, endpoint), self._on_frames)
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def is_up(self) -> bool:
        return self.up.is_set()

    @property
    def is_expected(self) -> bool:
        """Down, but not for long enough to be given up."""
        return self._was_up and not self.is_up and time.monotonic() - self._down_since < BROKER_GRACE_S

    @property
    def takes_requests(self) -> bool:
        return self.is_up and not self.is_draining

    def submit(self, generation: Generation) -> None:
        """Send now, or with the next WELCOME if the broker is away."""
        if generation.is_sent or generation.link is not self:
            generation.note_sent_again(self.endpoint)
        generation.link = self
        generation.is_sent = False
        self._generations[generation.request_id] = generation
        if self.is_up:
            self._try_send(generation)

    def _try_send(self, generation: Generation) -> None:
        self._grants.pop(generation.request_id, None)
        try:
            self._socket.send(generation.to_frames())
            generation.is_sent = True
        except transport.PeerFull:
            # Not connected, or a broker that does not read: find out by HELLO, send again after WELCOME.
            generation.is_sent = False
            self._set_down()

    def leave(self) -> list[Generation]:
        """Give all unfinished requests away; should the broker be there after all, it learns of it before any other
        message."""
        generations, self._generations = self._generations, {}
        self._owes_goodbye = self._owes_goodbye or any(generation.is_sent for generation in generations.values())
        return list(generations.values())

    def _set_down(self) -> None:
        if not self.is_up:
            return
        self._down_since = time.monotonic()
        self.up.clear()
        self._down.set()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(BrokerUnavailable(f"the broker at {self.endpoint} is gone", retry_after_ms=1000))
        self._on_change()

    def cancel(self, generation: Generation) -> None:
        if self._generations.pop(generation.request_id, None) is not None:
            with contextlib.suppress(transport.PeerFull, transport.PeerGone):
                self._socket.send(protocol.encode(Verb.CANCEL, generation.request_id))

    def grant(self, generation: Generation) -> None:
        """The request's reader has taken GRANT more rows."""
        if not self._hello.credit:
            return
        if not self._grants:
            asyncio.get_running_loop().call_later(GRANT_DELAY_S, self._send_grants)
        self._grants[generation.request_id] += 1

    def _send_grants(self) -> None:
        """All of them, or (the broker is away) none: a grant that got lost would be a stream that stands still."""
        self._grants = Counter({i: count for i, count in self._grants.items() if i in self._generations})
        while self._grants and self.is_up:
            try:
                header = Credit(credit=GRANT, request_ids=list(self._grants))
                self._socket.send(protocol.encode(Verb.CREDIT, header=header))
            except transport.PeerFull:
                self._set_down()
            else:
                self._grants = Counter({i: count - 1 for i, count in self._grants.items() if count > 1})

    async def ask(self, verb: Verb, header: Any, timeout_s: float) -> Message:
        """Send a question that the broker answers by the same verb.

        For a link that is up. It waits for no broker, as requests do: one that is lost meanwhile is noticed within a
        heartbeat when its connection closes, and one that just says nothing has `timeout_s`.

        Raises:
            BrokerUnavailable: it does not answer in time, or is lost meanwhile.
            MiiError: with which it refuses.
        """
        request_id = protocol.new_request_id()
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        try:
            self._socket.send(protocol.encode(verb, request_id, header))
        except transport.PeerFull:
            # As with a request: not connected, or a broker that does not read.
            self._set_down()
            raise BrokerUnavailable(f"the broker at {self.endpoint} is gone", retry_after_ms=1000) from None
        self._asked[request_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise BrokerUnavailable(f"the broker at {self.endpoint} did not answer in {timeout_s:g} s") from None
        finally:
            self._asked.pop(request_id, None)

    async def status(self, timeout_s: float) -> dict[str, Any]:
        """The broker's STATUS body; raises as `ask`."""
        message = await self.ask(Verb.STATUS, None, timeout_s)
        status = protocol.unpack_map(message.body, "body")
        deployments = status.get("deployments")
        if isinstance(deployments, dict):
            known = [name for name, facts in deployments.items() if isinstance(facts, dict) and facts.get("groups")]
            self.seen.update(known)
        return status

    async def close(self) -> None:
        self._task.cancel()
        # Unlike awaiting it and suppressing CancelledError, this leaves a cancellation of the caller standing.
        await asyncio.wait([self._task])
        for generation in list(self._generations.values()):
            generation.cancel()
        with contextlib.suppress(transport.PeerFull, transport.PeerGone):
            if self.is_up:
                self._socket.send(protocol.encode(Verb.DISCONNECT))
        self.up.clear()
        self._socket.close()

    async def _run(self) -> None:
        """Say HELLO until WELCOME comes, then send heartbeats until the broker falls silent; until cancelled.

        Not with asyncio.wait_for, which before Python 3.12 swallows a cancellation that meets the event waited for.
        """
        while True:
            interval_s = HELLO_INTERVAL_S[0]
            while not self.is_up:
                with contextlib.suppress(transport.PeerFull):
                    if self._owes_goodbye:
                        self._socket.send(protocol.encode(Verb.DISCONNECT))
                    self._socket.send(protocol.encode(Verb.HELLO, header=self._hello))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self.up.wait()
                interval_s = min(2 * interval_s, HELLO_INTERVAL_S[1])
                if not self.is_up and time.monotonic() - self._down_since > BROKER_GRACE_S:
                    self._fail_all(BrokerUnavailable(f"the broker at {self.endpoint} is gone", retry_after_ms=1000))
            while self.is_up:
                try:
                    self._socket.send(protocol.encode(Verb.HEARTBEAT))
                except transport.PeerFull:
                    self._set_down()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._heartbeat_s):
                        await self._down.wait()
                if time.monotonic() - self._heard > self._liveness * self._heartbeat_s:
                    log.warning("the broker at %s has fallen silent", self.endpoint)
                    # It may have given this client up, and its word of that may be lost: everything is sent again.
                    self._epoch, self._owes_goodbye = None, True
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
                    _finish(generation, message)
            case Verb.ERROR:
                self._on_error(message)
            case Verb.WELCOME:
                self._on_welcome(protocol.parse_header(message, Welcome))
            case Verb.STATUS | Verb.ABORT | Verb.RESET_PREFIX_CACHE:
                future = self._asked.get(message.request_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Verb.HEARTBEAT:
                if message.header.get("epoch", self._epoch) != self._epoch:
                    self._set_down()
                elif message.header.get("is_draining") is True:
                    self.is_draining = True
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
            if isinstance(error, Draining):
                self.is_draining = True
            if isinstance(error, _ELSEWHERE):
                generation.refused_by.add(self)
                if self._take_over(generation):
                    return
            generation.fail(error)
        elif (future := self._asked.get(message.request_id)) is not None:
            if not future.done():
                future.set_exception(error)
        elif message.request_id == protocol.NO_ID:
            log.warning("the broker reports: %s", error)

    def _on_welcome(self, welcome: Welcome) -> None:
        self._heartbeat_s = max(0.01, welcome.heartbeat_ms / 1000)
        self._liveness = welcome.liveness
        is_new = welcome.epoch != self._epoch
        self._epoch = welcome.epoch
        self.seen.update(welcome.deployments)
        self._was_up = True
        self._owes_goodbye = False
        if is_new:
            self.is_draining = False
        self._down.clear()
        self.up.set()
        again = [g for g in self._generations.values() if is_new or not g.is_sent]
        if again:
            log.warning("the broker at %s is back; sending %d requests again", self.endpoint, len(again))
        for generation in again:
            if generation.is_sent:
                generation.note_sent_again(self.endpoint)
            self._try_send(generation)
        self._send_grants()
        self._on_change()


def _finish(generation: Generation, message: Message) -> None:
    """Nothing follows a FINAL, so one that cannot be read ends its request, too."""
    try:
        final = protocol.parse_body(message, FinalBody)
    except MiiError as error:
        generation.fail(ProtocolError(f"the last message of the request cannot be read: {error.message}"))
    else:
        generation.on_final(final, *message.raw[:2])
