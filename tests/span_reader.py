# SPDX-License-Identifier: Apache-2.0
"""Spans as tests read them: from the SDK's in-memory exporter, or sent by real processes to a collector of our own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from mii_zmq.otlp import OtlpExporter, make_resource
from mii_zmq.tracing import Tracing


@dataclass
class SeenSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    role: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    is_error: bool
    children: list[SeenSpan] = field(default_factory=list)

    def names(self) -> Any:
        """The tree below, as nested lists: [name, [child, ...]] in order of time, leaves as plain names."""
        ordered = sorted(self.children, key=lambda span: (span.start, span.end))
        return [self.name, [child.names() for child in ordered]] if ordered else self.name

    def all(self, name: str) -> list[SeenSpan]:
        """Every span of this name in the tree."""
        found = [self] if self.name == name else []
        for child in sorted(self.children, key=lambda span: (span.start, span.end)):
            found += child.all(name)
        return found

    def one(self, name: str) -> SeenSpan:
        (found,) = self.all(name)
        return found

    def check_times(self) -> None:
        """Parts lie inside the whole, give or take what two processes' clocks differ by."""
        assert self.start <= self.end, self
        for child in self.children:
            assert self.start - 2_000_000 <= child.start <= child.end <= self.end + 50_000_000, (self.name, child.name)
            child.check_times()


def trees(spans: list[SeenSpan]) -> list[SeenSpan]:
    """The spans whose parents are not among them, with everything below."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "two spans have one id"
    roots = []
    for span in spans:
        span.children = []
    for span in spans:
        if span.parent_id in by_id:
            assert by_id[span.parent_id].trace_id == span.trace_id
            by_id[span.parent_id].children.append(span)
        else:
            roots.append(span)
    return roots


class Memory:
    """`tracing` records into the SDK's in-memory exporter."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        exporter = OtlpExporter(
            SimpleSpanProcessor(self._exporter), ParentBasedTraceIdRatio(ratio), make_resource("test", {})
        )
        self.tracing = Tracing(exporter)

    def spans(self) -> list[SeenSpan]:
        return [
            SeenSpan(
                span.name,
                f"{span.context.trace_id:032x}",
                f"{span.context.span_id:016x}",
                "" if span.parent is None else f"{span.parent.span_id:016x}",
                span.start_time or 0,
                span.end_time or 0,
                str(span.resource.attributes["service.name"]),
                dict(span.attributes or {}),
                [(event.name, dict(event.attributes or {})) for event in span.events],
                not span.status.is_ok and span.status.status_code.name == "ERROR",
            )
            for span in self._exporter.get_finished_spans()
        ]

    def trees(self) -> list[SeenSpan]:
        return trees(self.spans())


class Collector:
    """Takes OTLP over HTTP on a port of loopback, from any number of processes."""

    def __init__(self) -> None:
        self._spans: list[SeenSpan] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def spans(self) -> list[SeenSpan]:
        with self._lock:
            return list(self._spans)

    def wait_for(self, condition: Callable[[list[SeenSpan]], bool], timeout_s: float = 60.0) -> list[SeenSpan]:
        """The spans, once they meet `condition`."""
        deadline = time.monotonic() + timeout_s
        while not condition(spans := self.spans()):
            assert time.monotonic() < deadline, sorted(span.name for span in spans)
            time.sleep(0.02)
        return spans

    def _take(self, request: ExportTraceServiceRequest) -> None:
        found = []
        for of_resource in request.resource_spans:
            resource = _values(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                found += [_seen(span, str(resource["service.name"])) for span in scope.spans]
        with self._lock:
            self._spans += found


def _seen(span: Any, role: str) -> SeenSpan:
    return SeenSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        role,
        _values(span.attributes),
        [(event.name, _values(event.attributes)) for event in span.events],
        span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
