# SPDX-License-Identifier: Apache-2.0
"""When a silent peer is asked, and when it counts as dead. Pure: the clock is injected, nothing is sent here.

Any message of a peer counts as a sign of life. A stall of the broker itself (stopped, swapped out) is no peer's
silence: `stall_s` tells, and the owners of the peers leave that time out of account. They do not count them as heard
just now, since on a machine that stalls again and again nobody would ever count as dead then.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Liveness:
    """The rule that both sides of a connection apply."""

    interval_s: float
    """Between two heartbeats."""
    missed: int
    """Intervals of silence after which a peer is dead."""
    _last_tick: float | None = None

    def is_overdue(self, last_seen: float, now: float) -> bool:
        """The peer missed a heartbeat: worth a question, which also finds out whether its connection is still there."""
        return now - last_seen > 1.5 * self.interval_s

    def is_dead(self, last_seen: float, now: float) -> bool:
        return now - last_seen > self.missed * self.interval_s

    def stall_s(self, now: float) -> float:
        """For how long, since the last call, the broker itself was stopped; 0 where peers were hardly unheard."""
        last, self._last_tick = self._last_tick, now
        gap_s = 0.0 if last is None else now - last
        return gap_s if gap_s > 2 * self.interval_s else 0.0


def without(stall_s: float, since: float, now: float) -> float:
    """The time from which on to count, as though there had been no stall."""
    return max(since, min(now, since + stall_s))
