# SPDX-License-Identifier: Apache-2.0
"""Tracing is off, and absent, unless asked for; sampling; the way to a collector, dead ones included."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.sdk.trace import TracerProvider

from mii_zmq.client import BackgroundLoop
from mii_zmq.config import BrokerConfig
from mii_zmq.errors import ConfigError
from mii_zmq.otlp import OtlpExporter, make_resource, traces_url
from mii_zmq.spans import Span
from mii_zmq.telemetry_config import TelemetryConfig
from mii_zmq.trace_context import TraceContext, new_span_id, new_trace_id
from mii_zmq.tracing import current_context, known, start_tracing
from tests.span_reader import Collector, Memory
from tests.stack import unused_port

HIDDEN = "import sys; sys.modules['opentelemetry'] = None\n"
"""As if the extra was not installed."""


def context(is_sampled: bool) -> TraceContext:
    return TraceContext(new_trace_id(), new_span_id(), is_sampled, "vendor=1")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.mark.slow
def test_processes_start_without_the_extra_and_import_nothing_of_it() -> None:
    modules = "mii_zmq.broker.__main__, mii_zmq.gateway.__main__, mii_zmq.worker.group, mii_zmq.worker.engine_process"
    start = f"import os, sys, {modules}\nfrom mii_zmq.tracing import *; from mii_zmq.telemetry_config import *\n"
    off = f"{start}assert start_tracing(TelemetryConfig(), 'broker') is None\n"
    found = run(f"{off}print([name for name in sys.modules if name.startswith(('opentelemetry', 'google'))])")
    assert found == "[]\n"
    asked = (
        "try:\n start_tracing(TelemetryConfig(otlp_endpoint='http://a:1'), 'x')\n"
        "except ConfigError as e:\n print(e)\n"
        "os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = 'http://a:1'\n"
        "print(start_tracing(TelemetryConfig(), 'x'))"
    )
    refused, result, warning = run(f"{HIDDEN}{off}{asked}").splitlines()
    assert refused.startswith("otlp_endpoint needs OpenTelemetry, of which opentelemetry")
    assert (result, "pip install 'mii_zmq[tracing]'" in warning) == ("None", True)


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_environment_alone_switches_it_on_and_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    tracing = start_tracing(TelemetryConfig(), "broker")
    assert tracing is not None
    tracing.close()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert start_tracing(TelemetryConfig(), "broker") is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert start_tracing(TelemetryConfig(otlp_endpoint="http://127.0.0.1:9"), "broker") is None


@pytest.mark.parametrize("url", ["", "127.0.0.1:4318", "ftp://a", "http://", "http://a:x"])
def test_bad_settings(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint is .*must be a URL"):
        BrokerConfig(otlp_endpoint=url)
    with pytest.raises(ConfigError, match="trace_ratio is 1.5"):
        BrokerConfig(trace_ratio=1.5)


def test_address_and_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("http://a:4318", "http://a:4318/", "http://a:4318/v1/traces"):
        assert traces_url(endpoint) == "http://a:4318/v1/traces"
    assert make_resource("worker", {"group": "g"}).attributes["service.name"] == "mii_zmq.worker"
    assert make_resource("worker", {"group": "g"}).attributes["mii.group"] == "g"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=a,mii.group=other")
    found = make_resource("worker", {"group": "g"}).attributes
    assert (found["service.name"], found["team"], found["mii.group"]) == ("mine", "a", "other")


def test_the_caller_decides_and_the_ratio_where_there_is_none() -> None:
    for ratio in (0.0, 1.0):
        tracing = Memory(ratio).tracing
        for is_sampled in (False, True):
            parent = context(is_sampled)
            found = tracing.enter(parent, "x")
            assert (found.trace_id, found.is_sampled, found.state) == (parent.trace_id, is_sampled, "vendor=1")
            assert found.span_id != parent.span_id
        assert tracing.enter(None, "x").is_sampled is bool(ratio)


def test_sampler_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    for ratio, expected in ((None, False), (1.0, True)):
        config = TelemetryConfig(otlp_endpoint="http://127.0.0.1:9", trace_ratio=ratio)
        tracing = start_tracing(config, "broker")
        assert tracing is not None
        assert tracing.enter(None, "x").is_sampled is expected
        tracing.close()


def test_spans_reach_a_collector_at_the_end() -> None:
    collector = Collector()
    try:
        tracing = start_tracing(TelemetryConfig(otlp_endpoint=collector.url), "gateway", group="g")
        assert tracing is not None
        now = time.monotonic()
        span = Span("work", context(True), now - 2, context(True), "server", known(a__b=1, c=None), error="bad")
        span.add_event("half", now - 1, tokens=3)
        tracing.record(span, now)
        tracing.close()
        (seen,) = collector.spans()
    finally:
        collector.close()
    assert (seen.name, seen.role, seen.is_error) == ("work", "mii_zmq.gateway", True)
    assert (seen.attributes, seen.events) == ({"a.b": 1}, [("half", {"mii.tokens": 3})])
    assert abs(seen.end - seen.start - 2_000_000_000) < 1000
    assert abs(seen.end - time.time_ns()) < 60e9


def test_span_of_the_calling_program_is_found_from_a_synchronous_client() -> None:
    async def look() -> TraceContext | None:
        return current_context()

    loop = BackgroundLoop()
    try:
        assert loop.run(look()) is None
        tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
        with tracer.start_as_current_span("outer") as span:
            found = loop.run(look())
        assert loop.run(look()) is None
    finally:
        loop.close()
    own = span.get_span_context()
    assert found == TraceContext(f"{own.trace_id:032x}", f"{own.span_id:016x}", True)


@pytest.mark.slow
def test_a_collector_that_never_answers_delays_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracing = start_tracing(TelemetryConfig(otlp_endpoint=endpoint), "gateway")
        assert tracing is not None
        with caplog.at_level(logging.WARNING):
            now = time.monotonic()
            for _ in range(10_000):
                tracing.record(Span("work", context(True), now), now)
        deadline = time.monotonic() + 30
        exporter = tracing._exporter
        assert isinstance(exporter, OtlpExporter)
        while not (exporter._way is not None and exporter._way.is_stuck):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started = time.monotonic()
        tracing.close(60.0)
        assert time.monotonic() - started < 30
        assert not [thread for thread in threading.enumerate() if "Otel" in thread.name and not thread.daemon]
    assert len([record for record in caplog.records if record.name.startswith(("opentelemetry", "mii_zmq"))]) <= 1


def test_a_collector_that_is_away_is_worth_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def complaints() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name.startswith(("opentelemetry", "mii_zmq"))]

    endpoint = f"http://127.0.0.1:{unused_port()}"
    tracing = start_tracing(TelemetryConfig(otlp_endpoint=endpoint), "gateway")
    assert tracing is not None
    now = time.monotonic()
    for _ in range(3):
        tracing.record(Span("work", context(True), now), now)
    tracing.close(0.2)
    # By a thread that goes on beyond the close where it gets no turn in time.
    deadline = time.monotonic() + 30
    while not complaints():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    logging.getLogger("opentelemetry.sdk.some.part").error("again")
    (line,) = complaints()
    assert line.getMessage().startswith("spans are not sent: ")
    assert line.levelname == "WARNING"
