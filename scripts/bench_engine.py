#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the engine on a GPU, offline: scheduler, executor and kernels as a worker runs them, without sockets.

    python scripts/bench_engine.py decode prefill mix2600 mix1200 sampling timeline
    python scripts/bench_engine.py --random-weights 0.6B nano
    python scripts/bench_engine.py start            # process start to ready, kernels compiled anew and cached
    python scripts/bench_engine.py deterministic    # what the deterministic mode costs, in turns with the ordinary one

One JSON line per figure, medians of `--repeat` runs. Weights are random and outputs are not cut short, so only shapes
and lengths count. Prefix cache off and 256 sequences; everything else as the worker has it. `--dry-run` runs the same
requests through the fake executor, on any machine: its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_modes import bench_deterministic, bench_start, process_age
from bench_setup import Bench, decode_floor_ms
from kernel_timeline import Record, kernel_times, timeline
from measured_engine import GREEDY, MEANS, MeasuredEngine, Sizes, lengths, medians, ratio, rounded
from sampling_mixes import MIXED

from mii_zmq.worker.cuda_load import TOKEN_BUDGET
from mii_zmq.worker.models.random_weights import SHAPES
from mii_zmq.worker.plan import SamplingSpec, SequenceRequest

DECODE_BATCHES = (1, 8, 32, 64, 128, 256)
PREFILLS = ((2048, 1), (2048, 8), (8192, 1), (8192, 4))
TIMELINE_BATCH, TIMELINE_STEPS = 64, 50
MIX_STEP = 80
"""Of mix2600: prompts still come, and many sequences decode."""
Result = dict[str, Any]
Results = Iterator[Result]


def measure(engine: MeasuredEngine, sizes: Sizes, repeat: int) -> dict[str, float]:
    return medians([engine.run(sizes) for _ in range(repeat)])


def bench_decode(engine: MeasuredEngine, bench: Bench) -> Results:
    for batch in bench.args.batches:
        engine.run([(512, 4)] * batch)
        figures = medians([engine.run_decode(batch, 128) for _ in range(bench.args.repeat)])
        floor_ms = decode_floor_ms(bench.config, batch, 512 + 64)
        yield {
            "test": "decode", "batch": batch, "tokens_per_s": round(1e3 * batch / figures["ms_per_step"]),
            "floor_ms": round(floor_ms, 3), "times_floor": round(figures["ms_per_step"] / floor_ms, 3),
            **rounded(figures, "ms_per_step", "full_step_ms", "host_ms", "plan_ms"),
        }  # fmt: skip


def bench_prefill(engine: MeasuredEngine, bench: Bench) -> Results:
    for size, count in PREFILLS:
        engine.run([(size, 1)] * count)
        figures = measure(engine, [(size, 1)] * count, bench.args.repeat)
        yield {
            "test": f"prefill {size}x{count}", "tokens_per_s": round(size * count / figures["seconds"]),
            "steps": figures["steps"], **rounded(figures, "seconds", "host_ms", digits=4),
        }  # fmt: skip


def bench_workload(name: str, engine: MeasuredEngine, bench: Bench) -> Results:
    sizes = lengths(name)
    engine.run([(prompt, min(output, 8)) for prompt, output in sizes[:64]])
    figures = measure(engine, sizes, bench.args.repeat)
    seconds = figures["seconds"]
    yield {
        "test": name, "requests_per_s": round(len(sizes) / seconds, 2),
        "output_tokens_per_s": round(sum(output for _, output in sizes) / seconds),
        "total_tokens_per_s": round(sum(prompt + output for prompt, output in sizes) / seconds),
        "steps": figures["steps"], **rounded(figures, "seconds", "host_ms", "plan_ms"),
    }  # fmt: skip


def bench_sampling(engine: MeasuredEngine, bench: Bench, batch: int = 64) -> Results:
    """Mixed sampling settings against all greedy, in turns."""
    mixes = {"greedy": MIXED[:1], "mixed": MIXED}
    for specs in mixes.values():
        engine.run([(512, 4)] * batch, specs)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in mixes}
    for _ in range(bench.args.repeat):
        for name, specs in mixes.items():
            runs[name].append(engine.run_decode(batch, 128, specs))
    figures = {name: medians(found) for name, found in runs.items()}
    yield {
        "test": "sampling", "batch": batch, "ratio": ratio(runs["mixed"], runs["greedy"], "full_step_ms"),
        "ratio_of_runs": ratio(runs["mixed"], runs["greedy"], "ms_per_step"),
        **{name: rounded(found, "full_step_ms", "ms_per_step", "host_ms") for name, found in figures.items()},
    }  # fmt: skip


