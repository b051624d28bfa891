# SPDX-License-Identifier: Apache-2.0
"""Our spans as OpenTelemetry's, and their way to a collector: OTLP over HTTP from a thread of the SDK's.

The only module that imports OpenTelemetry, and imported only where tracing is on. Spans are handed to the SDK's
processor complete, as values, not through its tracer: their ids were made, and passed on to other processes, before
they ended. The processor's queue is bounded: what a collector that is dead or slow does not take is dropped there, and
the complaints about it are logged once a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from mii_zmq.spans import Span
from mii_zmq.telemetry_config import TelemetryConfig
from mii_zmq.trace_context import TraceContext
from mii_zmq.version import __version__

TRACES_PATH = "/v1/traces"
DELAY_MS = 1000
BATCH_SPANS = 128
"""Small: encoding a batch holds the interpreter, and with it the event loop, for some milliseconds."""
TIMEOUT_S = 5.0
STUCK_S = 0.5
STUCK_CLOSE_S = 0.1
"""A collector that has kept a batch waiting for longer than STUCK_S does not get its time at the end as well."""
COMPLAINT_S = 60.0
MAX_COMPLAINT_CHARS = 300
_KINDS = {"server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
_SCOPE = InstrumentationScope("mii_zmq", __version__)

log = logging.getLogger(__name__)


class OtlpExporter:
    """`tracing.Exporter` on a processor and a sampler of the SDK's."""

    def __init__(
        self, processor: SpanProcessor, sampler: Sampler, resource: Resource, way: _WatchedExporter | None = None
    ) -> None:
        """`way` is what the processor sends by, for the end to know whether it works."""
        self._way = way
        self._processor = processor
        self._sampler = sampler
        self._resource = resource

    @classmethod
    def to_collector(cls, config: TelemetryConfig, role: str, identity: Mapping[str, str]) -> OtlpExporter:
        """What no setting says is as the standard variables OTEL_* say, which the SDK reads by itself."""
        theirs = logging.getLogger("opentelemetry")
        theirs.handlers[:], theirs.propagate = [_Complaints()], False
        variables = os.environ
        has_timeout = any(f"OTEL_EXPORTER_OTLP_{name}" in variables for name in ("TIMEOUT", "TRACES_TIMEOUT"))
        exporter = OTLPSpanExporter(
            endpoint=None if config.otlp_endpoint is None else traces_url(config.otlp_endpoint),
            timeout=None if has_timeout else TIMEOUT_S,
        )
        way = _WatchedExporter(exporter)
        processor = BatchSpanProcessor(
            way,
            schedule_delay_millis=None if "OTEL_BSP_SCHEDULE_DELAY" in variables else DELAY_MS,
            max_export_batch_size=None if "OTEL_BSP_MAX_EXPORT_BATCH_SIZE" in variables else BATCH_SPANS,
        )
        ratio = config.trace_ratio
        sampler = sampler_by_environment() if ratio is None else ParentBasedTraceIdRatio(ratio)
        return cls(processor, sampler, make_resource(role, identity), way)

    def decides(self, parent: TraceContext | None, trace_id: str, name: str) -> bool:
        context = Context()
        if parent is not None:
            context = set_span_in_context(NonRecordingSpan(_span_context(parent, is_remote=True)), context)
        return bool(self._sampler.should_sample(context, int(trace_id, 16), name).decision.is_sampled())

    def export(self, span: Span, end: float, offset_ns: int) -> None:
        def wall(at: float) -> int:
            return int(at * 1e9) + offset_ns

        parent = span.parent
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=_span_context(span.context),
                parent=None if parent is None else _span_context(parent, is_remote=span.kind == "server"),
                resource=self._resource,
                attributes=span.attributes,
                events=[Event(event.name, event.attributes, wall(event.at)) for event in span.events],
                kind=_KINDS[span.kind],
                status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=wall(span.start),
                end_time=wall(end),
                instrumentation_scope=_SCOPE,
            )
        )

    def close(self, timeout_s: float) -> None:
        if self._way is not None and self._way.is_stuck:
            timeout_s = min(timeout_s, STUCK_CLOSE_S)
        # The SDK's own way to the end may take as long as the collector likes; it is left alone when time is up, which
        # daemon threads allow.
        thread = threading.Thread(target=self._shut_down, name="tracing-end", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive() and self._way is not None:
            self._way.shutdown()

    def _shut_down(self) -> None:
        with contextlib.suppress(Exception):
            self._processor.shutdown()


def traces_url(endpoint: str) -> str:
    """The address that spans are sent to: `endpoint` is the collector's, or this already."""
    base = endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


def make_resource(role: str, identity: Mapping[str, str]) -> Resource:
    """Who this process is. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over what is said here."""
    ours: dict[str, str | int] = {
        "service.name": f"mii_zmq.{role}",
        "service.namespace": "mii_zmq",
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        **{f"mii.{name}": value for name, value in identity.items()},
    }
    by_environment = dict(Resource.create({}).attributes)
    if str(by_environment.get("service.name", "")).startswith("unknown_service"):
        del by_environment["service.name"]  # made up by the SDK
    return Resource(ours).merge(Resource(by_environment))


def sampler_by_environment() -> Sampler:
    """As OTEL_TRACES_SAMPLER says; without it everything is traced that its caller does not exclude."""
    return TracerProvider(shutdown_on_exit=False).sampler


def _span_context(context: TraceContext, is_remote: bool = False) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote,
        TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT),
        TraceState.from_header([context.state]) if context.state else None,
    )


class _WatchedExporter(SpanExporter):
    """Knows how long the sending under way has taken."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._since: float | None = None

    @property
    def is_stuck(self) -> bool:
        since = self._since
        return since is not None and time.monotonic() - since > STUCK_S

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._since = time.monotonic()
        try:
            return self._exporter.export(spans)
        finally:
            self._since = None

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Complaints(logging.Handler):
    """A collector that is away is worth one line a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + COMPLAINT_S
            log.warning("spans are not sent: %s", record.getMessage()[:MAX_COMPLAINT_CHARS])
