# SPDX-License-Identifier: Apache-2.0
"""The client side of the broker's state: connections, their verbs, their silence. Pure: actions come out.

A connection is known from its first message. One that never said HELLO owes no heartbeats and is forgotten when it is
idle; one that did is given up after the liveness time, and its requests end. Whatever a client sends, the answer is a
message to that client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mii_zmq.broker.admission import check_room
from mii_zmq.broker.credit import UNLIMITED, grant
from mii_zmq.broker.liveness import Liveness, without
from mii_zmq.broker.prefix_resets import PrefixResets
from mii_zmq.broker.records import Address, Client, Deployment, Note, ToClient
from mii_zmq.broker.requests import Requests
from mii_zmq.errors import (
    Cancelled,
    Draining,
    InvalidRequest,
    MiiError,
    NoWorkers,
    Overloaded,
    PoisonRequest,
    ProtocolError,
    RequestTooLarge,
    UnknownDeployment,
)
from mii_zmq.protocol import (
    MAX_BODY_BYTES,
    MAX_GENERATE_HEADER_BYTES,
    NO_ID,
    Abort,
    Aborted,
    BrokerHeartbeat,
    Cancel,
    Credit,
    Disconnect,
    GenerateHeader,
    Hello,
    Message,
    ResetPrefixCache,
    Verb,
    Welcome,
    encode,
    parse_header,
)
from mii_zmq.trace_context import REQUEST_ID

log = logging.getLogger(__name__)

CAPABILITIES = ("batch", "credit", "logprobs", "abort", "reset_prefix_cache")
IDLE_CLIENT_S = 600.0
SETTLING_S = 10.0
"""After its start the broker cannot tell an unknown deployment from one whose workers have not registered yet."""
MAX_EXPECTED = 64
"""Deployments that requests may wait for in that time."""
MAX_SHOWN_NAMES = 20
MAX_NAME_LENGTH = 200


class Clients:
    """Events of the client socket in, actions into `requests.actions`."""

    def __init__(
        self,
        requests: Requests,
        resets: PrefixResets,
        liveness: Liveness,
        epoch: bytes,
        started_at: float,
        status: Callable[[float], Any],
    ) -> None:
        self._requests = requests
        self._resets = resets
        self._liveness = liveness
        self._epoch = epoch
        self._started_at = started_at
        self._status = status
        self.by_address: dict[Address, Client] = {}
        self.is_draining = False
        self._num_seen = 0
        self._verbs: dict[Verb, Callable[[Client, Message, float], None]] = {
            Verb.GENERATE: self._on_generate,
            Verb.CANCEL: self._on_cancel,
            Verb.CREDIT: self._on_credit,
            Verb.ABORT: self._on_abort,
            Verb.RESET_PREFIX_CACHE: self._on_reset_prefix_cache,
            Verb.HELLO: self._on_hello,
            Verb.HEARTBEAT: self._on_heartbeat,
            Verb.STATUS: self._on_status,
            Verb.DISCONNECT: self._on_disconnect,
        }

    def on_message(self, address: Address, message: Message, now: float) -> None:
        client = self._seen(address, now)
        on_verb = self._verbs.get(message.verb)
        try:
            if on_verb is None:
                raise ProtocolError(f"a client may not send {message.verb.name}")
            on_verb(client, message, now)
        except MiiError as error:
            if message.verb is Verb.GENERATE:
                self._requests.counters.refused += 1
                if not isinstance(error, Overloaded):
                    self._requests.counters.rejections[error.code] += 1
                self._note_refusal(message, error)
            self._answer(address, message.request_id, error, is_generate=message.verb is Verb.GENERATE)

    def _note_refusal(self, message: Message, error: MiiError) -> None:
        trace = message.header.get("traceparent")
        if self._requests.traces and isinstance(trace, str):
            self._requests.actions += [Note(trace, "failed", {"code": error.code}), Note(trace, "ended", {})]

    def on_malformed(self, address: Address, request_id: bytes, error: MiiError) -> None:
        """Answer a message that could not be decoded."""
        self._answer(address, request_id, error, is_generate=False)

    def _answer(self, address: Address, request_id: bytes, error: MiiError, is_generate: bool) -> None:
        if not is_generate and request_id in self._requests.by_id:
            # It would read as the end of that request, which goes on.
            request_id = NO_ID
        self._requests.counters.errors[error.code] += 1
        self._requests.counters.malformed += isinstance(error, ProtocolError)
        self._send(address, encode(Verb.ERROR, request_id, error.to_wire()))

    def on_gone(self, address: Address, now: float) -> None:
        """The connection is closed: nobody will read what its requests would still produce."""
        client = self.by_address.pop(address, None)
        self._resets.on_client_gone(address)
        if client is not None:
            self._requests.counters.clients_lost += bool(client.requests)
            self._requests.cancel(client.requests.values(), None, now)

    def tick(self, now: float) -> None:
        for client in list(self.by_address.values()):
            if client.said_hello:
                if self._liveness.is_dead(client.last_seen, now):
                    self._give_up(client, now)
                elif client.requests and self._liveness.is_overdue(max(client.last_seen, client.last_asked), now):
                    client.last_asked = now
                    self._send_heartbeat(client, NO_ID)
            elif not client.requests and now - client.last_seen > IDLE_CLIENT_S:
                del self.by_address[client.address]

    def forgive(self, stall_s: float, now: float) -> None:
        """The broker itself was stopped; nobody is to blame for silence."""
        for client in self.by_address.values():
            client.last_seen = without(stall_s, client.last_seen, now)

    def _give_up(self, client: Client, now: float) -> None:
        """Should it be back one day, DISCONNECT tells it that it has no requests here; it may send them again."""
        self._requests.counters.clients_lost += bool(client.requests)
        log.info("client %r missed its heartbeats with %d requests", client.name, len(client.requests))
        self._resets.on_client_gone(client.address)
        self._requests.cancel(client.requests.values(), None, now)
        del self.by_address[client.address]
        self._disconnect(client.address, "the connection missed its heartbeats; send HELLO")

    def _seen(self, address: Address, now: float) -> Client:
        client = self.by_address.get(address)
        if client is None:
            self._num_seen += 1
            client = self.by_address[address] = Client(number=self._num_seen, address=address, last_seen=now)
        client.last_seen = now
        return client

    def _on_generate(self, client: Client, message: Message, now: float) -> None:
        if message.num_header_bytes > MAX_GENERATE_HEADER_BYTES:
            text = (
                f"the header of GENERATE has {message.num_header_bytes} bytes; the limit is {MAX_GENERATE_HEADER_BYTES}"
            )
            raise RequestTooLarge(text)
        header = parse_header(message, GenerateHeader)
        if message.request_id == NO_ID:
            raise InvalidRequest("GENERATE needs a request id of 16 random bytes, not zeros", param="request_id")
        if message.request_id in client.requests:
            raise InvalidRequest("a request with this id is running; ids must be new and random", param="request_id")
        if client.is_one_shot and header.stream:
            raise InvalidRequest("a REQ socket gets one reply; use stream=false, or a DEALER socket", param="stream")
        if len(header.tenant) > MAX_NAME_LENGTH:
            raise InvalidRequest(f"a tenant has at most {MAX_NAME_LENGTH} characters", param="tenant")
        if not -(2**31) <= header.priority < 2**31:
            raise InvalidRequest(f"priority is {header.priority}, allowed: 32-bit integers", param="priority")
        if header.deadline_ms is not None and not 0 < header.deadline_ms < 2**31:
            raise InvalidRequest(f"deadline_ms is {header.deadline_ms}, allowed: 1 to 2^31 - 1", param="deadline_ms")
        if message.raw and len(message.raw[0]) % 4:
            raise InvalidRequest("raw frame 0 of GENERATE holds token ids of 4 bytes each", param="resume")
        if self.is_draining:
            raise Draining("the broker is shutting down; send the request to another one", retry_after_ms=1000)
        deployment = self._requests.deployments.get(header.deployment) or self._expect(header, now)
        self._check_quarantine(header.deployment, message.body, now)
        check_room(self._requests, client, deployment, header, message, now)
        earlier = self._requests.by_id.get(message.request_id)
        if earlier is not None:
            # Ids are random, so this is the same client on a new connection.
            self._requests.cancel([earlier], Cancelled("another connection sent this request again"), now)
        self._requests.accept(client, deployment, header, message, now)

    def _check_quarantine(self, deployment: str, body: bytes, now: float) -> None:
        try:
            self._requests.quarantine.check(deployment, body, now)
        except PoisonRequest:
            self._requests.counters.poison_refusals += 1
            raise

    def _expect(self, header: GenerateHeader, now: float) -> Deployment:
        """A deployment that no worker has registered for: one to wait for, if the client has seen it and the broker has
        just started."""
        name = header.deployment
        known = [known.name for known in self._requests.deployments.values() if known.was_served]
        left_s = self._started_at + SETTLING_S - now
        if header.seen and left_s > 0 and len(self._requests.deployments) - len(known) < MAX_EXPECTED:
            return self._requests.expect(name, left_s, now)
        if not known and left_s > 0:
            raise NoWorkers("no worker has registered since the broker started", retry_after_ms=500)
        shown = ", ".join(known[:MAX_SHOWN_NAMES]) or "none"
        raise UnknownDeployment(f"deployment {name[:MAX_NAME_LENGTH]!r} is unknown; known: {shown}", param="deployment")

    def _on_cancel(self, client: Client, message: Message, now: float) -> None:
        if client.is_one_shot:
            raise ProtocolError("a REQ socket cannot cancel: it waits for its reply; use a DEALER socket")
        wanted = {*parse_header(message, Cancel).request_ids, message.request_id}
        requests = [client.requests[request_id] for request_id in wanted if request_id in client.requests]
        self._requests.cancel(requests, Cancelled("the request was cancelled"), now)

    def _on_abort(self, client: Client, message: Message, now: float) -> None:
        """End requests wherever they came from; their own connections are told."""
        asked, by_id = parse_header(message, Abort), self._requests.by_id
        # What counts as no name in a GENERATE is none here: the empty one would be that of every unnamed request.
        ids, names = set(asked.request_ids), {name for name in asked.names if REQUEST_ID.fullmatch(name)}
        candidates = by_id.values() if names or asked.everything else [by_id[i] for i in ids if i in by_id]
        ended = [
            request
            for request in candidates
            if request.tenant == asked.tenant
            and (asked.everything or request.request_id in ids or request.header.get("x_request_id", "") in names)
        ]
        found = Aborted(
            num_requests=len(ended),
            request_ids=[request.request_id for request in ended if request.request_id in ids],
            names=sorted({request.header.get("x_request_id", "") for request in ended} & names),
        )
        self._requests.cancel(ended, Cancelled("the request was aborted"), now)
        self._send(client.address, encode(Verb.ABORT, message.request_id, found))

    def _on_reset_prefix_cache(self, client: Client, message: Message, now: float) -> None:
        name = parse_header(message, ResetPrefixCache).deployment
        deployment = self._requests.deployments.get(name)
        if deployment is None:
            text = f"deployment {name[:MAX_NAME_LENGTH]!r} is unknown"
            raise UnknownDeployment(text, param="deployment")
        self._resets.start(client, message.request_id, deployment, now)

    def _on_credit(self, client: Client, message: Message, now: float) -> None:
        header = parse_header(message, Credit)
        if not 0 < header.credit < 2**31:
            raise InvalidRequest(f"credit is {header.credit}, allowed: 1 to 2^31 - 1", param="credit")
        if client.is_one_shot:
            raise ProtocolError("a REQ socket gets no TOKENS and grants no credit")
        for request_id in header.request_ids or (message.request_id,):
            request = client.requests.get(request_id)
            if request is not None:
                grant(self._requests, request, header.credit)

    def _on_hello(self, client: Client, message: Message, now: float) -> None:
        hello = parse_header(message, Hello)
        if not 0 <= hello.credit < 2**31:
            raise InvalidRequest(f"credit is {hello.credit}, allowed: 0 to 2^31 - 1", param="credit")
        client.name = hello.name[:MAX_NAME_LENGTH]
        # A REQ socket cannot send heartbeats while it waits for a reply.
        client.said_hello = not client.is_one_shot
        client.batch = hello.batch and not client.is_one_shot
        client.credit = hello.credit or UNLIMITED
        welcome = Welcome(
            epoch=self._epoch,
            heartbeat_ms=int(self._liveness.interval_s * 1000),
            liveness=self._liveness.missed,
            max_body_bytes=MAX_BODY_BYTES,
            deployments=[name for name, deployment in self._requests.deployments.items() if deployment.groups],
            capabilities=list(CAPABILITIES),
        )
        self._send(client.address, encode(Verb.WELCOME, message.request_id, welcome))

    def _on_heartbeat(self, client: Client, message: Message, now: float) -> None:
        if not client.said_hello:
            if client.is_one_shot:
                raise ProtocolError("a REQ socket sends no heartbeats")
            # It thinks of a connection that has been given up, or was broken and remade underneath.
            self._disconnect(client.address, "this connection has not said HELLO")
            return
        self._send_heartbeat(client, message.request_id)

    def _send_heartbeat(self, client: Client, request_id: bytes) -> None:
        header = BrokerHeartbeat(epoch=self._epoch, is_draining=self.is_draining)
        self._send(client.address, encode(Verb.HEARTBEAT, request_id, header))

    def _on_status(self, client: Client, message: Message, now: float) -> None:
        self._send(client.address, encode(Verb.STATUS, message.request_id, None, self._status(now)))

    def _on_disconnect(self, client: Client, message: Message, now: float) -> None:
        self.on_gone(client.address, now)

    def disconnect_all(self, reason: str) -> None:
        """Say goodbye to everybody who said hello."""
        for client in self.by_address.values():
            if client.said_hello:
                self._disconnect(client.address, reason)

    def _disconnect(self, address: Address, reason: str) -> None:
        self._send(address, encode(Verb.DISCONNECT, NO_ID, Disconnect(reason=reason)))

    def _send(self, address: Address, frames: list[bytes]) -> None:
        self._requests.actions.append(ToClient(address, frames))
