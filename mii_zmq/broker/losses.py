# SPDX-License-Identifier: Apache-2.0
"""Requests that their group does not finish: they go on elsewhere, or end here. Pure: actions come out.

A group that declines a request, leaves or is cut off has nothing against it. When a group crashed, one of its requests
may be why (`suspects`): the one that is found out ends, and so do, from then on, all that are like it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from mii_zmq.broker import suspects
from mii_zmq.broker.records import Request, RequestState
from mii_zmq.broker.requests import Requests
from mii_zmq.errors import PoisonRequest, WorkerLost
from mii_zmq.protocol import MAX_RAW_BYTES

MAX_GROUPS = 16
"""Groups that one request is given to in all, whatever became of them."""

log = logging.getLogger(__name__)


def lose(requests: Requests, lost: Iterable[Request], why: str, now: float, *, crashed: bool) -> None:
    """They run no more where they ran: they go on elsewhere. The caller dispatches.

    When their group `crashed`, one of them may be why; the one that is found out ends here.
    """
    limit = requests.limits.max_attempts
    in_order = sorted(lost, key=lambda r: r.order)
    culprits, suspected = suspects.judge(in_order, limit, now) if crashed else ([], [])
    for request in culprits:
        text = f"{limit} worker groups died with this request, at last while it ran alone: {why}"
        _expel(requests, request, text, now)
    for request in in_order:
        if request.state is RequestState.FINISHED:
            continue
        if request in suspected:
            text = f"{request.crashes} worker groups in turn died with this request; the last one: {why}"
            requests.release(request)
            requests.reject(request, WorkerLost(text), retryable=False)
        elif crashed and requests.quarantine.holds(request):
            _expel(requests, request, "worker groups died of a request like this one", now)
        else:
            retry(requests, request, why)


def retry(requests: Requests, request: Request, why: str, *, counts: bool = True) -> None:
    """Take a request from its group and queue it again; the caller dispatches.

    `counts` is False when the group merely declined it.
    """
    requests.release(request)
    request.attempt += counts
    if request.next_seq and not requests.limits.resume:
        error = WorkerLost(f"{why}, and its output was not kept (--no-resume)", retry_after_ms=100)
        requests.reject(request, error)
        return
    num_raw_bytes = 4 * request.delivered.num_tokens
    if request.attempt >= MAX_GROUPS or num_raw_bytes > MAX_RAW_BYTES:
        reason = f"after {request.attempt} groups" if num_raw_bytes <= MAX_RAW_BYTES else "its output is too long"
        requests.reject(request, WorkerLost(f"the request is not tried again, {reason}; {why}"), retryable=False)
        return
    requests.counters.retries += 1
    requests.note(request, "retried", why=why)
    request.deployment.queue.push(request)


def _expel(requests: Requests, request: Request, text: str, now: float) -> None:
    """End a request that groups die of, and all that are like it."""
    deployment, quarantine = request.deployment, requests.quarantine
    if not quarantine.holds(request):
        quarantine.add(request, now)
        log.warning("deployment %r: %s", deployment.name, text)
    requests.counters.quarantined += 1
    requests.release(request)
    requests.reject(request, PoisonRequest(text))
    for other in list(deployment.queue):
        suspects.clear(other)
        if quarantine.holds(other):
            requests.counters.quarantined += 1
            requests.reject(other, PoisonRequest("worker groups died of a request like this one"))
