# SPDX-License-Identifier: Apache-2.0
"""On whose behalf, how urgently and until when an HTTP request asks: what any door takes from the request's headers.

`X-MII-Tenant` names who shares queues and prefixes, `X-MII-Priority` is smaller for the more urgent, and
`X-MII-Deadline-Ms` is the time that the client will wait, counted from the arrival of the request's headers. Who may
claim what is the business of whatever stands in front of the gateway.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from aiohttp import web

from mii_zmq.errors import DeadlineExceeded, InvalidRequest
from mii_zmq.gateway.core_request import MAX_PRIORITY
from mii_zmq.gateway.request_record import RECORD, RequestRecord

TENANT = "X-MII-Tenant"
PRIORITY = "X-MII-Priority"
DEADLINE = "X-MII-Deadline-Ms"
MAX_DEADLINE_MS = 2**31 - 1
TENANT_PATTERN = re.compile(r"[!-~]{0,200}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,12}")


@dataclass(frozen=True, slots=True)
class Terms:
    """Made when the request arrives."""

    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    """Monotonic time."""
    record: RequestRecord | None = field(default=None, compare=False)
    """Where the request's generations are noted; has its name and its place in a trace."""

    def left_s(self) -> float | None:
        """Time until the deadline, None without one; raises DeadlineExceeded when it has passed."""
        if self.deadline is None:
            return None
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before all of it could be sent to a group")
        return left_s


def terms_of(request: web.Request) -> Terms:
    """Raises InvalidRequest; `param` names the header."""
    tenant = request.headers.get(TENANT, "")
    if not TENANT_PATTERN.fullmatch(tenant):
        raise InvalidRequest(f"{TENANT} takes up to 200 printable ASCII characters without spaces", param=TENANT)
    priority = _integer(request, PRIORITY, -MAX_PRIORITY, MAX_PRIORITY)
    deadline_ms = _integer(request, DEADLINE, 1, MAX_DEADLINE_MS)
    deadline = None if deadline_ms is None else time.monotonic() + deadline_ms / 1000
    return Terms(tenant, priority or 0, deadline, request.get(RECORD))


def _integer(request: web.Request, name: str, least: int, most: int) -> int | None:
    text = request.headers.get(name)
    if text is None:
        return None
    if not _INTEGER.fullmatch(text) or not least <= int(text) <= most:
        raise InvalidRequest(f"{name} is {text[:40]!r}, allowed: {least} to {most}", param=name)
    return int(text)
