# SPDX-License-Identifier: Apache-2.0
"""vLLM's names on the metrics page."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from mii_zmq.gateway.metrics import Metrics, StreamClock
from mii_zmq.telemetry import LONG_S, VLLM_FIRST_TOKEN_S, VLLM_REQUEST_S
from tests.gateway.fake_client import FakeClient
from tests.gateway.reading import post


async def test_page_has_vllm_names(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    await post(http, "/mii/fake", {"prompts": ["a b", "c"]})
    for path, body in (
        ("/mii/fake", {"prompts": "a b c d", "stream": True}),
        ("/v1/completions", {"model": "fake", "prompt": "a b c d", "stream": True}),
    ):
        async with http.post(path, json=body) as response:
            await response.read()
    async with http.get("/metrics") as response:
        page = await response.text()
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }
    model = ("model_name", "fake")
    group = (("engine", "fake-0"), model)
    assert values["vllm:time_to_first_token_seconds_count", model] == 2
    assert values["vllm:e2e_request_latency_seconds_count", model] == 3
    assert values["vllm:num_requests_running", *group] == 3
    assert values["vllm:num_requests_waiting", model] == 3
    assert values["vllm:kv_cache_usage_perc", *group] == 0.25
    assert values["vllm:generation_tokens_total", *group] == 50
    assert values["vllm:request_generation_tokens_count", model] == 4
    assert values["vllm:request_prompt_tokens_sum", model] == 11
    assert values["vllm:request_prefill_time_seconds_sum", *group] == 7.5
    assert values["vllm:request_time_per_output_token_seconds_count", *group] == 16
    assert values["vllm:prefix_cache_hits_total", *group] == 30
    assert values["vllm:prefix_cache_queries_total", *group] == 130


async def test_buckets_are_vllm_s(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    async with http.post("/mii/fake", json={"prompts": "a b c d", "stream": True}) as response:
        await response.read()
    async with http.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    bounds: dict[str, list[str]] = {}
    for family in families:
        for sample in family.samples:
            is_fake = sample.labels.get("model_name", "fake") == "fake"
            if is_fake and sample.name.endswith("_bucket") and sample.labels.get("engine", "fake-0") == "fake-0":
                bounds.setdefault(sample.name, []).append(sample.labels["le"])
    for name, expected in (
        ("time_to_first_token_seconds", VLLM_FIRST_TOKEN_S),
        ("e2e_request_latency_seconds", VLLM_REQUEST_S),
    ):
        assert bounds[f"vllm:{name}_bucket"] == [*map(str, expected), "+Inf"]
    assert bounds["mii_gateway_time_to_first_token_seconds_bucket"] == [*map(str, LONG_S), "+Inf"]


async def test_stages_of_steps_by_group(http: aiohttp.ClientSession) -> None:
    async with http.get("/metrics") as response:
        page = await response.text()
    for name, label, value in (
        ("engine_step_stage_seconds", "stage", "plan"),
        ("engine_step_stage_seconds", "stage", "wait"),
        ("request_phase_seconds", "phase", "prefill"),
    ):
        labels = {"deployment": "fake", label: value, "worker": "fake-0"}
        shown = ",".join(f'{key}="{text}"' for key, text in sorted(labels.items()))
        assert f"mii_{name}_count{{{shown}}} 16.0" in page


def test_gaps_are_counted_by_deployment() -> None:
    metrics = Metrics()
    clock = StreamClock(metrics, "/mii/{deployment}")
    clock.deployment = "fake"
    for index, num_tokens in ((0, 1), (0, 3), (1, 1), (1, 1)):
        clock.on_tokens(index, num_tokens)
    page = metrics.render(None, False, {}).decode()
    assert 'vllm:inter_token_latency_seconds_count{model_name="fake"} 4.0' in page
    assert 'mii_gateway_time_to_first_token_seconds_count{deployment="fake",route="/mii/{deployment}"} 1.0' in page


async def test_page_without_a_broker(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.is_connected = False
    async with http.get("/metrics") as response:
        assert response.status == 200
        assert "vllm:time_to_first_token_seconds" in await response.text()
