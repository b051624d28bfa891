# SPDX-License-Identifier: Apache-2.0
"""The life of a request in the broker: accepted, waiting, running on a group, ended. Pure: actions come out.

What becomes of those that their group does not finish is decided in `losses`.

Invariants: an accepted request leaves by exactly one of `finish`, `fail` (or `fail_with`) and `cancel`, which send its
client, if it is still there, the one terminal message; no group is given more than its `max_requests`; a request that
is given to another group goes on behind the rows that were forwarded.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mii_zmq.broker import admission, credit, suspects
from mii_zmq.broker.liveness import without
from mii_zmq.broker.records import (
    Action,
    Client,
    Counters,
    Deployment,
    Group,
    Note,
    Request,
    RequestState,
    ToClient,
    ToWorker,
)
from mii_zmq.broker.routing import estimate_tokens
from mii_zmq.errors import DeadlineExceeded, MiiError, NoWorkers, WorkerLost
from mii_zmq.protocol import NO_ID, GenerateHeader, Message, Verb, encode
from mii_zmq.resume import Delivered
from mii_zmq.trace_context import parse

DEADLINE_GRACE_S = 2.0
"""A worker ends its requests at their deadlines; the broker does it that much later, should the worker not."""
CANCEL_ANSWER_S = 60.0
"""A worker that has not ended a cancelled request by then is not waited for any longer."""
MAX_HELD_BYTES = 2**30
"""Headers, bodies and raw frames of unfinished requests, all together."""
_DEADLINE_TEXT = "the request's deadline passed before it finished"

KNOWN_REASONS = frozenset(("stop", "length", "cancelled", "error"))


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that the broker's configuration sets."""

    max_queued_requests: int
    max_queued_tokens: int
    tenant_share: float
    max_client_requests: int
    max_attempts: int
    quarantine_s: float
    resume: bool
    """Keep the ids of rows that were forwarded; else a stream that loses its group behind its first row ends."""
    group_wait_s: float
    """Requests wait that long for a group after the deployment's last one went away; then they end."""
    slow_reader_s: float
    slow_reader_bytes: int
    max_held_bytes: int = MAX_HELD_BYTES


