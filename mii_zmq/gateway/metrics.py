# SPDX-License-Identifier: Apache-2.0
"""What the gateway counts, and the Prometheus page made of it and of the broker's status.

Counting happens per token on the event loop, so it is plain integers and a bisection here; the Prometheus objects are
built when somebody reads the page. Labels are routes, status codes, error codes, deployments that have answered, and
groups: never text that a client chose freely.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mii_zmq.gateway.broker_status import ENGINE_COUNTERS, BrokerStatus
from mii_zmq.gateway.request_record import RequestRecord
from mii_zmq.gateway.service_metrics import coarse, counter, histogram, service_families
from mii_zmq.gateway.vllm_metrics import vllm_families
from mii_zmq.telemetry import FIRST_TOKEN_S, INTER_TOKEN_S, LONG_S, NUM_TOKENS, REQUEST_S, SHORT_S, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The gateway's counters. Belongs to the event loop."""

    def __init__(self) -> None:
        self.http_requests: Counter[tuple[str, str]] = Counter()
        self.stream_errors: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.cached_tokens: Counter[str] = Counter()
        self.generated_tokens: Counter[str] = Counter()
        self.num_slow_readers = 0
        self.num_in_flight = 0
        self.first_token_s: dict[tuple[str, str], Histogram] = {}
        """By route and deployment, like `request_s`."""
        self.request_s: dict[tuple[str, str], Histogram] = {}
        self.inter_token_s: dict[tuple[str], Histogram] = {}
        self.prompt_sizes: dict[tuple[str], Histogram] = {}
        """Tokens per finished generation, like `output_sizes`."""
        self.output_sizes: dict[tuple[str], Histogram] = {}

    def observe_first_token(self, route: str, deployment: str, seconds: float) -> None:
        _observe(self.first_token_s, (route, deployment), FIRST_TOKEN_S, seconds)

    def observe_request(self, route: str, deployment: str, seconds: float) -> None:
        _observe(self.request_s, (route, deployment), REQUEST_S, seconds)

    def observe_gap(self, deployment: str, seconds: float, num_tokens: int) -> None:
        """`num_tokens` tokens of a stream that came `seconds` apart."""
        _observe(self.inter_token_s, (deployment,), INTER_TOKEN_S, seconds, num_tokens)

    def count_tokens(self, deployment: str, prompt: int, cached: int, generated: int) -> None:
        """Count a finished generation."""
        self.prompt_tokens[deployment] += prompt
        self.cached_tokens[deployment] += cached
        self.generated_tokens[deployment] += generated
        _observe(self.prompt_sizes, (deployment,), NUM_TOKENS, prompt)
        _observe(self.output_sizes, (deployment,), NUM_TOKENS, generated)

    def count_slow_reader(self) -> None:
        self.num_slow_readers += 1

    def render(self, status: BrokerStatus | None, client_is_connected: bool, own: Mapping[str, float]) -> bytes:
        """The Prometheus text page; `status` is None while no broker answers, `own` are gauges of this process."""
        registry = CollectorRegistry(auto_describe=False)
        families = [
            *self._families(),
            *_broker_families(status, client_is_connected),
            *service_families(status, own),
            *vllm_families(status, self),
        ]
        registry.register(_Page(families))
        return generate_latest(registry)

    def _families(self) -> Iterator[Metric]:
        yield counter("mii_gateway_http_requests", "HTTP requests answered", ("route", "code"), self.http_requests)
        yield counter(
            "mii_gateway_stream_errors", "Streams that ended with an error event", ("route", "code"), self.stream_errors
        )
        for name, text, tokens in (
            ("prompt", "Prompt tokens of finished generations", self.prompt_tokens),
            ("cached", "Prompt tokens that came from the prefix cache", self.cached_tokens),
            ("generated", "Output tokens of finished generations", self.generated_tokens),
        ):
            by_label = {(deployment,): count for deployment, count in tokens.items()}
            yield counter(f"mii_gateway_{name}_tokens", text, ("deployment",), by_label)
        yield counter("mii_gateway_slow_readers", "Answers cut because nobody read", (), {(): self.num_slow_readers})
        yield GaugeMetricFamily("mii_gateway_requests_in_flight", "Requests in progress", value=self.num_in_flight)
        labels = ("route", "deployment")
        name = "mii_gateway_time_to_first_token_seconds"
        yield histogram(name, "Arrival to first token of a stream", labels, coarse(self.first_token_s, LONG_S))
        name = "mii_gateway_request_seconds"
        yield histogram(name, "Arrival to last token", labels, coarse(self.request_s, LONG_S))
        name, gaps = "mii_gateway_inter_token_latency_seconds", coarse(self.inter_token_s, SHORT_S)
        yield histogram(name, "Time between tokens of a stream", ("deployment",), gaps)


