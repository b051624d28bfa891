#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ten times more requests than the fake engine can serve: what is still served, and how fast the rest is refused.

    scripts/overload.py --seconds 60 --factor 10 --seed 1

    scripts/overload.py --via http

First the capacity: requests per second that clients in a closed loop get through. Then an open loop sends `factor`
times as many, however many are refused. Prints JSON lines: capacity, one per 5 s, and the end with goodput against the
peak, percentiles of the refusals' and of the answers' latencies, and memory by process. Exit code 0 says: goodput at
least 90 % of the peak, 99 % of refusals under 50 ms, no process grew by more than 20 MB after the first 10 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mii_zmq.client import AsyncClient
from mii_zmq.errors import MiiError, Overloaded
from mii_zmq.protocol import GenerateBody
from tests.faults.harness.baseline import GREEDY, resident_kb
from tests.faults.harness.expectation import expect
from tests.faults.harness.fleet import Fleet

NUM_TOKENS = 40
MODEL = "fake:step_ms=20,max_sequences=16"
"""16 requests of 40 tokens in 0.8 s: slow enough that ten times as many keep a small machine's doors busy only."""
QUEUE = 64
SETTLE_S = 10.0
REFUSAL_S = 0.05
GOODPUT_SHARE = 0.9
MAX_GROWTH_MB = 20.0


@dataclass(slots=True)
class Tally:
    """What became of the requests."""

    answers: list[tuple[float, float]] = field(default_factory=list)
    """When it ended, and after how many seconds."""
    refusals: list[float] = field(default_factory=list)
    num_without_retry_after: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0


Ask = Callable[[str, str, Tally], Coroutine[Any, Any, None]]


def asker(client: AsyncClient) -> Ask:
    """Through the client library."""

    async def ask(prompt: str, text: str, tally: Tally) -> None:
        started = time.monotonic()
        try:
            body = GenerateBody(prompt=prompt, params={"max_new_tokens": NUM_TOKENS, **GREEDY})
            result = await client.generate("m", body, stream=False).result()
        except Overloaded as error:
            tally.refusals.append(time.monotonic() - started)
            tally.num_without_retry_after += error.retry_after_ms is None
        except MiiError as error:
            tally.errors[error.code] += 1
        else:
            tally.answers.append((time.monotonic(), time.monotonic() - started))
            tally.num_wrong += result.text != text

    return ask


def http_asker(session: aiohttp.ClientSession, url: str) -> Ask:
    """Through the gateway, over connections that are kept."""

    async def ask(prompt: str, text: str, tally: Tally) -> None:
        started = time.monotonic()
        body = {"prompts": prompt, "max_new_tokens": NUM_TOKENS, **GREEDY}
        async with session.post(f"{url}/mii/m", json=body) as response:
            answer = await response.json()
        if response.status in (429, 503):
            tally.refusals.append(time.monotonic() - started)
            tally.num_without_retry_after += "Retry-After" not in response.headers
        elif response.status != 200:
            tally.errors[str(response.status)] += 1
        else:
            tally.answers.append((time.monotonic(), time.monotonic() - started))
            tally.num_wrong += answer[0]["generated_text"] != text

    return ask


async def measure_capacity(ask: Ask, cases: list[tuple[str, str]], seconds: float, num: int) -> float:
    """Answers per second in a closed loop of `num` clients, after a start-up of a quarter of the time."""
    tally, started = Tally(), time.monotonic()

    async def loop(rng: random.Random) -> None:
        while time.monotonic() - started < seconds:
            await ask(*rng.choice(cases), tally)

    await asyncio.gather(*(loop(random.Random(i)) for i in range(num)))
    first, last = started + seconds / 4, started + seconds
    return sum(first <= at < last for at, _ in tally.answers) / (last - first)


