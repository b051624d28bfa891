# SPDX-License-Identifier: Apache-2.0
"""The broker's spans: a request, its waits for a group, its attempts on groups. Part of the shell, not of the state.

The state says by `Note`s what happened to a request; the shell says when. An attempt's id is derived from the request's
and the attempt's number, so that the state can name it in the GENERATE that it sends, without knowing of spans.
"""

from __future__ import annotations

from dataclasses import dataclass

from mii_zmq.broker.records import Note
from mii_zmq.protocol import Message
from mii_zmq.trace_context import parse, request_name
from mii_zmq.tracing import Span, Tracing, known

MAX_TEXT = 200


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    span: Span
    queued_at: float
    attempt: Span | None = None
    was_with: str = ""
    """The last group that had it."""
    is_waiting: bool = True
    """For a group; not when one has it, or has finished it."""


class RequestSpans:
    """By the request's own span, as `Note.trace` names it."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, message: Message, now: float) -> str:
        """A GENERATE has come: put our span in place of its sender's. Returns the name of what was opened, or ''."""
        header = message.header
        parent = parse(header.get("traceparent"), header.get("tracestate"))
        context = self._tracing.enter(parent, "mii.broker.request")
        header["traceparent"] = context.traceparent
        if not context.is_sampled:
            return ""
        span = Span("mii.broker.request", context, now, parent, "server")
        deployment = header.get("deployment")
        span.attributes = known(
            mii__request_id=request_name(header.get("x_request_id"), message.request_id),
            mii__wire_id=message.request_id.hex(),
            mii__deployment=deployment[:MAX_TEXT] if isinstance(deployment, str) else None,
            mii__stream=header.get("stream") is True,
        )
        self._open[context.traceparent] = _Open(span, now)
        return context.traceparent

    def discard(self, trace: str) -> None:
        """Nobody has taken the request in, or refused it: its message was at fault."""
        self._open.pop(trace, None)

    def on_note(self, note: Note, now: float) -> None:
        request = self._open.get(note.trace)
        if request is None:
            return
        if note.event == "assigned":
            self._assigned(request, note, now)
        elif note.event == "retried":
            why = str(note.facts.get("why", ""))[:MAX_TEXT]
            request.span.add_event("retry", now, group=request.was_with, why=why)
            self._leave_group(request, now, why)
            request.queued_at, request.is_waiting = now, True
        elif note.event == "finished":
            request.span.attributes |= known(mii__finish_reason=note.facts["reason"])
            self._leave_group(request, now, None)
        elif note.event == "failed":
            code = str(note.facts["code"])
            request.span.error = code
            request.span.attributes["error.type"] = code
            self._leave_group(request, now, code)
        elif note.event == "ended":
            del self._open[note.trace]
            request.span.attributes |= known(mii__output_tokens=note.facts.get("num_tokens"))
            self._tracing.record(request.span, now)

    def _assigned(self, request: _Open, note: Note, now: float) -> None:
        facts, context = note.facts, request.span.context
        self._queue_span(request, now, None)
        request.is_waiting = False
        attempt, resumed = int(facts["attempt"]) + 1, int(facts["num_tokens"])
        request.was_with = str(facts["group"])
        request.attempt = Span("mii.broker.attempt", context.derived(int(facts["number"])), now, context)
        request.attempt.attributes = known(mii__group=request.was_with, mii__attempt=attempt)
        if resumed:
            request.attempt.attributes["mii.resumed_tokens"] = resumed
            request.span.add_event("resume", now, group=request.was_with, resumed_tokens=resumed)

    def _leave_group(self, request: _Open, now: float, error: str | None) -> None:
        """The attempt is over, or (it had none) the wait for one."""
        if request.attempt is not None:
            request.attempt.error = error
            self._tracing.record(request.attempt, now)
            request.attempt = None
        elif error is not None and request.is_waiting:
            self._queue_span(request, now, error)

    def _queue_span(self, request: _Open, now: float, error: str | None) -> None:
        context = request.span.context
        self._tracing.record(Span("mii.broker.queue", context.child(), request.queued_at, context, error=error), now)
