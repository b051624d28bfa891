# SPDX-License-Identifier: Apache-2.0
"""Whether an engine still gets on, judged by its reports: pure, with time passed in.

It gets on when it reports rows or a new step, or that it has nothing to do. How long it may take for that depends on
whether it has work, on how long its steps usually take, and on whether it still warms up (kernels are compiled and
graphs captured in the first steps). Time counts only while the watch itself runs: a group that was stopped as a whole,
or a machine that slept, is no fault of the engine.
"""

from __future__ import annotations

from collections import deque

IDLE_TIMEOUT_S = 10.0
"""An idle engine reports twice a second; for shorter step timeouts this is shorter, too."""
MIN_IDLE_TIMEOUT_S = 3.0
USUAL_FACTOR = 10
"""A step may take so many times as long as nearly all of the last ones."""
WARM_UP_STEPS = 100
WARM_UP_FACTOR = 5
STALLED_SHARE = 1 / 3
"""Of what an engine that is warm may take; after that it is no longer vouched for."""
MAX_TURN_S = 0.5
NUM_DURATIONS = 256


class Watchdog:
    """Fed by `on_report` and `tick`."""

    def __init__(self, step_timeout_s: float) -> None:
        self.stuck_s = 0.0
        """Since the engine last got on."""
        self._step_timeout_s = step_timeout_s
        self._idle_timeout_s = min(IDLE_TIMEOUT_S, max(MIN_IDLE_TIMEOUT_S, step_timeout_s))
        self._durations: deque[float] = deque(maxlen=NUM_DURATIONS)
        self._step = 0
        self._was_busy = self._is_busy = False
        self._reported_at: float | None = None
        self._ticked_at: float | None = None

    def on_report(self, step: int, is_busy: bool, has_rows: bool, now: float) -> None:
        """The engine says so. `step` is its last one, `is_busy`: it has sequences."""
        num_steps = step - self._step
        if num_steps > 0 and self._was_busy and self._reported_at is not None:
            elapsed_s = min(now - self._reported_at, self.stuck_s + MAX_TURN_S)
            self._durations.append(elapsed_s / num_steps)
        if num_steps or has_rows or not is_busy:
            self.stuck_s = 0.0
            self._reported_at = now
        self._step = step
        self._was_busy = is_busy

    def tick(self, now: float, has_requests: bool) -> None:
        """To be called a few times a second. `has_requests`: the engine was given some that have not ended."""
        elapsed_s = 0.0 if self._ticked_at is None else min(now - self._ticked_at, MAX_TURN_S)
        self._ticked_at = now
        is_busy = has_requests or self._was_busy
        self.stuck_s = 0.0 if is_busy and not self._is_busy else self.stuck_s + elapsed_s
        self._is_busy = is_busy

    @property
    def limit_s(self) -> float:
        """How long the engine may take now."""
        is_cold = self._is_busy and self._step < WARM_UP_STEPS
        return WARM_UP_FACTOR * self._warm_limit_s if is_cold else self._warm_limit_s

    @property
    def is_stalled(self) -> bool:
        """Something may be wrong."""
        return self.stuck_s > STALLED_SHARE * self._warm_limit_s

    @property
    def is_hung(self) -> bool:
        """The engine will not get on any more."""
        return self.stuck_s > self.limit_s

    @property
    def _warm_limit_s(self) -> float:
        if not self._is_busy:
            return self._idle_timeout_s
        usual_s = sorted(self._durations)[int(0.99 * (len(self._durations) - 1))] if self._durations else 0.0
        return max(self._step_timeout_s, USUAL_FACTOR * usual_s)
