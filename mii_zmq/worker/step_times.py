# SPDX-License-Identifier: Apache-2.0
"""How long the stages of steps, and the phases of requests, take: histograms that travel in a group's heartbeats.

Stages of a step, in the engine's process: `step_plan` (the scheduler chooses), `step_submit` (the plan goes to the
executor), `step_wait` (until the oldest step in flight has run, as far as it is not hidden behind the other stages) and
`step_finish` (its result goes through the scheduler). Phases of a request, in the actor: `tokenize`, `queue` (in the
engine), `prefill` (to the first token), `decode`, the last two together as `inference`, and `per_token`, the mean over
a request's tokens behind the first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from mii_zmq.protocol import HistogramValues
from mii_zmq.telemetry import INTER_TOKEN_S, LONG_S, REQUEST_S, Histogram

STAGE_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class StepTimes:
    """Of one engine."""

    def __init__(self) -> None:
        self.plan, self.submit, self.wait, self.finish = (Histogram(STAGE_S) for _ in range(4))

    def took(self, stage: Histogram, since: float) -> float:
        """Observe that `stage` has lasted since then (monotonic time); returns the time now."""
        now = time.monotonic()
        stage.observe(now - since)
        return now

    def values(self) -> dict[str, tuple[tuple[float, ...], list[int], float]]:
        """Plain types, for a message; `from_values` reads them."""
        stages = {
            "step_plan": self.plan,
            "step_submit": self.submit,
            "step_wait": self.wait,
            "step_finish": self.finish,
        }
        return {name: (found.bounds, found.counts, found.total) for name, found in stages.items()}


class PhaseTimes:
    """Of the requests of one group."""

    def __init__(self) -> None:
        self.tokenize = Histogram(tuple(sorted({0.0001, 0.0005, 0.001, *LONG_S})))
        self.queue, self.prefill, self.decode, self.inference = (Histogram(REQUEST_S) for _ in range(4))
        self.per_token = Histogram(INTER_TOKEN_S)

    def values(self) -> dict[str, HistogramValues]:
        return {name: HistogramValues(list(h.bounds), h.counts, h.total) for name, h in vars(self).items()}


def from_values(values: Mapping[str, tuple[tuple[float, ...], list[int], float]]) -> dict[str, HistogramValues]:
    """For a heartbeat; raises TypeError or ValueError for what `StepTimes.values` does not make."""
    return {name: HistogramValues(list(b), list(counts), total) for name, (b, counts, total) in values.items()}
