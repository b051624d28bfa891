# SPDX-License-Identifier: Apache-2.0
"""The measurements of `bench_service`: the engine alone, the same requests through the service, and the service level
over the number of clients. Each yields the figures of one JSON line after the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service_load import Job, Level, LoadPool
from service_offline import level_seed
from service_stack import DEPLOYMENT, ROOT, CpuWatch, Service, child_environment, die_with_parent, tail

from mii_zmq.bench_client import ServerOptions
from mii_zmq.bench_datasets import RandomOptions
from mii_zmq.bench_metrics import Distribution, RequestRecord, summarize
from mii_zmq.bench_plots import check_can_plot, draw
from mii_zmq.bench_sla import effective_throughput, sla_share
from mii_zmq.command_line import to_arguments
from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError
from mii_zmq.serving_bench import BenchOptions, BenchResult, LevelResult, LoadOptions, measured

Result = dict[str, Any]
PERCENTILES = (50.0, 90.0, 99.0)
SLA_RATES = (2.0, 4.0, 6.0)
SLA_RATE = 4.0
STATUS_AGE_S = 1.5
"""The engine's counters at a gateway are at most so old: reported, sent and kept every half second."""


@dataclass(frozen=True)
class Sizes:
    """How much is sent."""

    input_len: int = 512
    output_len: int = 128
    levels: tuple[tuple[int, int], ...] = ((64, 512), (256, 1024))
    """Concurrency and requests of each."""
    sla_clients: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    sla_seconds: float = 12.0
    sla_requests: int = 400
    """At most, per point."""
    sla_input_len: int = 2600
    sla_output_len: int = 60
    max_input_len: int = 4000
    """As in DeepSpeed-MII's benchmark."""
    num_plain: int = 64
    num_beside: int = 16
    window_s: float = 6.0


DRY = Sizes(
    input_len=32, output_len=8, levels=((4, 12), (8, 16)), sla_clients=(1, 2), sla_seconds=1.0, sla_input_len=64,
    sla_output_len=8, max_input_len=200, num_plain=4, num_beside=2, window_s=2.0,
)  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """What all measurements share."""

    engine: EngineConfig
    vocab_size: int
    """Prompts are of ids below it."""
    sizes: Sizes
    folder: Path
    """For logs."""

    def job(self, service: Service, concurrency: int, count: int, seed: str, dataset: RandomOptions) -> Job:
        return Job(
            url=service.url, model=DEPLOYMENT, dataset=dataset, vocab_size=self.vocab_size, seed=seed,
            num_requests=count, concurrency=concurrency, bodies=[{"ignore_eos": True}],
        )  # fmt: skip


async def offline(bench: Bench, limit_s: float) -> AsyncIterator[Result]:
    """The engine alone, in a process of its own. Raises SystemExit with the end of its log."""
    sizes, log = bench.sizes, bench.folder / "offline.log"
    levels = ",".join(f"{concurrency}:{count}" for concurrency, count in sizes.levels)
    command = [sys.executable, "scripts/service_offline.py", *to_arguments(bench.engine), f"--levels={levels}"]
    command += [
        f"--input-len={sizes.input_len}",
        f"--output-len={sizes.output_len}",
        f"--vocab-size={bench.vocab_size}",
    ]
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=child_environment(), stdin=subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=file, preexec_fn=die_with_parent,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(limit_s):
            async for line in process.stdout:
                if line.startswith(b"{"):
                    yield json.loads(line)
            code = await process.wait()
        if code:
            raise SystemExit(f"the offline engine ended with exit code {code}; its log:\n{tail(log)}")
    except TimeoutError:
        raise SystemExit(f"the offline engine took more than {limit_s:.0f} s; its log:\n{tail(log)}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def closed_loops(
    bench: Bench, service: Service, pool: LoadPool, offline_rates: dict[int, float], limit_s: float
) -> AsyncIterator[Result]:
    """The offline levels' requests through gateways and broker."""
    sizes = bench.sizes
    for concurrency, count in sizes.levels:
        warm_up = RandomOptions(sizes.input_len, min(8, sizes.output_len))
        await pool.run(bench.job(service, concurrency, concurrency, f"warm-up {concurrency}", warm_up), limit_s)
        dataset = RandomOptions(sizes.input_len, sizes.output_len)
        await asyncio.sleep(STATUS_AGE_S)
        before = service.status()
        async with CpuWatch({**service.pids, **pool.pids}) as watch:
            level = await pool.run(bench.job(service, concurrency, count, level_seed(concurrency), dataset), limit_s)
        await asyncio.sleep(STATUS_AGE_S)
        after = service.status()
        summary = summarize(level.records, level.seconds, PERCENTILES)
        steps = increase(before, after, "step")
        rate, alone = summary.output_throughput, offline_rates.get(concurrency)
        yield {
            "test": f"service {concurrency}", "concurrency": concurrency, "requests": count,
            "failures": summary.failures, "output_tokens_per_s": round(rate, 1),
            "share_of_offline": round(rate / alone, 4) if alone else None, "seconds": round(level.seconds, 3),
            "steps": steps, "steps_per_s": steps and round(steps / level.seconds, 1),
            "tokens_per_step": steps and round(summary.total_output_tokens / steps, 1), "step_ms": after.get("step_ms"),
            "preemptions": increase(before, after, "num_preemptions"),
            "events_per_token": events_per_token(level.records),
            **{f"{name}_ms": shown(found) for name, found in summary.latencies.items() if name != "client_queue"},
            "client_cpu": [round(share, 2) for share in level.client_cpu],
            "cpu": watch.shares(level.start_at, level.seconds),
        }  # fmt: skip


