# SPDX-License-Identifier: Apache-2.0
"""Whole runs against a real server."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from aiohttp import web

from mii_zmq.bench_client import ServerOptions
from mii_zmq.bench_datasets import RandomOptions
from mii_zmq.bench_report import text_table
from mii_zmq.errors import ServiceError
from mii_zmq.serving_bench import BenchOptions, LoadOptions, run_bench
from tests.bench_server import good, serving

DATASET = RandomOptions(input_tokens=20, output_tokens=4)


def ignore(*_: object) -> None:
    pass


def options(url: str, **load: object) -> BenchOptions:
    defaults = {"num_prompts": 6, "num_warmups": 0}
    return BenchOptions(
        ServerOptions(url, timeout_s=60.0),
        DATASET,
        LoadOptions(**{**defaults, **load}),  # type: ignore[arg-type]
        sla_rates=(4.0,),
    )


async def test_a_sweep_has_one_level_per_concurrency_each_with_prompts_of_its_own() -> None:
    async with serving() as server:
        asked = options(server.url, levels=(1, 3), num_warmups=2)
        result = await run_bench(asked, ignore)
        again = await run_bench(asked, ignore)
        assert (result.model, result.num_failed) == ("m", 0)
        assert [level.concurrency for level in result.levels] == [1, 3]
        assert [level.summary.num_completed for level in result.levels] == [6, 6]
        assert result.levels[0].summary.max_concurrent_requests == 1
        assert result.levels[1].summary.max_concurrent_requests <= 3
        assert result.levels[0].effective.keys() == {4.0}
        prompts = [tuple(body["prompt"]) for body in server.bodies]
        assert len(prompts) == 2 * (2 + 6 + 6)
        assert len(set(prompts)) == 2 + 6 + 6
        assert again.num_failed == 0


@pytest.mark.parametrize("concurrency", [1, 2, 5])
async def test_no_more_requests_run_than_allowed(concurrency: int) -> None:
    async with serving() as server:
        await run_bench(options(server.url, levels=(concurrency,), num_prompts=20), ignore)
        assert server.most_running <= concurrency


async def test_requests_that_are_due_later_are_sent_later() -> None:
    async with serving() as server:
        asked = options(server.url, request_rate=200.0, burstiness=math.inf)
        result = await run_bench(asked, ignore)
        assert result.levels[0].summary.duration_s >= 6 / 200
        assert "client queue mean, ms" in text_table(result, asked)


async def test_failures_are_counted_and_reported_as_they_happen() -> None:
    def plan(number: int) -> list[bytes] | web.Response:
        return good(number) if number % 3 else web.json_response({"error": {"message": "later"}}, status=429)

    reports: list[tuple[object, ...]] = []
    async with serving(plan) as server:
        asked = options(server.url, levels=(1,))
        result = await run_bench(asked, lambda *report: reports.append(report))
    assert reports[0] == (1, 0, 6, 0)
    assert reports[-1] == (1, 6, 6, 2)
    assert result.num_failed == 2
    assert result.levels[0].summary.failures == {"HTTP 429": 2}
    assert "FAILED at concurrency 1: 2 x HTTP 429; for example: later" in text_table(result, asked)


async def test_a_failed_warm_up_ends_the_run_before_it_begins() -> None:
    async with serving(lambda _: web.Response(status=500)) as server:
        with pytest.raises(ServiceError, match=r"warm-up request failed \(HTTP 500\)"):
            await run_bench(options(server.url, num_warmups=1), ignore)
        assert len(server.bodies) == 1


def test_requests_per_client() -> None:
    load = LoadOptions(num_prompts=10, prompts_per_client=4)
    assert [load.num_requests(level) for level in (None, 1, 2, 3, 8)] == [10, 10, 10, 12, 32]
    assert replace(load, prompts_per_client=None).num_requests(8) == 10
