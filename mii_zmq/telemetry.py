# SPDX-License-Identifier: Apache-2.0
"""What our processes measure of themselves: histograms, and a watch on event loops."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from typing import Any

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


VLLM_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
VLLM_INTER_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
VLLM_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
"""Buckets of vLLM's histograms, so that its dashboards' quantiles mean the same here."""
FIRST_TOKEN_S = tuple(sorted({*LONG_S, *VLLM_FIRST_TOKEN_S}))
INTER_TOKEN_S = tuple(sorted({*SHORT_S, *VLLM_INTER_TOKEN_S}))
REQUEST_S = tuple(sorted({*LONG_S, *VLLM_REQUEST_S}))
"""What is observed: ours and vLLM's buckets together, from which `Histogram.coarse` makes either."""
NUM_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))


class Histogram:
    """Counts per bucket; `count` observations of one value cost as much as one."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def to_map(self) -> dict[str, Any]:
        """For a status message; `from_map` reads it."""
        return {"bounds": list(self.bounds), "counts": self.counts, "total": self.total}

    @classmethod
    def from_map(cls, values: Any) -> Histogram | None:
        """None for what is no histogram."""
        try:
            found = cls(tuple(float(bound) for bound in values["bounds"]))
            counts, found.total = [int(count) for count in values["counts"]], float(values["total"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        if len(counts) != len(found.counts):
            return None
        found.counts = counts
        return found

    def coarse(self, bounds: tuple[float, ...]) -> Histogram:
        """The same observations in fewer buckets; itself where its own buckets do not include `bounds`."""
        if not set(bounds) <= set(self.bounds):
            return self
        found = Histogram(bounds)
        found.total = self.total
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            found.counts[bisect_left(bounds, bound)] += count
        return found

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        cumulative, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            cumulative.append(("+Inf" if bound == float("inf") else str(bound), float(seen)))
        return cumulative


class LoopLag:
    """How late the running event loop's callbacks are: what blocks the loop shows here."""

    INTERVAL_S = 0.1
    WINDOW_S = 10.0
    STALL_S = 5.0
    """A loop that was held up for longer is not well."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._window_end = 0.0
        self._worst = self._worst_before = 0.0

    def start(self) -> None:
        now = time.monotonic()
        self._window_end = now + self.WINDOW_S
        self._schedule(now)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def worst_s(self) -> float:
        """Of the last ten to twenty seconds, a stall that is just over included."""
        return max(self._worst, self._worst_before, self.current_s)

    @property
    def current_s(self) -> float:
        """By how much the next callback is late already; asked by the first one after a stall, its length."""
        return max(0.0, time.monotonic() - self._due) if self._timer is not None else 0.0

    @property
    def is_moving(self) -> bool:
        return self.current_s < self.STALL_S

    def _schedule(self, now: float) -> None:
        self._due = now + self.INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(self.INTERVAL_S, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        self._worst = max(self._worst, now - self._due)
        if now >= self._window_end:
            self._worst_before, self._worst = self._worst, 0.0
            self._window_end = now + self.WINDOW_S
        self._schedule(now)