async def service_level(
    bench: Bench, service: Service, pool: LoadPool, limit_s: float, plot_dir: Path | None
) -> AsyncIterator[Result]:
    """Effective throughput over the number of clients, and its plots."""
    sizes = bench.sizes
    dataset = RandomOptions(
        sizes.sla_input_len, sizes.sla_output_len, range_ratio=0.3, distribution="normal",
        max_input_tokens=sizes.max_input_len,
    )  # fmt: skip
    options = BenchOptions(
        ServerOptions(service.url), dataset, LoadOptions(sizes.sla_clients), percentiles=PERCENTILES,
        sla_rates=SLA_RATES,
    )  # fmt: skip
    results: list[LevelResult] = []
    most = max(sizes.sla_clients)
    await pool.run(bench.job(service, most, most, "warm-up of service levels", dataset), limit_s)
    for clients in sizes.sla_clients:
        job = bench.job(service, clients, sizes.sla_requests, f"service level {clients}", dataset)
        async with CpuWatch({**service.pids, **pool.pids}) as watch:
            level = await pool.run(job, limit_s, sizes.sla_seconds)
        found = measured(clients, level.records, level.seconds, max(level.client_cpu), options)
        results.append(found)
        yield {
            "test": f"sla {clients}", "clients": clients, "requests": len(level.records),
            "failures": found.summary.failures, "seconds": round(level.seconds, 2),
            "effective_requests_per_s": round(effective_throughput(level.records, level.seconds, SLA_RATE), 2),
            "share": round(sla_share(level.records, SLA_RATE), 4),
            "by_rate": {f"{rate:g}": round(value, 2) for rate, (value, _) in found.effective.items()},
            "requests_per_s": round(found.summary.request_throughput, 2),
            "output_tokens_per_s": round(found.summary.output_throughput, 1),
            **{f"{name}_ms": shown(value) for name, value in found.summary.latencies.items() if name != "client_queue"},
            "cpu": {name: shares["mean"] for name, shares in watch.shares(level.start_at, level.seconds).items()},
        }  # fmt: skip
    yield {"test": "sla plots", **plots(BenchResult(bench.engine.model, tuple(results)), plot_dir)}


def plots(result: BenchResult, directory: Path | None) -> Result:
    """The files' names, or why there are none."""
    if directory is None:
        return {"skipped": "no --plot-dir was given"}
    try:
        check_can_plot(directory)
        return {"files": [path.name for path in draw(result, directory)]}
    except (ConfigError, OSError) as error:
        return {"skipped": str(error)}


def gaps_between(level: Level, lead_s: float, window_s: float) -> list[float]:
    """Seconds between neighbouring chunks of the streams, both within the window and behind its lead."""
    begin, end = level.start_at + lead_s, level.start_at + window_s
    return [
        after - before
        for record in level.records
        for before, after in zip(record.chunk_times, record.chunk_times[1:], strict=False)
        if begin <= before and after <= end
    ]


def increase(before: dict[str, float], after: dict[str, float], name: str) -> float | None:
    """Of a counter; None where the engine was away, or is another one."""
    if name not in before or name not in after or after[name] < before[name]:
        return None
    return after[name] - before[name]


def merge(counts: dict[str, int], more: dict[str, int]) -> None:
    for kind, count in more.items():
        counts[kind] = counts.get(kind, 0) + count


def events_per_token(records: Sequence[RequestRecord]) -> float:
    """1: every token came by itself."""
    tokens = sum(record.output_tokens for record in records)
    return round(sum(len(record.chunk_times) for record in records) / tokens, 4) if tokens else 0.0


def shown(found: Distribution | None) -> dict[str, float] | None:
    if found is None:
        return None
    values: Iterable[tuple[str, float]] = (
        ("mean", found.mean),
        *((f"p{p:g}", v) for p, v in found.percentiles.items()),
    )
    return {name: round(value, 2) for name, value in values}


def replaced(sizes: Sizes, **fields: Any) -> Sizes:
    """`sizes` with those fields that are given."""
    return dataclasses.replace(sizes, **{name: value for name, value in fields.items() if value is not None})
