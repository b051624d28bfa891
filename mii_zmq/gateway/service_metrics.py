# SPDX-License-Identifier: Apache-2.0
"""The metrics that dashboards and autoscalers look for, under the names that they have elsewhere (prefix `mii_`).

Everything is in the broker's status as well, and on the page under the broker's own words; this is the part that is
promised to stay. Labels are deployments and groups, finish reasons, error codes and reasons of refusal, all of them
ours or the operator's: no text of a client is ever one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mii_zmq.gateway.broker_status import ENGINE, BrokerStatus
from mii_zmq.telemetry import LONG_S, Histogram

_COUNTERS = (
    ("request_retries", "retries", "Requests given to another group"),
    ("request_resumes", "resumes", "Requests that went on elsewhere behind delivered output"),
    ("resume_tokens", "resumed_tokens", "Output tokens that groups were given to replay"),
    ("poison_quarantined", "quarantined", "Requests ended because groups died of them"),
    ("slow_consumer", "slow_consumers", "Requests ended because nobody read their output"),
    ("merged_rows", "merged_rows", "Rows sent in place of several to readers without credit"),
    ("duplicate_frames_dropped", "dropped_rows", "Rows for requests that had ended, or ran elsewhere"),
    ("stale_incarnation_frames", "fenced", "Messages of workers that were not registered"),
    ("malformed_frames", "malformed", "Messages that broke the protocol"),
    ("groups_lost", "groups_lost", "Worker groups that died"),
    ("clients_lost", "clients_lost", "Clients that vanished with requests"),
    ("router_eagain", "router_full", "Messages to peers whose queue was full"),
    ("router_unroutable", "router_unroutable", "Messages to peers that were gone"),
)
_LABELLED_COUNTERS = (
    ("request_success", "finished", "finished_reason", "Requests that ended well"),
    ("request_failure", "errors", "code", "Requests that ended with an error, refusals included"),
    ("admission_rejections", "rejections", "reason", "Requests that were refused"),
    ("cancelled", "cancellations", "stage", "Requests that were cancelled"),
)
_DEPLOYMENT_GAUGES = (
    ("num_requests_running", "num_running", "Requests that are with a group"),
    ("num_requests_waiting", "num_waiting", "Requests that wait for a group"),
    ("waiting_tokens", "waiting_tokens", "Estimated tokens of the requests that wait"),
    ("drained_tokens_per_second", "drained_tokens_per_s", "Estimated tokens that leave the queue, while there is one"),
)
_GROUP_METRICS = (
    (GaugeMetricFamily, "kv_cache_usage_perc", "kv_usage_ratio", 1.0, "Share of the KV blocks in use, 0 to 1"),
    (GaugeMetricFamily, "worker_heartbeat_age_seconds", "heartbeat_age_ms", 0.001, "Since the last sign of life"),
    (GaugeMetricFamily, "engine_step_seconds", ENGINE + "step_ms", 0.001, "Duration of a recent step"),
    (CounterMetricFamily, "num_preemptions", ENGINE + "num_preemptions", 1.0, "Sequences that were preempted"),
    (CounterMetricFamily, "prompt_tokens", ENGINE + "prompt_tokens", 1.0, "Prompt tokens computed"),
    (CounterMetricFamily, "generation_tokens", ENGINE + "generated_tokens", 1.0, "Output tokens computed"),
    (CounterMetricFamily, "prefix_cache_hits", ENGINE + "cached_tokens", 1.0, "Prompt tokens found in the cache"),
    (CounterMetricFamily, "nonfinite_logits", ENGINE + "num_numeric_errors", 1.0, "Requests without finite logits"),
)


_GROUP_HISTOGRAMS: tuple[tuple[str, Mapping[str, str], str, str], ...] = (
    (
        "stage",
        {"step_plan": "plan", "step_submit": "submit", "step_wait": "wait", "step_finish": "finish"},
        "engine_step_stage_seconds",
        "Of a step: planned, submitted, waited for and read, finished",
    ),
    (
        "phase",
        {name: name for name in ("tokenize", "queue", "prefill", "decode")},
        "request_phase_seconds",
        "Of a request in its group: tokenized, waiting in the engine, prefill, decode",
    ),
)
"""Label, the group's histograms by its values, and the metric's name and help."""


def service_families(status: BrokerStatus | None, own: Mapping[str, float]) -> Iterator[Metric]:
    """`own` are gauges of the gateway's process, by name."""
    lags = {("gateway",): own["event_loop_lag_seconds"]} if "event_loop_lag_seconds" in own else {}
    if status is not None and "event_loop_lag_s" in status.numbers:
        lags["broker",] = status.numbers["event_loop_lag_s"]
    yield _gauge("event_loop_lag_seconds", "Worst delay of the event loop lately", ("process",), lags)
    for name, value in own.items():
        if name != "event_loop_lag_seconds":
            yield _gauge(name, "Of the gateway's process", (), {(): value})
    if status is None:
        return
    for name, key, text in _COUNTERS:
        if key in status.counters:
            yield counter(f"mii_{name}", text, (), {(): status.counters[key]})
    for name, key, label, text in _LABELLED_COUNTERS:
        values = {(reason,): count for reason, count in status.labelled_counters.get(key, {}).items()}
        yield counter(f"mii_{name}", text, (label,), values)
    yield from _deployment_families(status)
    yield from _group_families(status)


def _deployment_families(status: BrokerStatus) -> Iterator[Metric]:
    deployments = status.deployments.values()
    for name, key, text in _DEPLOYMENT_GAUGES:
        values = {(d.name,): d.numbers[key] for d in deployments if key in d.numbers}
        yield _gauge(name, text, ("deployment",), values)
    waits = coarse({(d.name,): d.queue_time for d in deployments if d.queue_time is not None}, LONG_S)
    yield histogram("mii_queue_time_seconds", "From acceptance to a group", ("deployment",), waits)


def _group_families(status: BrokerStatus) -> Iterator[Metric]:
    groups = [((d.name, group.name), group) for d in status.deployments.values() for group in d.groups]
    labels = ("deployment", "worker")
    yield _gauge("worker_up", "1: serves, 0: drains", labels, {key: float(group.is_ready) for key, group in groups})
    for family_class, name, number, factor, text in _GROUP_METRICS:
        family = family_class(f"mii_{name}", text, labels=labels)
        for key, group in groups:
            if number in group.numbers:
                family.add_metric(key, factor * group.numbers[number])
        yield family
    for label, names, metric, text in _GROUP_HISTOGRAMS:
        found = {
            (*key, short): group.histograms[name].coarse(LONG_S)
            for key, group in groups
            for name, short in names.items()
            if name in group.histograms
        }
        yield histogram(f"mii_{metric}", text, (*labels, label), found)


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(f"mii_{name}", text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def coarse(histograms: Mapping[Any, Histogram], bounds: tuple[float, ...]) -> dict[Any, Histogram]:
    """Each in these buckets, if it has them."""
    return {key: found.coarse(bounds) for key, found in histograms.items()}


def histogram(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for label_values, found in values.items():
        family.add_metric(label_values, found.buckets(), found.total)
    return family
