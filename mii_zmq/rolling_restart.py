# SPDX-License-Identifier: Apache-2.0
"""Restarting every child of a deployment, one after the other, while it serves. Advanced by `turn`; never waits.

A child that can have a successor beside itself (a gateway on a shared port, a group whose model fits into memory twice)
is told to end when that one is ready. Any other one ends first: it finishes what it has, and the others of its kind
serve meanwhile. The next one's turn comes when the new one is ready and has had time to be found by its peers. A
successor that does not become ready ends the whole undertaking, with the old process still in its place.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from mii_zmq.member import Member

SETTLE_S = 1.5
"""For peers to find the new process: workers try every second, clients every half."""

log = logging.getLogger(__name__)


class Host(Protocol):
    """What the supervisor does for it."""

    def start_beside(self, member: Member) -> Member:
        """Start the next process for a place whose last one still runs."""
        ...

    def put_in_place(self, member: Member, successor: Member) -> None:
        """The successor's process is now the member's; the old one has been told to end."""
        ...

    def dismiss(self, successor: Member) -> None:
        """End a successor that was never used."""
        ...

    def leave(self, member: Member) -> None:
        """Tell the member's process to end; it is started again as soon as it has."""
        ...


class _Stage(enum.Enum):
    NEXT = "next"
    BESIDE = "beside"
    AGAIN = "again"
    SETTLING = "settling"


class RollingRestart:
    def __init__(
        self, host: Host, members: Iterable[Member], fits_beside: Callable[[Member], bool], patience_s: float
    ) -> None:
        """`patience_s`: for a process to finish what it has and for the next one to be ready."""
        self._host = host
        self._waiting = deque(members)
        self._fits_beside = fits_beside
        self._patience_s = patience_s
        self._stage = _Stage.NEXT
        self._member: Member | None = None
        self._successor: Member | None = None
        self._old_pid = 0
        self._since = 0.0
        self.is_finished = False
        self.error: str | None = None

    @property
    def current(self) -> str:
        return self._member.name if self._member is not None and not self.is_finished else ""

    def abandon(self) -> None:
        """The deployment ends."""
        if self._successor is not None:
            self._host.dismiss(self._successor)
        self.is_finished = True

    def turn(self, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        match self._stage:
            case _Stage.NEXT:
                self._begin(now)
            case _Stage.BESIDE:
                self._watch_successor(now)
            case _Stage.AGAIN:
                self._watch_member(now)
            case _Stage.SETTLING if now - self._since >= SETTLE_S:
                self._stage = _Stage.NEXT

    def _begin(self, now: float) -> None:
        if not self._waiting:
            self.is_finished = True
            return
        member = self._waiting[0]
        if member.child is None or not member.is_ready:
            # It died by itself, and is being started again anyway.
            if member.is_given_up:
                self._fail(f"{member.name} cannot be started any more")
            return
        self._waiting.popleft()
        self._member, self._since, self._old_pid = member, now, member.child.pid
        if self._fits_beside(member):
            self._successor = self._host.start_beside(member)
            self._stage = _Stage.BESIDE
        else:
            self._host.leave(member)
            self._stage = _Stage.AGAIN

    def _watch_successor(self, now: float) -> None:
        member, successor = self._member, self._successor
        assert member is not None
        assert successor is not None
        if successor.is_ready:
            self._host.put_in_place(member, successor)
            self._successor = None
            self._settle(now)
        elif successor.child is None or now - self._since > self._patience_s:
            self._host.dismiss(successor)
            self._successor = None
            self._fail(f"the next {member.name} did not become ready: {successor.last_error or 'see the log'}")

    def _watch_member(self, now: float) -> None:
        member = self._member
        assert member is not None
        if member.is_ready and member.child is not None and member.child.pid != self._old_pid:
            self._settle(now)
        elif member.failed_starts or now - self._since > self._patience_s:
            self._fail(f"{member.name} did not come back: {member.last_error or 'see the log'}")

    def _settle(self, now: float) -> None:
        assert self._member is not None
        log.info("%s has been restarted", self._member.name)
        self._since = now
        self._stage = _Stage.SETTLING

    def _fail(self, reason: str) -> None:
        log.error("the rolling restart ends: %s", reason)
        self.error = reason
        self.is_finished = True