class Requests:
    """All unfinished requests, and the only place where their state changes."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counters = Counters()
        self.deployments: dict[str, Deployment] = {}
        self.by_id: dict[bytes, Request] = {}
        self.actions: list[Action] = []
        """Collected here by every part of the state; taken out after each event."""
        self.traces = False
        """Say by Notes what happens to requests whose trace context asks for that."""
        self.quarantine = suspects.Quarantine(limits.quarantine_s)
        self.held_bytes = 0
        """Headers, bodies, raw frames, forwarded ids and withheld output of all unfinished requests."""
        self.starving: dict[Request, float] = {}
        """Requests with withheld output, and since when; in order of time."""
        self._deadlines: list[tuple[float, int, Request]] = []
        self._num_admitted = 0
        self._num_picked = 0

    # Ways in.

    def expect(self, name: str, wait_s: float, now: float) -> Deployment:
        """A deployment that nobody serves yet; its requests wait for `wait_s`, then it is forgotten."""
        deployment = Deployment(name, last_ready=now + wait_s - self.limits.group_wait_s, was_served=False)
        self.deployments[name] = deployment
        return deployment

    def accept(
        self, client: Client, deployment: Deployment, header: GenerateHeader, message: Message, now: float
    ) -> Request:
        """Take a request in; the caller has checked everything."""
        num_bytes = message.num_bytes
        num_resumed = len(message.raw[0]) // 4 if message.raw else 0
        num_tokens = estimate_tokens(header.num_tokens, len(message.body), num_resumed)
        self._num_admitted += 1
        request = Request(
            request_id=message.request_id,
            client=client,
            deployment=deployment,
            header=message.header,
            body=message.body,
            raw=message.raw,
            stream=header.stream,
            priority=header.priority,
            order=self._num_admitted,
            accepted_at=now,
            num_tokens=num_tokens,
            tenant=header.tenant,
            num_bytes=num_bytes,
            delivered=Delivered(message.raw),
            credit_end=client.credit,
        )
        self.by_id[request.request_id] = request
        client.requests[request.request_id] = request
        self.held_bytes += num_bytes
        self.counters.accepted += 1
        if self.traces:
            context = parse(header.traceparent, header.tracestate)
            request.trace = context if context is not None and context.is_sampled else None
        if header.deadline_ms is not None:
            request.deadline = now + header.deadline_ms / 1000
            heapq.heappush(self._deadlines, (request.deadline, request.order, request))
        if request.stream:
            self.actions.append(ToClient(client.address, encode(Verb.ACCEPTED, request.request_id)))
        deployment.queue.push(request)
        self.dispatch(deployment, now)
        return request

    def forgive(self, stall_s: float, now: float) -> None:
        """The broker itself was stopped; groups that are missing had no chance to come back."""
        for deployment in self.deployments.values():
            deployment.last_ready = without(stall_s, deployment.last_ready, now)
        self.starving = {request: without(stall_s, since, now) for request, since in self.starving.items()}

    def note(self, request: Request, event: str, **facts: str | int) -> None:
        if request.trace is not None:
            self.actions.append(Note(request.trace.traceparent, event, facts))

    def send(self, client: Client, frames: Sequence[bytes]) -> None:
        """A TOKENS message."""
        self.counters.forwarded_messages += 1
        self.actions.append(ToClient(client.address, frames))

    def dispatch(self, deployment: Deployment, now: float) -> None:
        """Give waiting requests to groups, as long as there is room."""
        queue = deployment.queue
        held_back: list[Request] = []
        while (request := queue.first()) is not None:
            if request.deadline is not None and request.deadline <= now:
                self.reject(request, DeadlineExceeded(_DEADLINE_TEXT))
                continue
            if request.crashes >= suspects.MAX_CRASHES_UNTRIED and now - request.suspected_at > suspects.ALONE_WAIT_S:
                text = "worker groups were lost with this request, and none became free to run it alone"
                self.reject(request, WorkerLost(text, retry_after_ms=1000))
                continue
            if admission.is_at_limit(deployment, request, self.limits.tenant_share):
                queue.park(request)
                continue
            group = suspects.choose(deployment, request, now)
            if group is not None:
                queue.take(request)
                self._assign(request, group, now)
            elif request.is_apart or any(other.has_room for other in deployment.groups.values()):
                # It waits for a group without other suspects, or only its own id is in the way, still being cancelled
                # where there is room; others may pass.
                queue.discard(request)
                held_back.append(request)
            else:
                break
        queue.unpark()
        for request in held_back:
            queue.push(request)

    def _assign(self, request: Request, group: Group, now: float) -> None:
        request.state = RequestState.RUNNING
        request.group = group
        if not request.assigned_at:
            request.deployment.queue_time.observe(now - request.accepted_at)
        request.assigned_at = now
        request.deployment.tenants.count(request.tenant, 1)
        group.requests[request.request_id] = request
        group.outstanding_tokens += request.remaining_tokens
        self._num_picked += 1
        group.last_picked = self._num_picked
        delivered = request.delivered
        request.assigned_tokens = delivered.num_tokens
        if request.crashes:
            group.suspects.add(request)
        if delivered.token_ids:
            self.counters.resumes += 1
            self.counters.resumed_tokens += delivered.num_tokens
        header: dict[str, Any] = {
            **request.header,
            "client": request.client.number,
            "attempt": request.attempt,
            "first_seq": request.next_seq,
        }
        if request.deadline is not None:
            header["deadline_ms"] = max(1, round((request.deadline - now) * 1000))
        if request.trace is not None:
            header["traceparent"] = request.trace.derived(self._num_picked).traceparent
            number, num_tokens = self._num_picked, delivered.num_tokens
            self.note(
                request, "assigned", number=number, group=group.name, attempt=request.attempt, num_tokens=num_tokens
            )
        frames = encode(Verb.GENERATE, request.request_id, header, request.body, delivered.resume_frames())
        self.actions.append(ToWorker(group.address, frames))

    # Ways out.

    def finish(self, request: Request, frames: Sequence[bytes], reason: str, now: float) -> None:
        """The worker's FINAL: pass it on untouched."""
        self.counters.finished[reason if reason in KNOWN_REASONS else "other"] += 1
        request.deployment.num_finished += 1
        request.deployment.drain_rate.num_tokens += request.num_tokens
        self.note(request, "finished", reason=reason)
        if request.withheld is None:
            self.complete(request, frames)
        else:
            self.release(request)
            request.state = RequestState.DELIVERING
            request.withheld.terminal = frames
        self.dispatch(request.deployment, now)

    def complete(self, request: Request, frames: Sequence[bytes]) -> None:
        """The end of a request whose client has been sent everything else."""
        self._end(request)
        self.actions.append(ToClient(request.client.address, frames))

    def fail(self, request: Request, error: MiiError, now: float, **overrides: Any) -> None:
        """End a request with an error of the broker's own."""
        self.reject(request, error, **overrides)
        self.dispatch(request.deployment, now)

    def reject(self, request: Request, error: MiiError, **overrides: Any) -> None:
        """The same, and the caller dispatches."""
        error.emitted_tokens = credit.num_emitted(request)
        self.fail_with(request, encode(Verb.ERROR, request.request_id, {**error.to_wire(), **overrides}), error.code)

    def fail_with(self, request: Request, frames: Sequence[bytes], code: str) -> None:
        """End a request with an encoded ERROR; the caller dispatches."""
        self.note(request, "failed", code=code)
        self._end(request)
        self.counters.errors[code] += 1
        self.actions.append(ToClient(request.client.address, frames))

    def cancel(self, requests: Iterable[Request], error: MiiError | None, now: float) -> None:
        """End requests at the client's wish: the groups are told, the client gets `error` (None: it is gone)."""
        by_group: dict[Group, list[bytes]] = {}
        touched: dict[str, Deployment] = {}
        for request in list(requests):
            if request.group is not None:
                by_group.setdefault(request.group, []).append(request.request_id)
            touched[request.deployment.name] = request.deployment
            self.counters.cancelled += 1
            self.counters.cancellations[request.state.value] += 1
            if error is None:
                self.note(request, "failed", code="client_gone")
                self._end(request)
            else:
                self.reject(request, error)
        for group, request_ids in by_group.items():
            self.cancel_at(group, request_ids, now)
        for deployment in touched.values():
            self.dispatch(deployment, now)

    def cancel_at(self, group: Group, request_ids: Sequence[bytes], now: float) -> None:
        """Tell a group to end requests; until it has, their ids are not sent there again."""
        group.barred.update(dict.fromkeys(request_ids, now))
        if len(request_ids) == 1:
            frames = encode(Verb.CANCEL, request_ids[0])
        else:
            frames = encode(Verb.CANCEL, NO_ID, {"request_ids": list(request_ids)})
        self.actions.append(ToWorker(group.address, frames))

    def release(self, request: Request) -> None:
        """Take a request from its group, if it has one; it is in no queue yet."""
        group, request.group = request.group, None
        request.state = RequestState.WAITING
        if group is not None:
            del group.requests[request.request_id]
            group.outstanding_tokens -= request.remaining_tokens
            group.suspects.discard(request)
            request.deployment.tenants.count(request.tenant, -1)

    def _end(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            # A request that is being retried is in neither place.
            request.deployment.queue.discard(request)
        self.release(request)
        request.state = RequestState.FINISHED
        self.note(request, "ended", num_tokens=request.delivered.num_tokens)
        del self.by_id[request.request_id]
        del request.client.requests[request.request_id]
        self.held_bytes -= request.num_bytes + len(request.delivered.token_ids)
        if request.withheld is not None:
            self.held_bytes -= request.withheld.num_bytes
            request.withheld = None
            del self.starving[request]

    # The clock.

    def tick(self, now: float, elapsed_s: float) -> None:
        self._expire(now)
        credit.cut_slow_readers(self, now)
        self.quarantine.tick(now)
        for deployment in self.deployments.values():
            rate = deployment.num_finished / elapsed_s if elapsed_s > 0 else 0.0
            share = min(1.0, elapsed_s / 5)
            deployment.finished_per_s += share * (rate - deployment.finished_per_s)
            deployment.num_finished = 0
            deployment.drain_rate.tick(elapsed_s, bool(deployment.queue))
            deployment.tenants.tick(now)
            if deployment.is_ready:
                deployment.last_ready = now
            elif deployment.queue and now - deployment.last_ready > self.limits.group_wait_s:
                self._refuse_waiting(deployment)
            for group in deployment.groups.values():
                if group.suspects or group.held_for is not None:
                    suspects.refresh(group, now)
                for request_id in [i for i, since in group.barred.items() if now - since > CANCEL_ANSWER_S]:
                    del group.barred[request_id]
            self.dispatch(deployment, now)
        for name in [d.name for d in self.deployments.values() if not d.was_served and not d.queue]:
            del self.deployments[name]

    def _refuse_waiting(self, deployment: Deployment) -> None:
        text = f"no worker group of deployment {deployment.name!r} came back in time"
        for request in sorted(deployment.queue, key=lambda r: r.order):
            cls = WorkerLost if request.attempt else NoWorkers
            # Without a dispatch in between, which might end one of those that follow.
            self.reject(request, cls(text, retry_after_ms=1000))

    def _expire(self, now: float) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            due, order, request = heapq.heappop(deadlines)
            if request.state in (RequestState.FINISHED, RequestState.DELIVERING):
                continue
            if request.group is None:
                self.fail(request, DeadlineExceeded(_DEADLINE_TEXT), now)
            elif request.deadline is not None and now < request.deadline + DEADLINE_GRACE_S:
                heapq.heappush(deadlines, (max(due, request.deadline + DEADLINE_GRACE_S), order, request))
            else:
                self.cancel_at(request.group, [request.request_id], now)
                self.fail(request, DeadlineExceeded(_DEADLINE_TEXT), now)
        if len(deadlines) > 2 * len(self.by_id) + 1024:
            self._deadlines = [entry for entry in deadlines if entry[2].state is not RequestState.FINISHED]
            heapq.heapify(self._deadlines)
