# SPDX-License-Identifier: Apache-2.0
"""Health tells the truth; the metrics page parses, counts, and holds no text of clients."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from mii_zmq.gateway.broker_status import BrokerStatus
from mii_zmq.telemetry import Histogram
from tests.gateway.fake_client import FakeClient
from tests.gateway.reading import post


async def status_of(http: aiohttp.ClientSession, path: str) -> int:
    async with http.get(path) as response:
        return response.status


async def test_health_follows_the_broker(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    async with http.get("/healthz") as response:
        assert (response.status, await response.text(), response.content_type) == (200, "ok", "text/html")
    for path in ("/health", "/health/ready", "/health/ready?deployment=org/fake-7b", "/health/live"):
        assert await status_of(http, path) == 200
    assert await status_of(http, "/health/ready?deployment=nobody") == 404
    broker.is_connected = False
    for path in ("/healthz", "/health", "/health/ready", "/health/ready?deployment=fake"):
        assert await status_of(http, path) == 503
    assert await status_of(http, "/health/live") == 200


async def test_not_ready_without_groups(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.deployments = ()
    assert await status_of(http, "/health/ready") == 503
    assert await status_of(http, "/healthz") == 200


async def test_metrics_page(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    await post(http, "/mii/fake", {"prompts": ["a b", "c"]})
    async with http.post("/mii/fake", json={"prompts": "a b c d", "stream": True}) as response:
        await response.read()
    await post(http, "/mii/evil-name", {"prompts": "a"})
    await post(http, "/evil-path", {})
    async with http.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        page = await response.text()
    assert "evil" not in page
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    route = ("route", "/mii/{deployment}")
    assert values["mii_gateway_http_requests_total", ("code", "200"), route] == 2
    assert values["mii_gateway_http_requests_total", ("code", "404"), route] == 1
    assert values["mii_gateway_http_requests_total", ("code", "404"), ("route", "unmatched")] == 1
    assert values["mii_gateway_generated_tokens_total", ("deployment", "fake")] == 7
    assert values["mii_gateway_prompt_tokens_total", ("deployment", "fake")] == 7
    deployment = ("deployment", "fake")
    assert values["mii_gateway_time_to_first_token_seconds_count", deployment, route] == 1
    assert values["mii_gateway_request_seconds_count", deployment, route] == 2
    assert values["mii_gateway_requests_in_flight",] == 0
    assert values["mii_broker_up",] == 1
    assert values["mii_broker_accepted_total",] == 10
    assert values["mii_broker_errors_total", ("reason", "overloaded")] == 4
    group = (("deployment", "fake"), ("group", "fake-0"))
    assert values["mii_broker_num_unfinished",] == 6
    assert values["mii_deployment_num_waiting", ("deployment", "fake")] == 2
    assert values["mii_group_engine_running", *group] == 3
    assert values["mii_group_engine_generated_tokens_total", *group] == 50
    assert values["mii_group_kv_usage_ratio", *group] == 0.25
    assert values["mii_group_heartbeat_age_ms", *group] == 100


async def test_metrics_without_a_broker(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.is_connected = False
    async with http.get("/metrics") as response:
        assert response.status == 200
        assert "mii_broker_up 0.0" in await response.text()


def test_histogram_counts_many_at_once() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0, 3)
    histogram.observe(1.5)
    histogram.observe(9.0)
    assert histogram.buckets() == [("1.0", 3.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 13.5


def test_status_of_a_newer_broker_is_read() -> None:
    status = BrokerStatus.parse({"deployments": {"a": {"num_waiting": 1, "new": "x", "groups": ["odd"]}}, "more": 1})
    assert status.deployment_numbers() == ["num_waiting"]
    assert status.numbers == {"more": 1.0}
    assert not status.is_ready("a")
    assert BrokerStatus.parse({}) == BrokerStatus()


async def test_metrics_by_the_names_that_others_use(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    async with http.get("/metrics") as response:
        page = await response.text()
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    fake, worker = ("deployment", "fake"), (("deployment", "fake"), ("worker", "fake-0"))
    assert values["mii_request_retries_total",] == 1
    assert values["mii_slow_consumer_total",] == 2
    assert values["mii_request_success_total", ("finished_reason", "stop")] == 5
    assert values["mii_request_failure_total", ("code", "overloaded")] == 4
    assert values["mii_admission_rejections_total", ("reason", "tenant")] == 3
    assert values["mii_cancelled_total", ("stage", "running")] == 1
    assert values["mii_num_requests_waiting", fake] == 2
    assert values["mii_waiting_tokens", fake] == 500
    assert values["mii_queue_time_seconds_count", fake] == 6
    assert values["mii_queue_time_seconds_bucket", fake, ("le", "1.0")] == 5
    assert values["mii_worker_up", *worker] == 1
    assert values["mii_worker_heartbeat_age_seconds", *worker] == 0.1
    assert values["mii_kv_cache_usage_perc", *worker] == 0.25
    assert values["mii_generation_tokens_total", *worker] == 50
    assert values["mii_event_loop_lag_seconds", ("process", "broker")] == 0.25
    assert values["mii_event_loop_lag_seconds", ("process", "gateway")] >= 0
    assert values["mii_open_fds",] > 3


def test_a_histogram_that_is_none_is_left_out() -> None:
    for values in (None, {}, {"bounds": [1], "counts": [1], "total": 1}, {"bounds": "x", "counts": [1, 2], "total": 1}):
        assert Histogram.from_map(values) is None
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.5, 3)
    again = Histogram.from_map(histogram.to_map())
    assert again is not None
    assert again.to_map() == histogram.to_map()
