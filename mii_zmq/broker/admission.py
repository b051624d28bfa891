# SPDX-License-Identifier: Apache-2.0
"""Whether a new request may wait: bounds by requests, by tokens and by tenant, and deadlines that cannot be kept.

Pure. A refusal says when to come back, from the rate at which the deployment has been getting through its queue. What a
tenant may not have beside others it may have alone: its share counts only while other tenants have been heard of.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mii_zmq.broker.routing import estimate_tokens, retry_after_ms
from mii_zmq.errors import NoWorkers, Overloaded, TenantOverloaded

if TYPE_CHECKING:
    from mii_zmq.broker.records import Client, Deployment, Request
    from mii_zmq.broker.requests import Limits, Requests
    from mii_zmq.protocol import GenerateHeader, Message

TENANT_MEMORY_S = 10.0
"""A tenant counts as present for this long after its last request."""
MAX_TENANTS_SEEN = 1024
RATE_WINDOW_S = 10.0
MIN_RATE_S = 1.0
"""A rate measured for less time is none."""


class DrainRate:
    """How fast a deployment gets through its queue, in estimated tokens; measured only while requests wait, so that it
    is what the groups can do and not what they are asked for."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Of requests that finished since the last tick."""
        self._sum = 0.0
        self._time_s = 0.0
        self._was_saturated = False

    @property
    def per_s(self) -> float:
        """0: not known."""
        return self._sum / self._time_s if self._time_s >= MIN_RATE_S else 0.0

    def tick(self, elapsed_s: float, is_saturated: bool) -> None:
        if is_saturated and self._was_saturated and elapsed_s > 0:
            keep = math.exp(-elapsed_s / RATE_WINDOW_S)
            self._sum = keep * self._sum + self.num_tokens
            self._time_s = keep * self._time_s + elapsed_s
        self.num_tokens = 0
        self._was_saturated = is_saturated


class Tenants:
    """Who has been heard of lately, and what runs for whom."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self.running: dict[str, int] = {}

    def see(self, tenant: str, now: float) -> None:
        self._seen.pop(tenant, None)
        self._seen[tenant] = now
        if len(self._seen) > MAX_TENANTS_SEEN:
            del self._seen[next(iter(self._seen))]

    def are_several(self) -> bool:
        return len(self._seen) > 1

    def tick(self, now: float) -> None:
        while self._seen:
            tenant = next(iter(self._seen))
            if now - self._seen[tenant] <= TENANT_MEMORY_S:
                return
            del self._seen[tenant]

    def count(self, tenant: str, change: int) -> None:
        number = self.running.get(tenant, 0) + change
        if number:
            self.running[tenant] = number
        else:
            self.running.pop(tenant, None)


def check_room(
    requests: Requests, client: Client, deployment: Deployment, header: GenerateHeader, message: Message, now: float
) -> None:
    """Raises NoWorkers, Overloaded or TenantOverloaded when a new request cannot be accepted."""
    limits, queue = requests.limits, deployment.queue
    if not deployment.is_ready and now - deployment.last_ready > limits.group_wait_s:
        text = f"no worker group of deployment {deployment.name!r} is there; start one, or try again later"
        raise NoWorkers(text, retry_after_ms=1000)
    deployment.tenants.see(header.tenant, now)
    if len(client.requests) >= limits.max_client_requests:
        text = f"this connection has {len(client.requests)} unfinished requests, the most that are allowed"
        raise _refusal(requests, deployment, "connection", text)
    if requests.held_bytes + message.num_bytes > limits.max_held_bytes:
        text = "the broker holds as many bytes of unfinished requests as it may"
        raise _refusal(requests, deployment, "bytes", text)
    if queue:
        num_resumed = len(message.raw[0]) // 4 if message.raw else 0
        num_tokens = estimate_tokens(header.num_tokens, len(message.body), num_resumed)
        _check_queue(requests, deployment, header.tenant, num_tokens)
        if header.deadline_ms is not None:
            _check_deadline(requests, deployment, header, header.deadline_ms / 1000)


def has_room(limits: Limits, deployment: Deployment) -> bool:
    """Whether an ordinary request would be taken now, and some group be there for it."""
    queue = deployment.queue
    is_full = len(queue) >= limits.max_queued_requests or queue.num_tokens >= limits.max_queued_tokens
    return deployment.is_ready and not (queue and is_full)


def _check_queue(requests: Requests, deployment: Deployment, tenant: str, num_tokens: int) -> None:
    limits, queue = requests.limits, deployment.queue
    num_waiting, tokens_waiting = queue.of_tenant(tenant)
    if num_waiting and deployment.tenants.are_several():
        share = limits.tenant_share
        if (
            num_waiting >= share * limits.max_queued_requests
            or tokens_waiting + num_tokens > share * limits.max_queued_tokens
        ):
            text = (
                f"{num_waiting} requests of this tenant wait for deployment {deployment.name!r}, as many as one may "
                "have there beside others"
            )
            raise _refusal(requests, deployment, "tenant", text)
    if len(queue) >= limits.max_queued_requests:
        text = f"{len(queue)} requests wait for deployment {deployment.name!r}, the most that are allowed"
        raise _refusal(requests, deployment, "requests", text)
    if queue.num_tokens + num_tokens > limits.max_queued_tokens:
        text = f"requests of about {queue.num_tokens} tokens wait for deployment {deployment.name!r}; no room for more"
        raise _refusal(requests, deployment, "tokens", text)


def _check_deadline(requests: Requests, deployment: Deployment, header: GenerateHeader, left_s: float) -> None:
    rate = deployment.drain_rate.per_s
    wait_s = deployment.queue.tokens_ahead(header.priority, header.tenant) / rate if rate > 0 else 0.0
    if wait_s > left_s:
        text = f"the request would wait for about {wait_s:.1f} s, but its deadline is {left_s:g} s away"
        raise _refusal(requests, deployment, "deadline", text)


def _refusal(requests: Requests, deployment: Deployment, reason: str, text: str) -> Overloaded:
    requests.counters.rejections[reason] += 1
    rate, queue = deployment.drain_rate.per_s, deployment.queue
    if rate > 0:
        wait_ms = retry_after_ms(queue.num_tokens, rate)
    else:
        wait_ms = retry_after_ms(len(queue), deployment.finished_per_s)
    return (TenantOverloaded if reason == "tenant" else Overloaded)(text, retry_after_ms=wait_ms)


def is_at_limit(deployment: Deployment, request: Request, share: float) -> bool:
    """Whether the request's tenant runs as much as it may while others want something too."""
    running = deployment.tenants.running
    if request.assigned_at or share >= 1 or (len(running) <= 1 and deployment.queue.num_tenants <= 1):
        return False
    room = sum(group.max_requests for group in deployment.groups.values() if not group.is_draining)
    return running.get(request.tenant, 0) >= max(1.0, share * room)
