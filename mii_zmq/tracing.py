# SPDX-License-Identifier: Apache-2.0
"""Spans of requests: plain records here, OpenTelemetry's where tracing is on (`otlp`, the extra `tracing`).

A span is recorded when it has ended; until then it is a few values in its request's record. Ids are made here, so that
they can be passed on before the SDK hears of them. A process without tracing has `None` in place of a `Tracing`,
imports nothing of OpenTelemetry, and does nothing per request but to pass the caller's context on.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any, Protocol

from mii_zmq.errors import ConfigError
from mii_zmq.spans import Event, Span, Value
from mii_zmq.telemetry_config import TelemetryConfig
from mii_zmq.trace_context import TraceContext, new_span_id, new_trace_id

__all__ = ["Event", "Exporter", "Span", "Tracing", "current_context", "known", "start_tracing"]

CLOSE_S = 2.0
"""How long the end of a process may wait for spans to leave."""
CLOCK_S = 10.0
"""The difference between the two clocks is measured that often."""
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_INSTALL = "pip install 'mii_zmq[tracing]'"

log = logging.getLogger(__name__)


class Exporter(Protocol):
    """Takes ended spans away; never blocks."""

    def decides(self, parent: TraceContext | None, trace_id: str, name: str) -> bool:
        """Whether a span that comes from `parent` (another process's; None: a new trace) is recorded."""
        ...

    def export(self, span: Span, end: float, offset_ns: int) -> None:
        """`offset_ns` makes wall-clock time of monotonic time."""
        ...

    def close(self, timeout_s: float) -> None: ...


class Tracing:
    """The spans of one process."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._offset_ns = 0
        self._offset_until = -1.0

    def enter(self, parent: TraceContext | None, name: str) -> TraceContext:
        """The context of this process's first span of a request; `is_sampled` says whether it is to be recorded."""
        trace_id = new_trace_id() if parent is None else parent.trace_id
        is_sampled = self._exporter.decides(parent, trace_id, name)
        return TraceContext(trace_id, new_span_id(), is_sampled, "" if parent is None else parent.state)

    def record(self, span: Span, end: float) -> None:
        """The span has ended. Returns at once; what the collector does not take in time is dropped."""
        if end >= self._offset_until:
            self._offset_ns = _clock_offset_ns()
            self._offset_until = end + CLOCK_S
        self._exporter.export(span, max(end, span.start), self._offset_ns)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what is left, for as long as that; blocks meanwhile, so it comes last."""
        self._exporter.close(timeout_s)


def _clock_offset_ns() -> int:
    """Wall-clock time less monotonic time; of several tries the one that was interrupted least."""
    tries = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after - before, wall - (before + after) // 2))
    return min(tries)[1]


def start_tracing(config: TelemetryConfig, role: str, **identity: str) -> Tracing | None:
    """What records this process's spans; None: tracing is off. `identity` becomes attributes of its resource.

    Raises:
        ConfigError: tracing is asked for by a setting, and the extra is not installed.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    by_environment = any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    if config.otlp_endpoint is None and (not by_environment or os.environ.get("OTEL_TRACES_EXPORTER") == "none"):
        return None
    try:
        from mii_zmq.otlp import OtlpExporter
    except ImportError as error:
        if config.otlp_endpoint is not None:
            raise ConfigError(
                f"otlp_endpoint needs OpenTelemetry, of which {error.name} is missing; {_INSTALL}"
            ) from None
        log.warning(
            "nothing is traced, although the environment names a collector: %s is missing; %s", error.name, _INSTALL
        )
        return None
    return Tracing(OtlpExporter.to_collector(config, role, identity))


def current_context() -> TraceContext | None:
    """The span that a program which uses OpenTelemetry is in; nothing is imported for a program that does not."""
    trace = sys.modules.get("opentelemetry.trace")
    found = None if trace is None else trace.get_current_span().get_span_context()
    if found is None or not found.is_valid:
        return None
    return TraceContext(
        f"{found.trace_id:032x}",
        f"{found.span_id:016x}",
        bool(found.trace_flags.sampled),
        found.trace_state.to_header(),
    )


def known(**values: Any) -> dict[str, Value]:
    """Attributes without those that are not known; '__' in a name stands for a dot."""
    return {name.replace("__", "."): value for name, value in values.items() if value is not None and value != ""}
