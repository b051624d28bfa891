# SPDX-License-Identifier: Apache-2.0
"""Shows the result of a serving benchmark: as a table with a column per level, and as JSON with vLLM's names."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mii_zmq.bench_metrics import Distribution, RequestRecord
from mii_zmq.serving_bench import BenchOptions, BenchResult, LevelResult, without_key

BUSY_CLIENT = 0.8
"""From this share of a core on, the benchmark itself may have been what was slow."""
TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
NOTHING = "-"


def text_table(result: BenchResult, options: BenchOptions) -> str:
    """Rows of figures, then what is out of the ordinary."""
    levels = result.levels
    rows: list[tuple[str, list[str]]] = []

    def add(title: str, cell: Callable[[LevelResult], str]) -> None:
        rows.append((title, [cell(level) for level in levels]))

    add("concurrency", lambda level: "no limit" if level.concurrency is None else str(level.concurrency))
    add("completed", lambda level: str(level.summary.num_completed))
    add("failed", lambda level: str(level.summary.num_failed))
    add("duration, s", lambda level: f"{level.summary.duration_s:.2f}")
    add("input tokens", lambda level: str(level.summary.total_input_tokens))
    add("output tokens", lambda level: str(level.summary.total_output_tokens))
    add("requests/s", lambda level: f"{level.summary.request_throughput:.2f}")
    if options.objectives:
        add("goodput, requests/s", lambda level: _number(level.summary.request_goodput))
    add("output tokens/s", lambda level: f"{level.summary.output_throughput:.1f}")
    add("total tokens/s", lambda level: f"{level.summary.total_token_throughput:.1f}")
    add("most requests at once", lambda level: str(level.summary.max_concurrent_requests))
    # In a closed loop all requests are due at once: how long they waited for their turn says nothing.
    shown = TITLES if math.isinf(options.load.request_rate) else {**TITLES, "client_queue": "client queue"}
    for name, title in shown.items():
        for statistic, value in _statistics(options.percentiles):
            add(f"{title} {statistic}, ms", _cell(name, value))
    for rate in options.sla_rates:
        add(f"effective at {rate:g} tokens/s, requests/s", _effective_cell(rate))
    add("client CPU, cores", lambda level: f"{level.client_cpu:.2f}")
    width = max(len(title) for title, _ in rows)
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(levels))]
    lines = [
        f"{title:<{width}}  " + "  ".join(f"{cell:>{size}}" for cell, size in zip(cells, widths, strict=True))
        for title, cells in rows
    ]
    return "\n".join([*lines, *_remarks(levels)])


def _statistics(percentiles: Sequence[float]) -> list[tuple[str, Callable[[Distribution], float]]]:
    def at(percent: float) -> Callable[[Distribution], float]:
        return lambda found: found.percentiles[percent]

    return [
        ("mean", lambda found: found.mean),
        ("median", lambda found: found.median),
        *((percentile_name(percent), at(percent)) for percent in percentiles),
    ]


def _cell(name: str, value: Callable[[Distribution], float]) -> Callable[[LevelResult], str]:
    def cell(level: LevelResult) -> str:
        found = level.summary.latencies[name]
        return NOTHING if found is None else f"{value(found):.2f}"

    return cell


def _effective_cell(rate: float) -> Callable[[LevelResult], str]:
    def cell(level: LevelResult) -> str:
        throughput, share = level.effective[rate]
        return f"{throughput:.2f} ({share:.0%})"

    return cell


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _remarks(levels: Sequence[LevelResult]) -> list[str]:
    remarks = []
    for level in levels:
        where = "" if level.concurrency is None else f" at concurrency {level.concurrency}"
        examples = {record.failure.kind: record.failure.message for record in level.records if record.failure}
        for kind, count in sorted(level.summary.failures.items()):
            remarks.append(f"FAILED{where}: {count} x {kind}; for example: {examples[kind]}")
        if level.summary.num_without_usage:
            remarks.append(
                f"note{where}: {level.summary.num_without_usage} answers stated no usage; their chunks are counted as "
                "tokens, and prompts as long as they were meant to be"
            )
        if level.client_cpu >= BUSY_CLIENT:
            remarks.append(
                f"note{where}: this client used {level.client_cpu:.2f} of a core and may have limited the figures; "
                "run several of them, or fewer clients each"
            )
    return remarks


def percentile_name(percent: float) -> str:
    """As in vLLM's results: p99, p99.9."""
    return f"p{percent:g}"


def as_json(result: BenchResult, options: BenchOptions, *, is_detailed: bool) -> dict[str, Any]:
    """Everything that was asked for and found out, but no key; `is_detailed` adds every request."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": result.model,
        "options": _plain(asdict(without_key(options))),
        "levels": [_level_json(level, is_detailed) for level in result.levels],
    }


def _level_json(level: LevelResult, is_detailed: bool) -> dict[str, Any]:
    summary = level.summary
    found: dict[str, Any] = {
        "max_concurrency": level.concurrency,
        "duration": summary.duration_s,
        "completed": summary.num_completed,
        "failed": summary.num_failed,
        "failures": summary.failures,
        "without_usage": summary.num_without_usage,
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        "max_output_tokens_per_s": summary.max_output_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent_requests,
        "client_cpu": level.client_cpu,
    }
    for name, values in summary.latencies.items():
        if values is None:
            continue
        found |= {f"mean_{name}_ms": values.mean, f"median_{name}_ms": values.median, f"std_{name}_ms": values.std}
        for percent, value in values.percentiles.items():
            found[f"{percentile_name(percent)}_{name}_ms"] = value
    found["effective_throughput"] = {
        f"{rate:g}": {"requests_per_s": throughput, "share": share}
        for rate, (throughput, share) in level.effective.items()
    }
    if is_detailed:
        start = min((record.sent_at for record in level.records), default=0.0)
        found["requests"] = [_request_json(record, start) for record in level.records]
    return found


def _request_json(record: RequestRecord, start: float) -> dict[str, Any]:
    """Times in seconds; `sent_at` counts from the first request of the level."""
    failure = record.failure
    return {
        "sent_at": record.sent_at - start,
        "client_queue": record.queued_s,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "ttft": None if failure else record.ttft_s,
        "e2el": record.e2el_s,
        "itls": record.itls_s,
        "failure": None if failure is None else f"{failure.kind}: {failure.message}",
    }


def _plain(value: Any) -> Any:
    """JSON has neither paths nor infinity."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return value if isinstance(value, str | int | float | None) else str(value)
