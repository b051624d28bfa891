# SPDX-License-Identifier: Apache-2.0
"""The worker side of the broker's state: registration, fencing, heartbeats, output. Pure: actions come out.

A group is one incarnation on one connection. Whoever is not registered hears DISCONNECT and nothing else, so that a
worker that was given up, or that outlived a broker, registers again and its leftovers end. Rows count only from the
group that the request is assigned to, and only in sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from mii_zmq.broker.credit import num_emitted
from mii_zmq.broker.liveness import Liveness, without
from mii_zmq.broker.losses import lose, retry
from mii_zmq.broker.prefix_resets import PrefixResets
from mii_zmq.broker.records import Address, Deployment, Group, Request, ToWorker
from mii_zmq.broker.requests import Requests
from mii_zmq.broker.routing import MAX_TOKENS
from mii_zmq.broker.tokens import forward_tokens
from mii_zmq.config import check_deployment_name
from mii_zmq.errors import ConfigError, Draining, MiiError, ProtocolError, WorkerLost
from mii_zmq.logs import facts
from mii_zmq.protocol import (
    NO_ID,
    BrokerHeartbeat,
    Disconnect,
    ErrorHeader,
    FinalHeader,
    Message,
    Ready,
    Registered,
    Verb,
    WorkerHeartbeat,
    encode,
    parse_header,
)

log = logging.getLogger(__name__)

MAX_DEPLOYMENTS = 1024
MAX_HISTOGRAMS = 64
"""Of one group; each costs its bytes in every STATUS."""
CROSSING_S = 1.0
"""A request that was sent to a group longer ago than this has arrived there, or is lost."""
FENCE_INTERVAL_S = 0.25
"""A stream of stale messages is answered that often."""


class Workers:
    """Events of the worker socket in, actions into `requests.actions`."""

    def __init__(self, requests: Requests, resets: PrefixResets, liveness: Liveness, epoch: bytes) -> None:
        self._requests = requests
        self._resets = resets
        self._liveness = liveness
        self._epoch = epoch
        self.by_address: dict[Address, Group] = {}
        self._fenced: dict[Address, float] = {}
        self._verbs: dict[Verb, Callable[[Group, Message, Sequence[bytes], float], None]] = {
            Verb.TOKENS: self._on_tokens,
            Verb.FINAL: self._on_final,
            Verb.ERROR: self._on_error,
            Verb.HEARTBEAT: self._on_heartbeat,
            Verb.DRAIN: self._on_drain,
            Verb.ACCEPTED: self._on_accepted,
            Verb.RESET_PREFIX_CACHE: self._on_prefix_cache_reset,
        }

    def on_message(self, address: Address, message: Message, frames: Sequence[bytes], now: float) -> None:
        """`frames` is what `message` was decoded from; output is passed on as it came."""
        group = self.by_address.get(address)
        if group is not None:
            group.last_seen = now
        try:
            if message.verb is Verb.READY:
                self._on_ready(address, parse_header(message, Ready), now)
            elif message.verb is Verb.DISCONNECT:
                # Only a group that drains leaves of its own will; any other one has lost its engine.
                crashed = group is not None and not group.is_draining
                reason = parse_header(message, Disconnect).reason[:200]
                self._lose(group, f"it said goodbye: {reason}", now, crashed=crashed)
            elif group is None:
                self._fence(address, now)
            else:
                on_verb = self._verbs.get(message.verb)
                if on_verb is None:
                    raise ProtocolError(f"a worker may not send {message.verb.name}")
                on_verb(group, message, frames, now)
        except MiiError as error:
            self.on_malformed(address, error, now)

    def on_malformed(self, address: Address, error: MiiError, now: float) -> None:
        """A worker that breaks the contract is cut off; it may register again."""
        self._requests.counters.malformed += 1
        self._disconnect(address, error.message)
        self._lose(self.by_address.get(address), f"it broke the protocol: {error.message}", now)

    def on_gone(self, address: Address, now: float) -> None:
        self._lose(self.by_address.get(address), "its connection closed", now)

    def tick(self, now: float) -> None:
        for group in list(self.by_address.values()):
            if self._liveness.is_dead(group.last_seen, now):
                self._lose(group, f"no sign of life for {now - group.last_seen:.1f} s", now)
            elif self._liveness.is_overdue(max(group.last_seen, group.last_asked), now):
                self._ask(group, now)
        for address in [a for a, since in self._fenced.items() if now - since > FENCE_INTERVAL_S]:
            del self._fenced[address]

    def forgive(self, stall_s: float, now: float) -> None:
        """The broker itself was stopped; nobody is to blame for silence."""
        for group in self.by_address.values():
            group.last_seen = without(stall_s, group.last_seen, now)

    def disconnect_all(self, reason: str) -> None:
        for address in self.by_address:
            self._disconnect(address, reason)

    # Registration.

    def _on_ready(self, address: Address, ready: Ready, now: float) -> None:
        _check_ready(ready)
        self._fenced.pop(address, None)
        if ready.deployment not in self._requests.deployments and len(self._requests.deployments) >= MAX_DEPLOYMENTS:
            self._disconnect(address, f"the broker knows {MAX_DEPLOYMENTS} deployments, the most that are allowed")
            return
        here = self.by_address.get(address)
        if here is not None and not _is_same(here, ready):
            self._lose(here, "it registered as another group", now, crashed=False)
        other = next((g for g in self.by_address.values() if g.name == ready.group), None)
        if other is not None and other.incarnation != ready.incarnation:
            # Finds out at once when the other one's connection is gone; the newcomer's next READY then succeeds.
            self._ask(other, now)
            self._disconnect(address, f"duplicate: a group named {ready.group!r} is alive; choose another name or wait")
            return
        if other is not None and not _is_same(other, ready):
            self._lose(other, "it registered for another deployment", now, crashed=False)
            other = None
        if other is None:
            group, lost = self._register(address, ready, now), []
        else:
            group, lost = other, self._move(other, address, ready, now)
        registered = Registered(
            epoch=self._epoch,
            heartbeat_ms=int(self._liveness.interval_s * 1000),
            liveness=self._liveness.missed,
        )
        self._requests.actions.append(ToWorker(address, encode(Verb.REGISTERED, NO_ID, registered)))
        leftovers = [request_id for request_id in ready.in_flight if request_id not in group.requests]
        if leftovers:
            self._requests.cancel_at(group, leftovers, now)
        lose(self._requests, lost, "the group's connection broke", now, crashed=False)
        self._requests.dispatch(group.deployment, now)

    def _register(self, address: Address, ready: Ready, now: float) -> Group:
        deployment = self._requests.deployments.get(ready.deployment)
        if deployment is None:
            deployment = self._requests.deployments[ready.deployment] = Deployment(ready.deployment, last_ready=now)
        group = Group(
            name=ready.group,
            incarnation=ready.incarnation,
            address=address,
            deployment=deployment,
            max_requests=ready.max_requests,
            max_model_len=ready.max_model_len,
            info=ready.info,
            registered_at=now,
            last_seen=now,
        )
        self.by_address[address] = deployment.groups[group.name] = group
        deployment.last_ready = now
        deployment.was_served = True
        log.info("group %r of deployment %r registered", group.name, deployment.name, extra=facts(group=group.name))
        return group

    def _move(self, group: Group, address: Address, ready: Ready, now: float) -> list[Request]:
        """The same incarnation again, with news or on a new connection; returns the requests that it has lost.

        What was under way on an old connection is lost with it. Requests that the group still runs go on (a hole in
        their rows would show). On the same connection a request sent a moment ago may have crossed this READY.
        """
        is_new = group.address != address
        group.max_requests, group.max_model_len, group.info = ready.max_requests, ready.max_model_len, ready.info
        group.is_draining = False
        if is_new:
            del self.by_address[group.address]
            self.by_address[address] = group
            group.address = address
            self._resets.on_lost(group, "the group's connection broke")
            group.last_seen = now
            group.barred.clear()
            log.info("group %r of deployment %r is back on a new connection", group.name, group.deployment.name)
        running = set(ready.in_flight)
        return [
            request
            for request_id, request in group.requests.items()
            if request_id not in running and (is_new or request.next_seq or now - request.assigned_at > CROSSING_S)
        ]

    def _lose(self, group: Group | None, why: str, now: float, *, crashed: bool = True) -> None:
        if group is None:
            return
        deployment = group.deployment
        if not group.is_draining:
            deployment.last_ready = now
        del self.by_address[group.address]
        del deployment.groups[group.name]
        self._resets.on_lost(group, f"the group is gone: {why}")
        if group.requests or not group.is_draining:
            self._requests.counters.groups_lost += 1
            log.warning(
                "group %r of deployment %r is gone with %d requests: %s",
                group.name, deployment.name, len(group.requests), why,
                extra=facts(group=group.name, deployment=deployment.name),
            )  # fmt: skip
        else:
            log.info("group %r of deployment %r left", group.name, deployment.name)
        lose(self._requests, list(group.requests.values()), why, now, crashed=crashed)
        self._requests.dispatch(deployment, now)

    def _fence(self, address: Address, now: float) -> None:
        self._requests.counters.fenced += 1
        if now - self._fenced.get(address, now - 1) > FENCE_INTERVAL_S:
            self._fenced[address] = now
            self._disconnect(address, "this connection is not registered; send READY")

    def _disconnect(self, address: Address, reason: str) -> None:
        self._requests.actions.append(ToWorker(address, encode(Verb.DISCONNECT, NO_ID, Disconnect(reason=reason))))

    def _ask(self, group: Group, now: float) -> None:
        group.last_asked = now
        frames = encode(Verb.HEARTBEAT, NO_ID, BrokerHeartbeat(epoch=self._epoch))
        self._requests.actions.append(ToWorker(group.address, frames))

    # What registered groups send.

    def _on_heartbeat(self, group: Group, message: Message, frames: Sequence[bytes], now: float) -> None:
        heartbeat = parse_header(message, WorkerHeartbeat)
        if heartbeat.incarnation != group.incarnation:
            raise ProtocolError("the heartbeat's incarnation is not the registered one")
        if heartbeat.state not in ("ready", "draining"):
            raise ProtocolError(f"the heartbeat's state is {heartbeat.state[:40]!r}, allowed: 'ready', 'draining'")
        if len(heartbeat.histograms) > MAX_HISTOGRAMS:
            raise ProtocolError(f"a heartbeat has at most {MAX_HISTOGRAMS} histograms, not {len(heartbeat.histograms)}")
        group.load = heartbeat.load
        group.histograms = heartbeat.histograms
        reported = min(heartbeat.load.outstanding_tokens, MAX_TOKENS)
        group.unaccounted_tokens = max(0, reported - group.outstanding_tokens)
        if heartbeat.state == "draining":
            self._drain(group, now)
        answer = encode(Verb.HEARTBEAT, NO_ID, BrokerHeartbeat(epoch=self._epoch))
        self._requests.actions.append(ToWorker(group.address, answer))

    def _on_drain(self, group: Group, message: Message, frames: Sequence[bytes], now: float) -> None:
        self._drain(group, now)

    def _drain(self, group: Group, now: float) -> None:
        if not group.is_draining:
            group.is_draining = True
            group.deployment.last_ready = now
            log.info("group %r of deployment %r is draining", group.name, group.deployment.name)

    def _on_tokens(self, group: Group, message: Message, frames: Sequence[bytes], now: float) -> None:
        forward_tokens(self._requests, group, message, frames, now)

    def _on_final(self, group: Group, message: Message, frames: Sequence[bytes], now: float) -> None:
        request = group.requests.get(message.request_id)
        if request is None:
            self._drop(group, message, now)
            return
        reason = parse_header(message, FinalHeader).finish_reason or request.delivered.finish_reason or ""
        self._requests.finish(request, frames, reason, now)

    def _on_error(self, group: Group, message: Message, frames: Sequence[bytes], now: float) -> None:
        request = group.requests.get(message.request_id)
        error = parse_header(message, ErrorHeader)
        if message.request_id == NO_ID:
            log.warning("group %r reports: %s", group.name, error.message[:500])
        elif self._resets.on_answer(group, message.request_id, error.message):
            pass
        elif request is None:
            self._drop(group, message, now)
        elif error.code == Draining.code:
            # Sent before the group's DRAIN was heard here; nothing of it ran.
            self._drain(group, now)
            retry(self._requests, request, "it is draining", counts=False)
            self._requests.dispatch(group.deployment, now)
        elif error.code == WorkerLost.code:
            # The group's engine takes nothing; its restart is a new incarnation.
            group.barred[request.request_id] = now
            retry(self._requests, request, "the group's engine took no requests")
            self._requests.dispatch(group.deployment, now)
        else:
            if request.withheld is not None:
                # What the group counts as delivered has not all left.
                header = {**message.header, "emitted_tokens": num_emitted(request)}
                frames = encode(Verb.ERROR, request.request_id, header)
            self._requests.fail_with(request, frames, error.code)
            self._requests.dispatch(group.deployment, now)

    def _on_accepted(self, group: Group, message: Message, frames: Sequence[bytes], now: float) -> None:
        """The broker has told the client already."""

    def _on_prefix_cache_reset(self, group: Group, message: Message, frames: Sequence[bytes], now: float) -> None:
        self._resets.on_answer(group, message.request_id)

    def _drop(self, group: Group, message: Message, now: float) -> None:
        """The last word on a request that is no longer this group's."""
        if group.barred.pop(message.request_id, None) is None:
            self._requests.counters.dropped_rows += 1
        else:
            self._requests.dispatch(group.deployment, now)


def _check_ready(ready: Ready) -> None:
    try:
        check_deployment_name(ready.deployment)
    except ConfigError as error:
        raise ProtocolError(f"READY: {error.message}") from None
    if not 0 < len(ready.group) <= 200:
        raise ProtocolError(f"READY: a group name has 1 to 200 characters, this one has {len(ready.group)}")
    if len(ready.incarnation) != 16 or any(len(request_id) != 16 for request_id in ready.in_flight):
        raise ProtocolError("READY: the incarnation and the ids in in_flight have 16 bytes each")
    if ready.max_requests < 1:
        raise ProtocolError(f"READY: max_requests is {ready.max_requests}; it must be at least 1")


def _is_same(group: Group, ready: Ready) -> bool:
    return (group.name, group.incarnation, group.deployment.name) == (ready.group, ready.incarnation, ready.deployment)
