# SPDX-License-Identifier: Apache-2.0
"""When a silent peer is asked, and when it counts as dead. Pure: the clock is injected, nothing is sent here.

Any message of a peer counts as a sign of life. A stall of the broker itself (stopped, swapped out) is no peer's
silence: `was_stalled` tells, and the owners of the peers then count them as heard just now.
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

    def was_stalled(self, now: float) -> bool:
        """Since the last call the broker itself was stopped for so long that peers may have been unheard."""
        last, self._last_tick = self._last_tick, now
        return last is not None and now - last > 2 * self.interval_s
