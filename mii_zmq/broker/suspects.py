# SPDX-License-Identifier: Apache-2.0
"""Finding the request that groups die of, among all that they died with. Pure: the clock is injected, nothing is sent.

Whoever ran on a group that crashed is a suspect until it gets beyond the point where that happened (`is_proven`).

- First crash: whoever had already got on goes on elsewhere at once; the rest is sent on apart, so that a group never
  runs two suspects, for as long as they can wait for that.
- Second crash in turn: each runs alone, on a group that takes nothing else until it has got on. This is its trial:
  groups also die of what no request is to blame for, and two such deaths prove nothing.
- The culprit is who crashed once more, alone. It is barred by its fingerprint for a while, and whoever waits under
  suspicion is cleared.

A crash is a group's end without its having drained before. Leaving politely, declining a request or losing a connection
that comes back are none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from mii_zmq.broker.records import Deployment, Group, Request, RequestState
from mii_zmq.broker.routing import choose_group
from mii_zmq.errors import PoisonRequest

MAX_CRASHES_UNTRIED = 2
"""Crashes after which a suspect runs alone."""
PROOF_TOKENS = 4
"""More than a dying group can have computed beyond what it still delivered."""
PROOF_S = 1.0
"""An unstreamed request shows no tokens and starts anew; running for this long counts, and twice as long as before."""
APART_WAIT_S = 2.0
"""A suspect of one crash waits that long for a group without another suspect."""
ALONE_WAIT_S = 60.0
"""A suspect of two crashes waits that long for a group of its own."""
MAX_BARRED = 1024


def fingerprint(deployment: str, body: bytes) -> bytes:
    """Equal for equal requests: the same body for the same deployment."""
    return hashlib.blake2b(deployment.encode() + b"\0" + body, digest_size=16).digest()


def is_proven(request: Request, now: float) -> bool:
    """It has got on, on the group where it runs, beyond any point that an earlier group reached with it."""
    if request.stream:
        return request.delivered.num_tokens - request.assigned_tokens >= PROOF_TOKENS
    return now - request.assigned_at >= PROOF_S + 2 * request.longest_run_s


def judge(requests: Iterable[Request], limit: int, now: float) -> tuple[list[Request], list[Request]]:
    """A group has crashed while it ran these requests: mark the suspects.

    Returns the culprit, if it can be told, and requests that may not be retried although it cannot (a limit so low that
    none gets its trial).
    """
    requests = list(requests)
    repeated = []
    for request in requests:
        has_got_on = is_proven(request, now)
        request.longest_run_s = max(request.longest_run_s, now - request.assigned_at)
        request.suspected_at = now
        if has_got_on or not request.crashes:
            request.crashes, request.is_apart = 1, not has_got_on
        else:
            request.crashes += 1
            repeated.append(request)
    ended = [request for request in requests if request.crashes >= limit]
    if len(ended) == 1 and ended[0].crashes > MAX_CRASHES_UNTRIED:
        clear(ended[0])
        return ended, []
    for request in repeated:
        request.is_apart = True
    return [], ended


def clear(request: Request) -> None:
    """It is no suspect any more."""
    request.crashes = 0
    request.is_apart = False


def choose(deployment: Deployment, request: Request, now: float) -> Group | None:
    """The best group for a waiting request, or None; may set one aside for it."""
    groups = deployment.groups.values()
    if not request.is_apart:
        return choose_group(groups, request.request_id)
    if request.crashes >= MAX_CRASHES_UNTRIED:
        return _choose_alone(groups, request)
    group = choose_group([group for group in groups if not group.suspects], request.request_id)
    if group is None and now - request.suspected_at > APART_WAIT_S:
        request.is_apart = False
        group = choose_group(groups, request.request_id)
    return group


def _choose_alone(groups: Iterable[Group], request: Request) -> Group | None:
    usable = [group for group in groups if not group.is_draining and group.held_for in (None, request)]
    for group in usable:
        # What is still being cancelled there runs until its group says otherwise.
        if not group.requests and not group.barred:
            for other in usable:
                if other.held_for is request:
                    other.held_for = None
            group.held_for = request
            return group
    # One group at a time is emptied for suspects; the others serve.
    if usable and not any(group.held_for for group in groups):
        min(usable, key=lambda group: len(group.requests)).held_for = request
    return None


def refresh(group: Group, now: float) -> None:
    """Clear those who have got on, and open the group again when nobody needs it for himself."""
    for request in [request for request in group.suspects if is_proven(request, now)]:
        group.suspects.discard(request)
        clear(request)
    held_for = group.held_for
    if held_for is not None and (not held_for.is_apart or held_for.state is RequestState.FINISHED):
        group.held_for = None


class Quarantine:
    """Fingerprints of requests that are refused, each until its time is up; of too many, the oldest is let go."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: Request, now: float) -> None:
        key = fingerprint(request.deployment.name, request.body)
        self._until.pop(key, None)
        self._until[key] = now + self._seconds
        if len(self._until) > MAX_BARRED:
            del self._until[next(iter(self._until))]

    def holds(self, request: Request) -> bool:
        return bool(self._until) and fingerprint(request.deployment.name, request.body) in self._until

    def check(self, deployment: str, body: bytes, now: float) -> None:
        """Raises PoisonRequest when a request like this one is refused."""
        if not self._until:
            return
        left_s = self._until.get(fingerprint(deployment, body), now) - now
        if left_s > 0:
            raise PoisonRequest(
                f"worker groups died of a request like this one; it is refused for another {left_s:.0f} s",
                retry_after_ms=int(1000 * left_s) + 1,
            )

    def tick(self, now: float) -> None:
        for key in expired(self._until, now):
            del self._until[key]


def expired(until: dict[bytes, float], now: float) -> Sequence[bytes]:
    """Keys whose time is up; the dictionary is ordered by time."""
    found = []
    for key, time in until.items():
        if time > now:
            break
        found.append(key)
    return found
