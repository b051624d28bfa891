#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the engine on a GPU, offline: scheduler, executor and kernels as a worker runs them, without sockets.

    python scripts/bench_engine.py --random-weights 8B decode prefill mix2600 mix1200
    python scripts/bench_engine.py --random-weights 0.6B nano --token-budget 8192

One JSON line per figure. Weights are random (`--random-weights`) and outputs are not cut short, so only shapes and
lengths count. Prefix cache off and 256 sequences; everything else as the worker has it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mii_zmq.config import EngineConfig
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.cuda_executor import CudaExecutor
from mii_zmq.worker.cuda_load import build_cuda_executor
from mii_zmq.worker.models.random_weights import random_weights, shape_config
from mii_zmq.worker.plan import EngineLimits, SequenceRequest, StepPlan

Prompt = tuple[list[int], int]
"""Token ids and how many tokens to produce."""

MEANS = {"mix2600": (2600, 60), "mix1200": (1200, 128)}
DECODE_BATCHES = (1, 8, 32, 64, 128, 256)
PREFILLS = ((2048, 1), (2048, 8), (8192, 1), (8192, 4))
TESTS = ("decode", "prefill", *MEANS, "nano")


def lengths(name: str, num_requests: int = 256, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each request of a workload, all of which arrive at once."""
    draw = random.Random(seed + 1)
    if name == "nano":
        prompts = [draw.randint(100, 1024) for _ in range(num_requests)]
        return list(zip(prompts, [draw.randint(100, 1024) for _ in range(num_requests)], strict=True))

    def clipped(mean: int) -> int:
        return max(1, min(8000, round(draw.gauss(mean, 0.3 * mean))))

    prompts = [clipped(MEANS[name][0]) for _ in range(num_requests)]
    return list(zip(prompts, [clipped(MEANS[name][1]) for _ in range(num_requests)], strict=True))


class TimedExecutor:
    """An executor that adds up the time its caller spends in `submit`."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.limits: EngineLimits = executor.limits
        self.seconds: list[float] = []
        self._executor = executor

    def submit(self, plan: StepPlan) -> Any:
        begin = time.perf_counter()
        pending = self._executor.submit(plan)
        self.seconds.append(time.perf_counter() - begin)
        return pending

    def close(self) -> None:
        self._executor.close()


class Engine:
    """An engine that is measured."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.timed = TimedExecutor(executor)
        self.vocab_size = executor.limits.vocab_size
        self.core = EngineCore(self.timed, model="bench", prefix_cache=False)
        self.plan_seconds: list[float] = []
        self._plan = self.core.scheduler.plan
        self.core.scheduler.plan = self._timed_plan  # type: ignore[method-assign]
        self._ids = iter(range(1 << 60))
        self._random = random.Random(0)

    def _timed_plan(self, now: float) -> StepPlan | None:
        begin = time.perf_counter()
        plan = self._plan(now)
        self.plan_seconds.append(time.perf_counter() - begin)
        return plan

    def prompts(self, sizes: list[tuple[int, int]]) -> list[Prompt]:
        draw = self._random
        return [([draw.randrange(10, self.vocab_size) for _ in range(p)], o) for p, o in sizes]

    def start(self, prompts: list[Prompt]) -> None:
        for token_ids, num_outputs in prompts:
            self.core.add(SequenceRequest(next(self._ids), token_ids, num_outputs))

    def steps(self) -> Iterator[tuple[float, int, int]]:
        """(time, tokens, ends) after each step, until idle."""
        while self.core.has_work:
            outputs = self.core.step()
            tokens = sum(len(output.token_ids) for output in outputs)
            bad = [output.error for output in outputs if output.finish_reason not in (None, "length")]
            if bad:
                raise SystemExit(f"a sequence failed: {bad[0]}")
            yield time.perf_counter(), tokens, sum(output.finish_reason is not None for output in outputs)

    def run(self, prompts: list[Prompt]) -> dict[str, float]:
        """Run to the end; seconds in all, and per step while every sequence decodes."""
        self.plan_seconds.clear()
        self.timed.seconds.clear()
        gc.collect()
        begin = time.perf_counter()
        self.start(prompts)
        stamps = list(self.steps())
        full = [stamp for stamp, tokens, ends in stamps if tokens == len(prompts) and not ends]
        produced = sum(tokens for _, tokens, _ in stamps)
        if produced != sum(outputs for _, outputs in prompts):
            raise SystemExit(f"{produced} tokens came, {sum(outputs for _, outputs in prompts)} were asked for")
        host = [plan + submit for plan, submit in zip(self.plan_seconds, self.timed.seconds, strict=False)]
        return {
            "seconds": stamps[-1][0] - begin,
            "steps": len(self.timed.seconds),
            "full_step_ms": 1e3 * (full[-1] - full[0]) / (len(full) - 1) if len(full) > 2 else 0.0,
            "plan_ms": 1e3 * statistics.median(self.plan_seconds),
            "host_ms": 1e3 * statistics.median(host),
        }


def measure(engine: Engine, sizes: list[tuple[int, int]], repeat: int) -> dict[str, float]:
    """Median of each figure over `repeat` runs with fresh prompts, after the caller warmed up."""
    runs = [engine.run(engine.prompts(sizes)) for _ in range(repeat)]
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def bench_decode(engine: Engine, repeat: int, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        engine.run(engine.prompts([(512, 4)] * batch))
        long = measure(engine, [(512, 128)] * batch, repeat)
        short = measure(engine, [(512, 1)] * batch, repeat)
        step_ms = 1e3 * (long["seconds"] - short["seconds"]) / 127
        yield {
            "test": "decode", "batch": batch, "ms_per_step": round(step_ms, 3),
            "tokens_per_s": round(1e3 * batch / step_ms), "full_step_ms": round(long["full_step_ms"], 3),
            "host_ms": round(long["host_ms"], 3), "plan_ms": round(long["plan_ms"], 3),
        }  # fmt: skip


def bench_prefill(engine: Engine, repeat: int) -> Iterator[dict[str, Any]]:
    for size, count in PREFILLS:
        engine.run(engine.prompts([(size, 1)] * count))
        figures = measure(engine, [(size, 1)] * count, repeat)
        yield {
            "test": f"prefill {size}x{count}", "tokens_per_s": round(size * count / figures["seconds"]),
            "seconds": round(figures["seconds"], 4), "steps": figures["steps"], "host_ms": round(figures["host_ms"], 3),
        }  # fmt: skip


def bench_workload(engine: Engine, repeat: int, name: str) -> Iterator[dict[str, Any]]:
    sizes = lengths(name)
    engine.run(engine.prompts([(prompt, min(output, 8)) for prompt, output in sizes[:64]]))
    figures = measure(engine, sizes, repeat)
    seconds = figures["seconds"]
    yield {
        "test": name, "seconds": round(seconds, 3), "requests_per_s": round(len(sizes) / seconds, 2),
        "output_tokens_per_s": round(sum(output for _, output in sizes) / seconds),
        "total_tokens_per_s": round(sum(prompt + output for prompt, output in sizes) / seconds),
        "steps": figures["steps"], "host_ms": round(figures["host_ms"], 3), "plan_ms": round(figures["plan_ms"], 3),
    }  # fmt: skip


def bench_profile(
    engine: Engine, batches: tuple[int, ...], num_layers: int, num_steps: int = 20
) -> Iterator[dict[str, Any]]:
    """Device time per step by kernel while all sequences decode, and the share of time the device is idle."""
    for batch in batches:
        engine.run(engine.prompts([(512, 4)] * batch))
        engine.start(engine.prompts([(512, 100)] * batch))
        steps = engine.steps()
        while next(steps)[1] < batch:
            pass
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(num_steps):
                next(steps)
            torch.cuda.synchronize()
        events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
        spans = sorted((event.time_range.start, event.time_range.end) for event in events)
        busy, end = 0.0, spans[0][0]
        for begin, stop in spans:
            busy += max(0.0, stop - max(begin, end))
            end = max(end, stop)
        totals: dict[str, list[float]] = {}
        linear = count = 0
        for event in sorted(events, key=lambda event: event.time_range.start):
            name = event.name[:60]
            if name.startswith("batch_inputs"):
                linear, count = 0, count + 1
            if name.startswith(("gemv", "skinny")):
                # The order of every layer's linears; the head is the last.
                name += (" qkv", " out", " up", " down")[linear % 4] if linear < 4 * num_layers else " head"
                linear += 1
            entry = totals.setdefault(name, [0.0, 0])
            entry[0] += event.time_range.end - event.time_range.start
            entry[1] += 1
        top = sorted(totals.items(), key=lambda item: -item[1][0])[:16]
        yield {
            "test": "profile", "batch": batch, "span_ms": round((end - spans[0][0]) / 1e3 / count, 3),
            "busy_share": round(busy / (end - spans[0][0]), 4),
            "kernels_us_per_step": {name: [round(t / count, 1), round(n / count, 1)] for name, (t, n) in top},
        }  # fmt: skip
        for _ in steps:
            pass


def process_age() -> float:
    """Seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def make_executor(args: argparse.Namespace, **fields: Any) -> CudaExecutor:
    config = shape_config(args.random_weights)
    engine_config = EngineConfig(
        model=f"random:{args.random_weights}", token_budget=args.token_budget, max_sequences=256,
        gpu_memory_fraction=args.gpu_memory_fraction, deterministic=args.deterministic, **fields,
    )  # fmt: skip
    weights = random_weights(config, torch.bfloat16, torch.device("cuda"))
    return build_cuda_executor(engine_config, config, weights, args.max_model_len)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", choices=[*TESTS, []], help="what to measure (default: nothing)")
    parser.add_argument("--random-weights", default="8B", help="shape: 8B, 0.6B or tiny")
    parser.add_argument("--token-budget", type=int, help="tokens per step (default: the engine's)")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--gpu-memory-fraction", type=float, default=0.9)
    parser.add_argument("--deterministic", action="store_true", help="the mode whose results the batch cannot change")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=DECODE_BATCHES)
    parser.add_argument("--profile", type=lambda text: tuple(map(int, text.split(","))), default=(), metavar="BATCHES")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file as well")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    executor = make_executor(args)
    engine = Engine(executor)
    show: Callable[[dict[str, Any]], None] = Printer(args)
    show({"test": "start", "seconds": round(process_age(), 2), "num_blocks": executor.limits.num_blocks})
    for name in args.tests:
        if name == "decode":
            results = bench_decode(engine, args.repeat, args.batches)
        elif name == "prefill":
            results = bench_prefill(engine, args.repeat)
        else:
            results = bench_workload(engine, args.repeat, name)
        for result in results:
            show(result)
    for result in bench_profile(engine, args.profile, shape_config(args.random_weights).num_layers):
        show(result)
    engine.core.close()


class Printer:
    """Prints figures with what they were measured on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._common = {
            "shape": args.random_weights, "budget": args.token_budget, "deterministic": args.deterministic,
            "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        }  # fmt: skip

    def __call__(self, result: dict[str, Any]) -> None:
        line = json.dumps({**result, **self._common})
        print(line, flush=True)
        if self._args.out:
            with self._args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
