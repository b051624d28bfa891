# SPDX-License-Identifier: Apache-2.0
"""The spans of one request in a worker group, made when it ends from the times that its record holds.

Below the broker's attempt: the request here, and in it tokenizing, the engine's queue, prefill (to the first token)
and decode. The engine reports when it began and how often it set the request back; everything else is known to the
actor. All times are of one machine's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from mii_zmq.errors import MiiError
from mii_zmq.protocol import GenerateHeader
from mii_zmq.trace_context import TraceContext, parse
from mii_zmq.tracing import Span, Tracing, known
from mii_zmq.worker.active_request import ActiveRequest


@dataclass(frozen=True, slots=True)
class RequestSpans:
    """Records the spans of a group's requests."""

    tracing: Tracing
    group: str
    deployment: str

    def enter(self, header: GenerateHeader) -> tuple[TraceContext | None, TraceContext] | None:
        """The sender's span and ours, of a request that is to be traced."""
        parent = parse(header.traceparent, header.tracestate)
        context = self.tracing.enter(parent, "mii.worker.request")
        return (parent, context) if context.is_sampled else None

    def leave(self, request: ActiveRequest, end: str | MiiError, now: float) -> None:
        """The request has ended."""
        if request.trace is None:
            return
        parent, context = request.trace
        times = request.times
        span = Span("mii.worker.request", context, times.arrived, parent, "server")
        span.attributes = known(
            mii__group=self.group,
            mii__deployment=self.deployment,
            mii__request_id=request.name,
            mii__seq_id=request.seq_id,
            mii__prompt_tokens=request.prompt_length,
            mii__cached_tokens=request.num_cached_tokens,
            mii__output_tokens=request.num_output_tokens,
            mii__num_preemptions=times.num_preemptions,
            mii__resumed_tokens=request.num_resumed_tokens or None,
        )
        if isinstance(end, MiiError):
            span.error = end.code
            span.attributes["error.type"] = end.code
        else:
            span.attributes["mii.finish_reason"] = end
        for name, start, stop in self._phases(request, now):
            part = Span(name, context.child(), start, context)
            if name == "mii.engine.prefill":
                part.attributes = known(
                    mii__prompt_tokens=request.prompt_length, mii__cached_tokens=request.num_cached_tokens
                )
            elif name == "mii.engine.decode":
                part.attributes = known(mii__num_preemptions=times.num_preemptions)
            self.tracing.record(part, stop)
        if times.first_row:
            span.add_event("first token", times.first_row)
        self.tracing.record(span, now)

    def _phases(self, request: ActiveRequest, now: float) -> list[tuple[str, float, float]]:
        """Name, start and end of what the request has come to."""
        times = request.times
        found = []
        if times.tokenize_start:
            found.append(("mii.worker.tokenize", times.tokenize_start, times.tokenize_end or now))
        if times.added:
            found.append(("mii.engine.queue", times.added, times.engine_start or now))
        if times.engine_start:
            found.append(("mii.engine.prefill", times.engine_start, times.first_row or now))
        if times.first_row:
            found.append(("mii.engine.decode", times.first_row, now))
        return found
