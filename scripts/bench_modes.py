# SPDX-License-Identifier: Apache-2.0
"""Tests of `bench_engine` that need the card for themselves: what the deterministic mode costs, and the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench_setup import Bench
from measured_engine import MeasuredEngine, Sizes, medians, ratio, rounded

BATCHES = (1, 64, 256)
POOL_GB = 28.0
"""Room for 256 sequences of 640 tokens of the 8B shape, twice on one card beside the weights."""
Runs = dict[str, list[dict[str, float]]]


def bench_deterministic(bench: Bench) -> Iterator[dict[str, Any]]:
    """Both modes over the same weights and pools of the same size, in turns."""
    engines = {
        name: bench.engine(deterministic=name == "deterministic", kv_cache_gb=POOL_GB)
        for name in ("ordinary", "deterministic")
    }
    for batch in BATCHES:
        work = partial(MeasuredEngine.run_decode, batch=batch, num_outputs=128)
        runs = in_turns(engines, bench.args.repeat, [(512, 4)] * batch, work)
        yield compared(f"deterministic decode {batch}", runs, "ms_per_step", "full_step_ms")
    sizes = [(2048, 1)] * 8
    runs = in_turns(engines, bench.args.repeat, sizes, partial(MeasuredEngine.run, sizes=sizes))
    yield compared("deterministic prefill 2048x8", runs, "seconds")
    for engine in engines.values():
        engine.core.close()


def in_turns(
    engines: dict[str, MeasuredEngine],
    repeat: int,
    warm_up: Sizes,
    work: Callable[[MeasuredEngine], dict[str, float]],
) -> Runs:
    for engine in engines.values():
        engine.run(warm_up)
    runs: Runs = {name: [] for name in engines}
    for _ in range(repeat):
        for name, engine in engines.items():
            runs[name].append(work(engine))
    return runs


def compared(test: str, runs: Runs, *keys: str) -> dict[str, Any]:
    figures = {name: rounded(medians(found), *keys, digits=4) for name, found in runs.items()}
    return {"test": test, "ratio": ratio(runs["deterministic"], runs["ordinary"], keys[0]), **figures}


def bench_start(bench: Bench) -> Iterator[dict[str, Any]]:
    """Process start to ready in processes of their own: with no compiled kernels on disk, then with them."""
    args = bench.args
    command = [
        sys.executable,
        str(Path(__file__).with_name("bench_engine.py")),
        "--random-weights",
        args.random_weights,
    ]
    command += ["--dry-run"] if args.dry_run else []
    with tempfile.TemporaryDirectory() as cache:
        # CuPy compiles too; nobody else's cache may help, nor be changed.
        environment = {**os.environ, "TRITON_CACHE_DIR": f"{cache}/triton", "CUPY_CACHE_DIR": f"{cache}/cupy"}
        for kernels in ("compiled anew", *["cached"] * args.repeat):
            begin = time.perf_counter()
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[0])
            whole = time.perf_counter() - begin
            yield {"test": "start", "kernels": kernels, "seconds": found["seconds"], "until_exit": round(whole, 2)}


def process_age() -> float:
    """Seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")