async def flood(
    ask: Ask,
    cases: list[tuple[str, str]],
    rate: float,
    seconds: float,
    rng: random.Random,
    pids: dict[str, int],
) -> tuple[Tally, dict[str, list[int]]]:
    """An open loop of `rate` requests per second."""
    tally = Tally()
    memory: dict[str, list[int]] = {role: [] for role in pids}
    tasks: set[asyncio.Task[None]] = set()
    started = next_at = next_look = time.monotonic()
    num_sent = 0
    while (now := time.monotonic()) - started < seconds:
        while next_at <= now:
            task = asyncio.create_task(ask(*rng.choice(cases), tally))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            num_sent += 1
            next_at += rng.expovariate(rate)
        if now >= next_look:
            next_look += 5.0
            for role, pid in pids.items():
                memory[role].append(resident_kb(pid))
            shown = {"seconds": round(now - started, 1), "sent": num_sent, "answered": len(tally.answers)}
            print(json.dumps({**shown, "refused": len(tally.refusals)}), flush=True)
        await asyncio.sleep(min(0.005, max(0.0, next_at - time.monotonic())))
    await asyncio.gather(*tasks)
    return tally, memory


async def experiment(fleet: Fleet, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    prompts = [f"overload {rng.getrandbits(48):x}" for _ in range(500)]
    cases = [(prompt, expect(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True).text) for prompt in prompts]
    async with contextlib.AsyncExitStack() as stack:
        if options.via == "http":
            connector = aiohttp.TCPConnector(limit=0)
            ask = http_asker(await stack.enter_async_context(aiohttp.ClientSession(connector=connector)), fleet.url())
        else:
            client = AsyncClient(fleet.client_endpoints)
            stack.push_async_callback(client.close)
            await client.connect(30)
            ask = asker(client)
        capacity = await measure_capacity(ask, cases, options.capacity_seconds, 16 * options.groups + QUEUE // 2)
        print(json.dumps({"seed": seed, "via": options.via, "capacity_per_s": round(capacity, 1)}), flush=True)
        started = time.monotonic()
        tally, memory = await flood(ask, cases, options.factor * capacity, options.seconds, rng, fleet.pids())
    first, last = started + min(SETTLE_S, options.seconds / 4), started + options.seconds
    goodput = sum(first <= at < last for at, _ in tally.answers) / (last - first)
    num_first = min(2, len(next(iter(memory.values()))) - 1)
    growth = {role: round((max(sizes[num_first:]) - sizes[num_first]) / 1024, 2) for role, sizes in memory.items()}
    return {
        "via": options.via,
        "capacity_per_s": round(capacity, 1),
        "offered_per_s": round(options.factor * capacity, 1),
        "goodput_per_s": round(goodput, 1),
        "goodput_share": round(goodput / capacity, 3),
        "answers": len(tally.answers),
        "wrong": tally.num_wrong,
        "refusals": len(tally.refusals),
        "errors": dict(tally.errors),
        "refusal_ms": percentiles(tally.refusals),
        "answer_ms": percentiles([seconds for _, seconds in tally.answers]),
        "without_retry_after": tally.num_without_retry_after,
        "growth_mb": growth,
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(1000 * ordered[int(share * (len(ordered) - 1))], 1) for name, share in shares.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--capacity-seconds", type=float, default=15.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--via", choices=("zmq", "http"), default="zmq")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    with tempfile.TemporaryDirectory(prefix="mz-", dir="/tmp") as run, tempfile.TemporaryDirectory() as logs:
        os.environ["MII_ZMQ_RUN_DIR"] = run
        fleet = Fleet(Path(logs), broker_options=[f"--max-queued-requests={QUEUE}"])
        try:
            fleet.start(model=MODEL, groups=options.groups, gateways=int(options.via == "http"))
            report = asyncio.run(experiment(fleet, options, seed))
        finally:
            fleet.close()
    report["is_good"] = (
        report["goodput_share"] >= GOODPUT_SHARE
        and report["refusal_ms"].get("p99", 1e9) < 1000 * REFUSAL_S
        and not (report["wrong"] or report["errors"] or report["without_retry_after"])
        and all(growth <= MAX_GROWTH_MB for growth in report["growth_mb"].values())
    )
    print(json.dumps(report), flush=True)
    return 0 if report["is_good"] else 1


if __name__ == "__main__":
    sys.exit(main())