def bench_timeline(engine: MeasuredEngine, bench: Bench) -> Results:
    """Idle shares over 50 steps at batch 64; what the kernels of a mixed batch and of a workload's steps take."""
    records = decode_records(engine, bench, TIMELINE_BATCH, TIMELINE_STEPS)
    yield {"test": "timeline", "batch": TIMELINE_BATCH, **timeline(records)}
    records = decode_records(engine, bench, TIMELINE_BATCH, 10, MIXED)
    yield {"test": "profile mixed sampling", "batch": TIMELINE_BATCH, **profile(records)}
    requests = engine.requests(lengths("mix2600"))
    records = step_records(engine, bench, requests, 8, lambda index, tokens: index == MIX_STEP)
    yield {"test": "profile mix2600", **profile(records)}


def bench_profile(engine: MeasuredEngine, bench: Bench) -> Results:
    """Device time per step by kernel while all sequences decode."""
    for batch in bench.args.profile:
        yield {"test": "profile", "batch": batch, **profile(decode_records(engine, bench, batch, 20))}


def profile(records: list[Record]) -> Result:
    return {**timeline(records), "kernels_us_per_step": kernel_times(records)}


def decode_records(
    engine: MeasuredEngine, bench: Bench, batch: int, num_steps: int, specs: tuple[SamplingSpec, ...] = GREEDY
) -> list[Record]:
    """Of steps in which all sequences decode."""
    engine.run([(512, 4)] * batch, specs)
    requests = engine.requests([(512, num_steps + 60)] * batch, specs)
    return step_records(engine, bench, requests, num_steps, lambda index, tokens: tokens == batch)


def step_records(
    engine: MeasuredEngine,
    bench: Bench,
    requests: list[SequenceRequest],
    num_steps: int,
    is_begun: Callable[[int, int], bool],
) -> list[Record]:
    """Of some steps of a run, behind the first for which `is_begun` (its index, its tokens) holds."""
    engine.start(requests)
    steps = engine.steps()
    for index, (_, tokens, _) in enumerate(steps):
        if is_begun(index, tokens):
            break

    def work() -> None:
        for _ in range(num_steps):
            next(steps)

    records = bench.records(work)
    for _ in steps:
        pass
    return records


TESTS: dict[str, Callable[[MeasuredEngine, Bench], Results]] = {
    "decode": bench_decode,
    "prefill": bench_prefill,
    **{name: partial(bench_workload, name) for name in (*MEANS, "nano")},
    "sampling": bench_sampling,
    "timeline": bench_timeline,
}
ALONE: dict[str, Callable[[Bench], Results]] = {"start": bench_start, "deterministic": bench_deterministic}
"""Tests that need the card for themselves, each in a process of its own."""


def integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", choices=[*ALONE, *TESTS, []], help="what to measure (default: nothing)")
    parser.add_argument("--random-weights", default="8B", choices=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--token-budget", type=int, help="tokens per step (default: the engine's)")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--gpu-memory-fraction", type=float, default=0.9)
    parser.add_argument("--deterministic", action="store_true", help="the mode whose results the batch cannot change")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--batches", type=integers, default=DECODE_BATCHES)
    parser.add_argument("--profile", type=integers, default=(), metavar="BATCHES")
    parser.add_argument("--dry-run", action="store_true", help="no GPU and no model; only the script is tried")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file as well")
    args = parser.parse_args()
    if len(args.tests) > 1 and not ALONE.keys().isdisjoint(args.tests):
        parser.error(f"{' and '.join(ALONE)} need the card for themselves: one of them a call, and nothing with it")
    return args


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("bench_engine needs an NVIDIA GPU, and torch finds none here (--dry-run tries the script without)")
    bench, show = Bench(args), Printer(args)
    for name in ALONE.keys() & args.tests:
        for result in ALONE[name](bench):
            show(result)
        return
    engine = bench.engine(deterministic=args.deterministic)
    show({"test": "ready", "seconds": round(process_age(), 2), "num_blocks": engine.core.limits.num_blocks})
    for name in args.tests:
        for result in TESTS[name](engine, bench):
            show(result)
    for result in bench_profile(engine, bench):
        show(result)
    engine.core.close()


class Printer:
    """Prints figures with what they were measured on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def __call__(self, result: Result) -> None:
        args = self._args
        line = json.dumps(
            {
                **result, "shape": args.random_weights, "budget": args.token_budget or TOKEN_BUDGET,
                "mode": "deterministic" if args.deterministic else "ordinary", "torch": torch.__version__,
                "card": "none, a dry run" if args.dry_run else torch.cuda.get_device_name(),
            }
        )  # fmt: skip
        print(line, flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
