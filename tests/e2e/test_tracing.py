# SPDX-License-Identifier: Apache-2.0
"""One trace over gateway, broker and worker group, from real processes to a collector; also when a group or a broker
dies. And the lines that the same processes log."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.span_reader import Collector, SeenSpan, trees
from tests.stack import PATIENCE_S, Stack, http, stream_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MODEL = "fake:step_ms=4,alphabet=letters"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
HEADERS = {
    "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01",
    "tracestate": "vendor=1",
    "x-request-id": "order-66",
    "Content-Type": "application/json",
}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def start_stack(url: str, groups: tuple[str, ...] = ("one",)) -> Stack:
    stack = Stack(broker_options=["--heartbeat-ms", "100", "--liveness", "10", "--otlp-endpoint", url])
    for name in groups:
        stack.start_group(name, MODEL, "--otlp-endpoint", url, wait=False)
    for name in groups:
        stack.groups[name].wait_ready(PATIENCE_S)
    stack.start_gateway("--otlp-endpoint", url)
    return stack


def ask(url: str, body: dict[str, object], headers: dict[str, str] = HEADERS) -> bytes:
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        data: bytes = response.read()
        return data


def root_of(spans: list[SeenSpan]) -> SeenSpan:
    (root,) = trees(spans)
    root.check_times()
    return root


def has_positive(page: str, beginning: str) -> bool:
    return any(float(line[len(beginning) :]) > 0 for line in page.splitlines() if line.startswith(beginning))


def is_lost_attempt(span: SeenSpan) -> bool:
    return span.name == "mii.broker.attempt" and span.is_error


def has_gateway_and_rest(spans: list[SeenSpan]) -> bool:
    names = [span.name for span in spans]
    return all(name in names for name in ("POST /v1/completions", "mii.broker.request", "mii.worker.request"))


def test_one_request_is_one_trace(collector: Collector) -> None:
    stack = start_stack(collector.url)
    try:
        ask(stack.url, {"model": "m", "prompt": "hello", "max_tokens": 20, "temperature": 0.5, "ignore_eos": True})
        root = root_of(collector.wait_for(has_gateway_and_rest))
        # The same times as histograms, by way of a heartbeat.
        counts = (
            'mii_engine_step_stage_seconds_count{deployment="m",stage="wait",worker="one"} ',
            'mii_request_phase_seconds_count{deployment="m",phase="decode",worker="one"} ',
        )
        stack.wait_for(lambda: all(has_positive(http(stack.url + "/metrics")[1].decode(), count) for count in counts))
    finally:
        stack.close()
    parts = ["mii.worker.tokenize", "mii.engine.queue", "mii.engine.prefill", "mii.engine.decode"]
    attempt = ["mii.broker.attempt", [["mii.worker.request", parts]]]
    assert root.names() == ["POST /v1/completions", [["mii.broker.request", ["mii.broker.queue", attempt]]]]
    assert (root.trace_id, root.parent_id, root.role) == (TRACE_ID, PARENT_ID, "mii_zmq.gateway")
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.response.finish_reasons": ["length"],
        "mii.request_id": "order-66",
    }
    assert expected.items() <= root.attributes.items()
    broker = root.one("mii.broker.request")
    assert broker.role == "mii_zmq.broker"
    assert {"mii.deployment": "m", "mii.finish_reason": "length"}.items() <= broker.attributes.items()
    assert root.one("mii.broker.attempt").attributes == {"mii.group": "one", "mii.attempt": 1}
    worker = root.one("mii.worker.request")
    facts = {"mii.group": "one", "mii.request_id": "order-66", "mii.prompt_tokens": 5, "mii.output_tokens": 20}
    assert facts.items() <= worker.attributes.items()
    assert [name for name, _ in worker.events] == ["first token"]


@pytest.mark.long
def test_death_of_group_and_broker_stands_in_the_trace(collector: Collector) -> None:
    stack = start_stack(collector.url, ("one", "two"))
    try:
        body = {"model": "m", "prompt": "hello", "max_tokens": 500, "ignore_eos": True}
        events = stream_events(stack.url, "/v1/completions", body)
        for _ in range(20):
            next(events)
        (name,) = [name for name, group in stack.groups_status().items() if group["num_requests"]]
        stack.groups[name].process.kill()
        # What the first broker knows goes with it, but for the attempt that it has seen the end of.
        collector.wait_for(lambda spans: any(is_lost_attempt(span) for span in spans))
        for _ in range(100):
            next(events)
        stack.broker.process.kill()
        stack.broker.process.wait()
        stack.broker.close()
        stack.start_broker()
        assert sum(1 for _ in events) > 0
        spans = collector.wait_for(has_gateway_and_rest)
    finally:
        stack.close()
    spans = [span for span in spans if span.name != "mii.worker.request" or not span.is_error]
    (root,) = [tree for tree in trees(spans) if tree.name == "POST /v1/completions"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 500
    assert [name for name, _ in root.events] == ["first token", "sent again"]
    assert root.events[1][1]["mii.received_tokens"] >= 100
    (lost,) = [span for span in spans if is_lost_attempt(span)]
    assert lost.attributes == {"mii.group": name, "mii.attempt": 1}
    assert lost.trace_id == root.trace_id
    again = root.one("mii.broker.request")
    (attempt,) = again.all("mii.broker.attempt")
    assert attempt.attributes["mii.resumed_tokens"] >= 100
    assert [event for event, _ in again.events] == ["resume"]


@pytest.mark.long
def test_a_dead_collector_costs_nothing_but_spans() -> None:
    stack = start_stack("http://127.0.0.1:9")
    try:
        assert b"length" in ask(stack.url, {"model": "m", "prompt": "hello", "max_tokens": 20, "ignore_eos": True})
        assert stack.gateway is not None
        started = time.monotonic()
        assert stack.gateway.stop(PATIENCE_S) == 0
        assert time.monotonic() - started < PATIENCE_S / 2
    finally:
        stack.close()
