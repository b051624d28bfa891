# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a piece of work on a request. Data only; `tracing` sends it away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mii_zmq.trace_context import TraceContext

Value = str | int | float | bool | tuple[str, ...]
Kind = Literal["server", "internal"]


@dataclass(slots=True)
class Event:
    """Something that happened during a span."""

    name: str
    at: float
    """Monotonic time, like all times here."""
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Span:
    """One piece of work on a request."""

    name: str
    context: TraceContext
    start: float
    parent: TraceContext | None = None
    kind: Kind = "internal"
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    error: str | None = None
    """Why it counts as failed."""

    def add_event(self, name: str, at: float, **attributes: Value) -> None:
        self.events.append(Event(name, at, {f"mii.{key}": value for key, value in attributes.items()}))
