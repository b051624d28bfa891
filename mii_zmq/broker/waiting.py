# SPDX-License-Identifier: Apache-2.0
"""The requests that wait for a group, in the order in which they get one. Pure; knows no groups and no clock.

Order: priority; then whoever has been with a group before, in order of admission, so that a stream that was interrupted
does not queue anew; then fairly between tenants (start-time fair queueing: each tenant has a virtual time that advances
by the tokens of what it was given, and the one that is furthest behind is next); within a tenant by admission. A tenant
that was idle starts at the time of the others, neither with credit for its absence nor free of what it has used.

Leaving from the middle costs nothing: the entry stays behind and is dropped when it comes up, or when more such entries
than requests have gathered.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mii_zmq.broker.records import Request

Entry = tuple[int, "Request"]
MAX_IDLE_TENANTS = 1024
"""Tenants with nothing waiting whose account is kept, per priority; who is forgotten starts level with the others."""


class _Line:
    """Requests in order of admission: a tenant's of one priority, or those that go first."""

    def __init__(self, tenant: str = "", time: float = 0.0) -> None:
        self.tenant = tenant
        self.time = time
        self.num_tokens = 0
        self.is_parked = False
        self.requests: set[Request] = set()
        self._heap: list[Entry] = []

    def push(self, request: Request) -> None:
        self.requests.add(request)
        self.num_tokens += request.num_tokens
        heapq.heappush(self._heap, (request.order, request))

    def first(self) -> Request:
        while self._heap[0][1] not in self.requests:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def remove(self, request: Request) -> None:
        self.requests.remove(request)
        self.num_tokens -= request.num_tokens
        if len(self._heap) > 2 * len(self.requests) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self.requests]
            heapq.heapify(self._heap)


class _Class:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.again = _Line()
        self.lines: dict[str, _Line] = {}
        self.time = 0.0
        self._times: dict[str, float] = {}
        """Virtual times of tenants that have nothing waiting, as far as they were ahead; idle for longest first."""

    @property
    def is_empty(self) -> bool:
        return not self.again.requests and not self.lines

    def line_of(self, request: Request) -> _Line:
        return self.again if request.assigned_at else self.lines[request.tenant]

    def push(self, request: Request) -> None:
        if request.assigned_at:
            self.again.push(request)
            return
        line = self.lines.get(request.tenant)
        if line is None:
            time = max(self.time, self._times.pop(request.tenant, 0.0))
            line = self.lines[request.tenant] = _Line(request.tenant, time)
        line.push(request)

    def first(self) -> Request | None:
        if self.again.requests:
            return self.again.first()
        line = min((line for line in self.lines.values() if not line.is_parked), key=lambda x: x.time, default=None)
        return None if line is None else line.first()

    def remove(self, request: Request, *, is_served: bool) -> None:
        line = self.line_of(request)
        line.remove(request)
        if line is self.again:
            return
        if is_served:
            self.time = max(self.time, line.time)
            line.time += request.num_tokens
        if not line.requests:
            del self.lines[line.tenant]
            if line.time > self.time:
                self._times[line.tenant] = line.time
            if len(self._times) > MAX_IDLE_TENANTS:
                del self._times[next(iter(self._times))]

    def tokens_ahead(self, tenant: str) -> int:
        """Of a new request of the tenant: at most as much of each other one as of its own."""
        line = self.lines.get(tenant)
        own = line.num_tokens if line is not None else 0
        return self.again.num_tokens + sum(min(other.num_tokens, own) for other in self.lines.values())


class WaitingQueue:
    """The waiting requests of one deployment."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []
        self._parked: list[_Line] = []
        self._requests: set[Request] = set()
        self._num_by_tenant: dict[str, int] = {}
        self._tokens_by_tenant: dict[str, int] = {}
        self.num_tokens = 0
        """Estimated tokens of all that wait."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def num_tenants(self) -> int:
        return len(self._num_by_tenant)

    def of_tenant(self, tenant: str) -> tuple[int, int]:
        """Requests and tokens of one tenant that wait."""
        return self._num_by_tenant.get(tenant, 0), self._tokens_by_tenant.get(tenant, 0)

    def push(self, request: Request) -> None:
        cls = self._classes.get(request.priority)
        if cls is None:
            cls = self._classes[request.priority] = _Class()
            insort(self._priorities, request.priority)
        cls.push(request)
        self._requests.add(request)
        self._count(request, 1)

    def first(self) -> Request | None:
        """The one that is next; None when nobody waits, or only tenants that are parked."""
        for priority in self._priorities:
            request = self._classes[priority].first()
            if request is not None:
                return request
        return None

    def take(self, request: Request) -> None:
        """It gets a group; its tenant has had that much."""
        self._remove(request, is_served=True)

    def discard(self, request: Request) -> None:
        """Take a request out, if it waits here."""
        if request in self._requests:
            self._remove(request, is_served=False)

    def park(self, request: Request) -> None:
        """Pass over the request's tenant, in its priority, until `unpark`."""
        line = self._classes[request.priority].line_of(request)
        line.is_parked = True
        self._parked.append(line)

    def unpark(self) -> None:
        for line in self._parked:
            line.is_parked = False
        self._parked.clear()

    def tokens_ahead(self, priority: int, tenant: str) -> int:
        """Estimated tokens that are served before a new request."""
        before = self._priorities[: bisect_left(self._priorities, priority)]
        total = sum(self._tokens_of_class(other) for other in before)
        same = self._classes.get(priority)
        return total + (same.tokens_ahead(tenant) if same is not None else 0)

    def _tokens_of_class(self, priority: int) -> int:
        cls = self._classes[priority]
        return cls.again.num_tokens + sum(line.num_tokens for line in cls.lines.values())

    def _remove(self, request: Request, *, is_served: bool) -> None:
        cls = self._classes[request.priority]
        cls.remove(request, is_served=is_served)
        self._requests.remove(request)
        self._count(request, -1)
        # Virtual times mean nothing beyond a time in which nobody of that priority had to wait.
        if cls.is_empty:
            del self._classes[request.priority]
            self._priorities.remove(request.priority)

    def _count(self, request: Request, sign: int) -> None:
        num, tokens = self.of_tenant(request.tenant)
        self.num_tokens += sign * request.num_tokens
        if num + sign:
            self._num_by_tenant[request.tenant] = num + sign
            self._tokens_by_tenant[request.tenant] = tokens + sign * request.num_tokens
        else:
            del self._num_by_tenant[request.tenant], self._tokens_by_tenant[request.tenant]