class StreamClock:
    """Measures one HTTP request that generates: first token, gaps, end."""

    __slots__ = ("_last", "_metrics", "_record", "_route", "_start", "deployment")

    def __init__(self, metrics: Metrics, route: str, record: RequestRecord | None = None) -> None:
        """`record` is told when the first token came, and of errors."""
        self._metrics = metrics
        self._record = record
        self._route = route
        self._start = time.monotonic()
        self._last: dict[int, float] = {}
        self.deployment = ""
        """Set by who sends the request; counted only for what a deployment has answered."""

    def on_tokens(self, index: int, num_tokens: int) -> None:
        """Tokens of choice `index` that arrived together."""
        now = time.monotonic()
        last = self._last.get(index)
        if last is not None and num_tokens:
            self._metrics.observe_gap(self.deployment, (now - last) / num_tokens, num_tokens)
        elif not self._last:
            self._metrics.observe_first_token(self._route, self.deployment, now - self._start)
            if self._record is not None:
                self._record.first_token_s = now - self._record.started
        self._last[index] = now

    def on_end(self) -> None:
        self._metrics.observe_request(self._route, self.deployment, time.monotonic() - self._start)

    def on_error(self, code: str) -> None:
        self._metrics.stream_errors[self._route, code] += 1
        if self._record is not None:
            self._record.error_code = code


def _observe(
    histograms: dict[Any, Histogram], key: tuple[str, ...], bounds: tuple[float, ...], seconds: float, count: int = 1
) -> None:
    found = histograms.get(key)
    if found is None:
        found = histograms[key] = Histogram(bounds)
    found.observe(seconds, count)


class _Page(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _broker_families(status: BrokerStatus | None, client_is_connected: bool) -> Iterator[Metric]:
    yield GaugeMetricFamily("mii_broker_up", "A broker answers", value=int(client_is_connected and status is not None))
    if status is None:
        return
    for name, value in status.numbers.items():
        yield GaugeMetricFamily(f"mii_broker_{name}", f"The broker's {name}", value=value)
    for name, value in status.counters.items():
        yield CounterMetricFamily(f"mii_broker_{name}", f"The broker's count of {name}", value=value)
    for name, by_reason in status.labelled_counters.items():
        labelled = {(reason,): number for reason, number in by_reason.items()}
        yield counter(f"mii_broker_{name}", f"The broker's count of {name}", ("reason",), labelled)
    deployments = list(status.deployments.values())
    for name in status.deployment_numbers():
        gauge = GaugeMetricFamily(f"mii_deployment_{name}", f"Per deployment: {name}", labels=("deployment",))
        for deployment in deployments:
            if name in deployment.numbers:
                gauge.add_metric((deployment.name,), deployment.numbers[name])
        yield gauge
    for name in status.group_numbers():
        kind = CounterMetricFamily if name in ENGINE_COUNTERS else GaugeMetricFamily
        family = kind(f"mii_group_{name}", f"Per worker group: {name}", labels=("deployment", "group"))
        for deployment in deployments:
            for group in deployment.groups:
                if name in group.numbers:
                    family.add_metric((deployment.name, group.name), group.numbers[name])
        yield family
