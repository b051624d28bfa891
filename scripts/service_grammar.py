# SPDX-License-Identifier: Apache-2.0
"""What requests whose output follows a JSON schema cost the others, for `bench_service`: inter-token times of plain
streams with chats beside them, which have a grammar or do not. Skipped where the service offers no grammars.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import Any

from service_load import LoadPool
from service_parts import PERCENTILES, Bench, Result, gaps_between, merge, shown
from service_stack import DEPLOYMENT, OPENER, CpuWatch, Service

from mii_zmq.bench_datasets import RandomOptions
from mii_zmq.bench_metrics import RequestRecord, distribution, summarize

LEAD_S = 1.0
"""Of a window in which inter-token times are taken: streams begin."""
NUM_SCHEMAS = 8


async def structured(bench: Bench, service: Service, pool: LoadPool, limit_s: float) -> AsyncIterator[Result]:
    """Inter-token times of plain streams: alone, with plain chats beside them, and with as many that have a grammar."""
    refusal = await asyncio.to_thread(probe_grammar, service.url)
    if refusal is not None:
        yield {"test": "structured", "skipped": refusal}
        return
    sizes = bench.sizes
    plain = RandomOptions(sizes.input_len // 4, sizes.output_len * 2)
    chat = RandomOptions(sizes.input_len // 4, sizes.output_len)
    gaps: dict[str, list[float]] = {"alone": [], "plain": [], "grammar": []}
    beside_records: dict[str, list[RequestRecord]] = {"plain": [], "grammar": []}
    failures: dict[str, int] = {}
    cpu: dict[str, dict[str, float]] = {}
    formats = [{"response_format": response_format(index)} for index in range(NUM_SCHEMAS)]
    first = bench.job(service, NUM_SCHEMAS, NUM_SCHEMAS, "first of each schema", chat)
    first.endpoint, first.bodies = "chat", formats
    cold = (await pool.run(first, limit_s)).records
    for turn, kind in enumerate(("alone", "plain", "grammar", "grammar", "plain")):
        job = bench.job(service, sizes.num_plain, 16 * sizes.num_plain, f"plain streams {turn}", plain)
        beside = bench.job(service, sizes.num_beside, 64 * sizes.num_beside, f"beside {turn}", chat)
        beside.endpoint = "chat"
        if kind == "grammar":
            beside.bodies = formats
        async with CpuWatch({**service.pids, **pool.pids}) as watch:
            level = await pool.run(job, limit_s, sizes.window_s, None if kind == "alone" else beside)
        gaps[kind] += gaps_between(level, LEAD_S, sizes.window_s)
        cpu[kind] = {name: shares["mean"] for name, shares in watch.shares(level.start_at, level.seconds).items()}
        merge(failures, summarize(level.records, level.seconds).failures)
        if kind != "alone":
            beside_records[kind] += level.beside
    medians = {kind: found.median for kind, values in gaps.items() if (found := distribution(values, PERCENTILES))}
    is_known = "grammar" in medians and medians.get("plain", 0.0) > 0
    yield {
        "test": "structured", "plain_streams": sizes.num_plain, "beside": sizes.num_beside, "failures": failures,
        "itl_ratio": round(medians["grammar"] / medians["plain"], 4) if is_known else None,
        **{f"itl_{kind}_ms": shown(distribution(values, PERCENTILES)) for kind, values in gaps.items()},
        "beside_figures": {
            "first of each schema": figures(cold), **{kind: figures(found) for kind, found in beside_records.items()},
        }, "cpu": cpu,
    }  # fmt: skip


def figures(records: Sequence[RequestRecord]) -> Result:
    """Of the load beside: if it gets on more slowly, there is less of it, and the others have it easier."""
    summary = summarize(records, 0.0, PERCENTILES)
    return {
        "requests": len(records), "failures": summary.failures, "output_tokens": summary.total_output_tokens,
        **{f"{name}_ms": shown(summary.latencies[name]) for name in ("ttft", "tpot")},
    }  # fmt: skip


def probe_grammar(url: str) -> str | None:
    """None if the service follows a JSON schema, else why not."""
    format_ = {"name": "probe", "schema": {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}}
    body = {
        "model": DEPLOYMENT, "messages": [{"role": "user", "content": "answer"}], "max_completion_tokens": 32,
        "temperature": 0, "response_format": {"type": "json_schema", "json_schema": format_},
    }  # fmt: skip
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with OPENER.open(request, timeout=60) as response:
            content = json.load(response)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return f"the service offers no grammars ({error.code}): {error.read().decode(errors='replace')[:300]}"
    except (OSError, ValueError, LookupError) as error:
        return f"the service offers no grammars: {error}"
    if not str(content).lstrip().startswith("{"):
        return f"the service took a JSON schema but did not follow it: {str(content)[:80]!r}"
    return None


def response_format(index: int) -> dict[str, Any]:
    """A schema of its own, whose objects do not end within the outputs asked for."""
    kinds: list[dict[str, Any]] = [
        {"type": "integer"}, {"type": "boolean"}, {"enum": ["red", "green", "blue"]}, {"type": "null"},
        {"type": "array", "items": {"type": "number"}}, {"type": "string"},
    ]  # fmt: skip
    properties = {f"field_{index}_{number}": kinds[number % len(kinds)] for number in range(24)}
    schema = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return {"type": "json_schema", "json_schema": {"name": f"schema_{index}", "schema": schema, "strict": True}}
