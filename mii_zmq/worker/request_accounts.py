# SPDX-License-Identifier: Apache-2.0
"""What a worker group remembers of its requests for people: histograms of their phases, spans, and lines in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mii_zmq.errors import Cancelled, MiiError, RequestError
from mii_zmq.logs import facts
from mii_zmq.protocol import GenerateHeader, HistogramValues
from mii_zmq.trace_context import TraceContext
from mii_zmq.worker.active_request import ActiveRequest
from mii_zmq.worker.request_spans import RequestSpans
from mii_zmq.worker.step_times import PhaseTimes, from_values

LOST = Cancelled("nobody waits for the request here any more")
"""How requests end of which the broker, or the connection to it, was lost."""

log = logging.getLogger(__name__)


class RequestAccounts:
    """Belongs to the actor's event loop."""

    def __init__(self, spans: RequestSpans | None = None) -> None:
        self._spans = spans
        self._phases = PhaseTimes()
        self._step_times: dict[str, HistogramValues] = {}

    def histograms(self) -> dict[str, HistogramValues]:
        """For a heartbeat."""
        return {**self._step_times, **self._phases.values()}

    def take_step_times(self, values: Mapping[str, Any]) -> None:
        """The engine's, from a StepReport."""
        self._step_times = from_values(values)

    def enter(self, header: GenerateHeader) -> tuple[TraceContext | None, TraceContext] | None:
        """For `ActiveRequest.trace`."""
        return None if self._spans is None else self._spans.enter(header)

    def note_prepared(self, request: ActiveRequest) -> None:
        self._phases.tokenize.observe(request.times.tokenize_end - request.times.tokenize_start)

    def note_timing(self, request: ActiveRequest, timing: tuple[float, int], now: float, *, has_output: bool) -> None:
        """With a request's first row, and with its last, which may be one without any output."""
        times = request.times
        engine_start, times.num_preemptions = timing
        times.engine_start = times.engine_start or engine_start
        if engine_start and has_output and not times.first_row:
            times.first_row = now
            self._phases.queue.observe(max(0.0, engine_start - times.added))
            self._phases.prefill.observe(max(0.0, now - engine_start))

    def note_end(self, request: ActiveRequest, end: str | MiiError, now: float) -> None:
        """A finish reason, or the error; what is the sender's doing is no news for the log, nor is its wording."""
        times, num_tokens = request.times, request.num_output_tokens - request.num_resumed_tokens
        if times.first_row:
            if num_tokens:
                self._phases.decode.observe(now - times.first_row)
            self._phases.inference.observe(now - times.engine_start)
            if num_tokens > 1:
                self._phases.per_token.observe((now - times.first_row) / (num_tokens - 1))
        if self._spans is not None:
            self._spans.leave(request, end, now)
        is_ours = isinstance(end, MiiError) and not isinstance(end, RequestError)
        level = logging.INFO if is_ours else logging.DEBUG
        if log.isEnabledFor(level):
            how = end.code if isinstance(end, MiiError) else end
            tokens = f"{request.prompt_length}+{request.num_output_tokens} tokens"
            text = f": {end.message}" if isinstance(end, MiiError) and is_ours else ""
            log.log(level, "request %s ended with %s, %s%s", request.name, how, tokens, text, extra=about(request))


def about(request: ActiveRequest) -> dict[str, Any]:
    """For the argument `extra` of a logging call."""
    return facts(request_id=request.name, trace_id=None if request.trace is None else request.trace[1].trace_id)
