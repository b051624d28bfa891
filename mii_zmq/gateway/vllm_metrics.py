# SPDX-License-Identifier: Apache-2.0
"""The same numbers once more under the names that vLLM gives them: its dashboards and autoscalers go on working.

vLLM's label `model_name` is our deployment and its `engine` our worker group. What it measures inside its engine and
we at the gateway (first token, gaps, whole requests) includes the way through the broker here. Histograms have vLLM's
buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mii_zmq.gateway.broker_status import ENGINE, BrokerStatus, GroupStatus
from mii_zmq.gateway.service_metrics import coarse, counter, histogram
from mii_zmq.telemetry import VLLM_FIRST_TOKEN_S, VLLM_INTER_TOKEN_S, VLLM_REQUEST_S, Histogram

PREFIX = "vllm:"
_ENGINE_LABELS = ("model_name", "engine")
Numbers = Mapping[str, float]


def _of(name: str) -> Callable[[Numbers], float | None]:
    return lambda numbers: numbers.get(name)


def _looked_up(numbers: Numbers) -> float | None:
    """Prompt tokens that were looked for in the prefix cache: those found and those computed."""
    if ENGINE + "prompt_tokens" not in numbers:
        return None
    return numbers[ENGINE + "prompt_tokens"] + numbers.get(ENGINE + "cached_tokens", 0.0)


_OF_GROUPS: tuple[tuple[type[Any], str, str, Callable[[Numbers], float | None]], ...] = (
    (GaugeMetricFamily, "num_requests_running", "Requests in the engine's batches", _of(ENGINE + "running")),
    (GaugeMetricFamily, "kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", _of("kv_usage_ratio")),
    (CounterMetricFamily, "num_preemptions", "Sequences that were preempted", _of(ENGINE + "num_preemptions")),
    (CounterMetricFamily, "prompt_tokens", "Prompt tokens, cached ones included", _looked_up),
    (CounterMetricFamily, "generation_tokens", "Output tokens", _of(ENGINE + "generated_tokens")),
    (CounterMetricFamily, "prefix_cache_queries", "Prompt tokens looked up in the cache", _looked_up),
    (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens found in the cache", _of(ENGINE + "cached_tokens")),
)


class OwnHistograms(Protocol):
    """What the gateway measures itself, by (route and) deployment."""

    first_token_s: dict[tuple[str, str], Histogram]
    request_s: dict[tuple[str, str], Histogram]
    inter_token_s: dict[tuple[str], Histogram]
    prompt_sizes: dict[tuple[str], Histogram]
    output_sizes: dict[tuple[str], Histogram]


def vllm_families(status: BrokerStatus | None, own: OwnHistograms) -> Iterator[Metric]:
    label = ("model_name",)
    first_token_s, request_s = _by_deployment(own.first_token_s), _by_deployment(own.request_s)
    for name, text, found in (
        (
            "time_to_first_token_seconds",
            "Arrival at the gateway to first token",
            coarse(first_token_s, VLLM_FIRST_TOKEN_S),
        ),
        ("inter_token_latency_seconds", "Time between tokens", coarse(own.inter_token_s, VLLM_INTER_TOKEN_S)),
        ("e2e_request_latency_seconds", "Arrival at the gateway to last token", coarse(request_s, VLLM_REQUEST_S)),
        ("request_prompt_tokens", "Prompt tokens of a finished generation", own.prompt_sizes),
        ("request_generation_tokens", "Output tokens of a finished generation", own.output_sizes),
    ):
        yield histogram(PREFIX + name, text, label, found)
    if status is None:
        return
    finished = {(reason,): count for reason, count in status.labelled_counters.get("finished", {}).items()}
    yield counter(f"{PREFIX}request_success", "Requests that ended well", ("finished_reason",), finished)
    waiting = GaugeMetricFamily(
        f"{PREFIX}num_requests_waiting", "Requests that wait for a group or in one", None, label
    )
    for deployment in status.deployments.values():
        in_groups = sum(group.numbers.get(ENGINE + "waiting", 0.0) for group in deployment.groups)
        waiting.add_metric((deployment.name,), deployment.numbers.get("num_waiting", 0.0) + in_groups)
    yield waiting
    waits = {(d.name,): d.queue_time for d in status.deployments.values() if d.queue_time is not None}
    name, text = f"{PREFIX}request_queue_time_seconds", "From acceptance to a group"
    yield histogram(name, text, label, coarse(waits, VLLM_REQUEST_S))
    groups = [((d.name, group.name), group) for d in status.deployments.values() for group in d.groups]
    for family_class, name, text, read in _OF_GROUPS:
        yield _group_family(family_class(PREFIX + name, text, labels=_ENGINE_LABELS), groups, read)
    for name, key, bounds, text in _HISTOGRAMS_OF_GROUPS:
        phases = {labels: group.histograms[key] for labels, group in groups if key in group.histograms}
        yield histogram(PREFIX + name, text, _ENGINE_LABELS, coarse(phases, bounds))


def _group_family(
    family: Any, groups: list[tuple[tuple[str, str], GroupStatus]], read: Callable[[Numbers], float | None]
) -> Metric:
    for key, group in groups:
        value = read(group.numbers)
        if value is not None:
            family.add_metric(key, value)
    found: Metric = family
    return found


_HISTOGRAMS_OF_GROUPS = (
    ("request_prefill_time_seconds", "prefill", VLLM_REQUEST_S, "From a request's first step to its first token"),
    ("request_decode_time_seconds", "decode", VLLM_REQUEST_S, "From a request's first token to its last one"),
    ("request_inference_time_seconds", "inference", VLLM_REQUEST_S, "From a request's first step to its last token"),
    ("request_time_per_output_token_seconds", "per_token", VLLM_INTER_TOKEN_S, "Mean of a request's output tokens"),
)


def _by_deployment(histograms: Mapping[tuple[str, str], Histogram]) -> dict[tuple[str], Histogram]:
    """Summed over the routes, which share their buckets."""
    sums: dict[tuple[str], Histogram] = {}
    for (_, deployment), found in histograms.items():
        total = sums.setdefault((deployment,), Histogram(found.bounds))
        total.counts = [a + b for a, b in zip(total.counts, found.counts, strict=True)]
        total.total += found.total
    return sums
