# SPDX-License-Identifier: Apache-2.0
"""Runs a serving benchmark: warms up, then one level after the other, each with prompts of its own.

A level is a number of requests under one limit on concurrency. Requests fall due by the arrival times and are sent when
the limit allows; with an infinite rate that is a closed loop of so many clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mii_zmq.bench_client import BenchClient, ServerOptions
from mii_zmq.bench_datasets import DEFAULT_VOCAB_SIZE, BenchPrompt, DatasetOptions, arrival_times, make_prompts
from mii_zmq.bench_metrics import RequestRecord, Summary, summarize
from mii_zmq.bench_sla import effective_throughput, sla_share
from mii_zmq.errors import ServiceError

WARM_UP_SEED = "warm-up"
"""Of no level, so that no random prompt of a level is in the prefix cache."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How much is sent when."""

    levels: tuple[int | None, ...] = (None,)
    """Most requests at a time, level by level; None: no limit."""
    num_prompts: int = 100
    """Per level; with `prompts_per_client` at least so many."""
    prompts_per_client: int | None = None
    """Requests of a level per unit of its concurrency."""
    request_rate: float = float("inf")
    burstiness: float = 1.0
    num_warmups: int = 1
    seed: int = 0

    def num_requests(self, level: int | None) -> int:
        if self.prompts_per_client is None or level is None:
            return self.num_prompts
        return max(self.num_prompts, self.prompts_per_client * level)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    server: ServerOptions
    dataset: DatasetOptions
    load: LoadOptions
    model: str | None = None
    """None: the first that the server lists."""
    vocab_size: int = DEFAULT_VOCAB_SIZE
    ready_timeout_s: float = 60.0
    percentiles: tuple[float, ...] = (99.0,)
    objectives: dict[str, float] | None = None
    """Limits in milliseconds that make a request good, by metric."""
    sla_rates: tuple[float, ...] = ()
    """Token rates for which the effective throughput is asked."""


@dataclass(frozen=True, slots=True)
class LevelResult:
    concurrency: int | None
    records: tuple[RequestRecord, ...]
    summary: Summary
    effective: dict[float, tuple[float, float]]
    """By token rate: requests per second that meet the service level, and their share."""
    client_cpu: float
    """Share of one core that this process used; near 1 it was the benchmark that was slow."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    model: str
    levels: tuple[LevelResult, ...]

    @property
    def num_failed(self) -> int:
        return sum(level.summary.num_failed for level in self.levels)


Report = Callable[[int | None, int, int, int], None]
"""Called with concurrency, requests done, of how many, and failed ones."""


async def run_bench(options: BenchOptions, report: Report) -> BenchResult:
    """All levels.

    Raises:
        ConfigError: the dataset cannot be read or is too small.
        ServiceError: no model is served there, or a warm-up request failed.
    """
    load = options.load
    seeds = [f"{load.seed}, level {index}" for index in range(len(load.levels))]
    prompts = [
        _prompts(options, load.num_requests(level), seed) for level, seed in zip(load.levels, seeds, strict=True)
    ]
    warm_ups = _warm_ups(options)
    async with BenchClient(options.server, options.model) as client:
        model = options.model or await client.find_model(options.ready_timeout_s)
        await _warm_up(client, warm_ups)
        levels = []
        for index, concurrency in enumerate(load.levels):
            due = arrival_times(len(prompts[index]), load.request_rate, load.burstiness, seeds[index])
            levels.append(await _run_level(client, prompts[index], due, concurrency, options, report))
    return BenchResult(model, tuple(levels))


def _prompts(options: BenchOptions, num_prompts: int, seed: str) -> list[BenchPrompt]:
    is_chat = options.server.endpoint == "chat"
    return make_prompts(options.dataset, num_prompts, seed, options.vocab_size, as_text=is_chat)


def _warm_ups(options: BenchOptions) -> list[BenchPrompt]:
    """As many as asked for: of a dataset of few prompts the first ones again."""
    wanted = options.load.num_warmups
    available = min(wanted, options.load.num_prompts)
    drawn = _prompts(options, available, WARM_UP_SEED)
    return [drawn[index % available] for index in range(wanted)]


async def _warm_up(client: BenchClient, prompts: Sequence[BenchPrompt]) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.send(prompt)) for prompt in prompts]
    for task in tasks:
        failure = task.result().failure
        if failure is not None:
            raise ServiceError(f"a warm-up request failed ({failure.kind}): {failure.message}")


async def _run_level(
    client: BenchClient,
    prompts: Sequence[BenchPrompt],
    due: Sequence[float],
    concurrency: int | None,
    options: BenchOptions,
    report: Report,
) -> LevelResult:
    turn = contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
    records: list[RequestRecord] = []
    num_failed = 0

    async def request(prompt: BenchPrompt, due_at: float) -> None:
        nonlocal num_failed
        async with turn:
            records.append(await client.send(prompt, max(0.0, time.perf_counter() - due_at)))
        num_failed += records[-1].failure is not None
        report(concurrency, len(records), len(prompts), num_failed)

    report(concurrency, 0, len(prompts), 0)
    cpu_before, started = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for prompt, after in zip(prompts, due, strict=True):
            wait_s = started + after - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            group.create_task(request(prompt, started + after))
    duration_s = time.perf_counter() - started
    client_cpu = (time.process_time() - cpu_before) / duration_s
    return measured(concurrency, records, duration_s, client_cpu, options)


def measured(
    concurrency: int | None,
    records: Sequence[RequestRecord],
    duration_s: float,
    client_cpu: float,
    options: BenchOptions,
) -> LevelResult:
    """The result that the records of a level make."""
    return LevelResult(
        concurrency=concurrency,
        records=tuple(records),
        summary=summarize(records, duration_s, options.percentiles, options.objectives),
        effective={
            rate: (effective_throughput(records, duration_s, rate), sla_share(records, rate))
            for rate in options.sla_rates
        },
        client_cpu=client_cpu,
    )


def without_key(options: BenchOptions) -> BenchOptions:
    """For what is written down."""
    return replace(options, server=replace(options.server, api_key=None))
