#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Many mixed requests with cancels against the fake engine, and the memory of every process meanwhile.

    scripts/soak.py --requests 20000 --seed 1

Prints one JSON line per 1,000 requests (resident memory and descriptors by process) and one at the end: growth in MB
per 1,000 requests after the first 2,000, by a straight line through the samples. Exit code 0 says: every request ended
once and as expected, and no process grew by 0.1 MB per 1,000 requests or more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mii_zmq.client import BackgroundLoop
from tests.faults.harness.baseline import Baseline, resident_kb, usage_of
from tests.faults.harness.fleet import Fleet
from tests.faults.harness.history import History
from tests.faults.harness.load import Load

CLIENTS = {"http_stream": 6, "http_whole": 6, "zmq_stream": 14, "zmq_whole": 6}
WARM_UP = 2000
SAMPLE_EVERY = 250
MAX_GROWTH_MB = 0.1
NUM_BLOCKS = 512
"""A small pool, so that its cache is full, and its books do not grow any more, within the warm-up."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    with tempfile.TemporaryDirectory(prefix="mz-", dir="/tmp") as run, tempfile.TemporaryDirectory() as logs:
        os.environ["MII_ZMQ_RUN_DIR"] = run
        fleet = Fleet(Path(logs))
        try:
            fleet.start(model=f"fake:num_blocks={NUM_BLOCKS}", groups=options.groups)
            baseline = Baseline.take(fleet)
            report = soak(fleet, options.requests, seed)
            report["baseline"] = _check(baseline, fleet)
        finally:
            fleet.close()
    report["is_good"] = (
        not report["violations"]
        and set(report["errors"]) <= {"error: cancelled by the client"}
        and all(growth < MAX_GROWTH_MB for growth in report["growth_mb_per_1000"].values())
        and report["baseline"] == "ok"
    )
    print(json.dumps(report), flush=True)
    return 0 if report["is_good"] else 1


def soak(fleet: Fleet, num_requests: int, seed: int) -> dict[str, Any]:
    history = History(keeps_ended=False)
    urls = [fleet.url(name) for name in fleet.gateways]
    load = Load(history, fleet.deployment, urls, fleet.client_endpoints, seed, max_tokens=60, cancel_share=0.25)
    loop, threads = BackgroundLoop("load"), ThreadPoolExecutor(1)
    pids = fleet.pids()
    samples: list[tuple[int, dict[str, int]]] = []
    started = time.monotonic()
    driving = threads.submit(loop.run, load.run(CLIENTS))
    try:
        while len(history) < num_requests and not driving.done():
            if len(history) >= SAMPLE_EVERY * (len(samples) + 1):
                samples.append((len(history), {role: resident_kb(pid) for role, pid in pids.items()}))
                if len(samples) % (1000 // SAMPLE_EVERY) == 0:
                    _print_sample(samples[-1], pids, started)
            time.sleep(0.005)
    finally:
        load.is_stopping = True
        driving.result(120)
        loop.close()
        threads.shutdown()
    verdict = history.check()
    late = [sample for sample in samples if sample[0] > min(WARM_UP, num_requests // 2)]
    seconds = time.monotonic() - started
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "requests_per_s": round(len(history) / seconds, 1),
        "growth_mb_per_1000": {role: round(slope(late, role), 4) for role in pids},
        "cancelled": load.num_cancelled,
        **verdict.as_dict(),
        "examples": verdict.violations[:5],
    }


def slope(samples: list[tuple[int, dict[str, int]]], role: str) -> float:
    """MB per 1,000 requests, by least squares."""
    if len(samples) < 2:
        return 0.0
    counts = [count / 1000 for count, _ in samples]
    sizes = [by_role[role] / 1024 for _, by_role in samples]
    mean_count, mean_size = sum(counts) / len(counts), sum(sizes) / len(sizes)
    spread = sum((count - mean_count) ** 2 for count in counts)
    return sum((c - mean_count) * (s - mean_size) for c, s in zip(counts, sizes, strict=True)) / spread


def _print_sample(sample: tuple[int, dict[str, int]], pids: dict[str, int], started: float) -> None:
    count, by_role = sample
    print(
        json.dumps(
            {
                "requests": count,
                "seconds": round(time.monotonic() - started, 1),
                "rss_mb": {role: round(size / 1024, 2) for role, size in by_role.items()},
                "descriptors": {role: usage_of(pid).fds for role, pid in pids.items()},
            }
        ),
        flush=True,
    )


def _check(baseline: Baseline, fleet: Fleet) -> str:
    try:
        baseline.check(fleet)
    except AssertionError as error:
        return str(error)[:3000]
    return "ok"


if __name__ == "__main__":
    sys.exit(main())
