#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures an engine of several ranks, and one-rank engines side by side, offline: as a worker runs them, no doors.

    python scripts/ranks_engine.py --random-weights 8B decode --batches 1,64
    python scripts/ranks_engine.py --random-weights 8B decode --batches 1,64 --no-peer-memory
    python scripts/ranks_engine.py --random-weights 70B decode prefill --batches 1,64,128
    python scripts/ranks_engine.py --random-weights 8B replicas

`decode` gives milliseconds per step behind prompts of 512 tokens, `prefill` tokens per second of prompts of 8,192,
`replicas` the throughput of one-rank engines on as many GPUs, all at once, against one of them alone, in turns. Medians
of `--repeat` runs, one JSON line per figure. `--dry-run` runs a tiny shape on a CPU: its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_setup import decode_floor_ms
from measured_engine import MeasuredEngine, Sizes, lengths, medians, rounded

from mii_zmq.config import EngineConfig
from mii_zmq.errors import MiiError
from mii_zmq.worker.loading import load_executor
from mii_zmq.worker.models.random_weights import SHAPES, shape_config
from mii_zmq.worker.ranked_executor import load_ranked_executor

Result = dict[str, Any]
GOALS_MS = {("8B", 1): 3.2, ("8B", 64): 4.2, ("70B", 1): 18.8, ("70B", 64): 21.5, ("70B", 128): 25.0}
VLLM_MS = {("8B", 1): 3.49, ("8B", 64): 4.51, ("70B", 1): 21.1, ("70B", 64): 24.2, ("70B", 128): 28.7}
"""vLLM 0.26.0 on two H200s."""
PREFILL_GOAL, VLLM_PREFILL = 7600, 7875
"""Tokens per second of the 70B shape."""
REPLICAS_GOAL = 1.9
GO = "go"


class Sizing:
    """How large everything is; in a dry run small enough for a CPU."""

    def __init__(self, args: argparse.Namespace) -> None:
        dry = args.dry_run
        self.shape = "tiny" if dry else args.random_weights
        self.prompt, self.outputs = (12, 6) if dry else (512, 128)
        self.batches = (1, 2) if dry else args.batches
        self.prefills = ((48, 1),) if dry else ((8192, 1), (8192, 4))
        self.limits: Result = {"max_sequences": max(128, *self.batches)}
        if dry:
            self.limits = {
                "max_sequences": 4, "max_model_len": 128, "kv_cache_gb": 0.01, "num_threads": 1, "device": "cpu",
                "token_budget": 64,
            }  # fmt: skip

    def workload(self) -> Sizes:
        """Of one round of `replicas`."""
        return [(12, 6)] * 6 if self.shape == "tiny" else lengths("mix1200", 128)

    def config(self, args: argparse.Namespace, **fields: Any) -> EngineConfig:
        return EngineConfig(
            model=f"random:{self.shape}", dtype="auto", gpu_memory_fraction=args.gpu_memory_fraction,
            peer_memory=args.peer_memory, **self.limits, **fields,
        )  # fmt: skip


def load(args: argparse.Namespace, sizing: Sizing) -> tuple[MeasuredEngine, Result]:
    """The engine of all ranks, and what it took."""
    begin = time.perf_counter()
    config = sizing.config(args, tensor_parallel=args.tensor_parallel)
    if args.tensor_parallel == 1:
        executor: Any = load_executor(config)
        memory = str(executor.bill)
    else:
        executor, memory = load_ranked_executor(config, lambda text, share: None, end_with)
    return MeasuredEngine(executor), {"seconds": round(time.perf_counter() - begin, 1), "memory": memory}


def end_with(error: MiiError) -> None:
    """The group is lost: rank 0 may be waiting for it on its device."""
    print(json.dumps({"test": "lost", "error": error.message}), flush=True)
    os._exit(3)


def bench_decode(engine: MeasuredEngine, args: argparse.Namespace, sizing: Sizing) -> Iterator[Result]:
    for batch in sizing.batches:
        engine.run([(sizing.prompt, 4)] * batch)
        runs = [engine.run_decode(batch, sizing.outputs, num_prompt_tokens=sizing.prompt) for _ in range(args.repeat)]
        figures, key = medians(runs), (sizing.shape, batch)
        context = sizing.prompt + sizing.outputs // 2
        floor_ms = decode_floor_ms(shape_config(sizing.shape), batch, context) / args.tensor_parallel
        result: Result = {
            "test": "decode", "batch": batch, "tokens_per_s": round(1e3 * batch / max(figures["ms_per_step"], 1e-6)),
            "floor_ms": round(floor_ms, 3), **rounded(figures, "ms_per_step", "full_step_ms", "host_ms", "plan_ms"),
        }  # fmt: skip
        if key in GOALS_MS:
            is_reached = figures["ms_per_step"] <= GOALS_MS[key]
            result |= {"goal_ms": GOALS_MS[key], "vllm_ms": VLLM_MS[key], "is_reached": is_reached}
        yield result


def bench_prefill(engine: MeasuredEngine, args: argparse.Namespace, sizing: Sizing) -> Iterator[Result]:
    for size, count in sizing.prefills:
        engine.run([(size, 1)] * count)
        figures = medians([engine.run([(size, 1)] * count) for _ in range(args.repeat)])
        rate = round(size * count / figures["seconds"])
        result: Result = {"test": f"prefill {size}x{count}", "tokens_per_s": rate, "steps": figures["steps"]}
        if sizing.shape == "70B":
            result |= {"goal": PREFILL_GOAL, "vllm": VLLM_PREFILL, "is_reached": rate >= PREFILL_GOAL}
        yield {**result, **rounded(figures, "seconds", "host_ms", digits=4)}


def bench_replicas(args: argparse.Namespace, sizing: Sizing) -> Iterator[Result]:
    """Each replica alone, then all at once, in turns."""
    replicas = [Replica(args, index) for index in range(args.tensor_parallel)]
    try:
        yield {"test": "replicas ready", "seconds": [replica.read()["ready"] for replica in replicas]}
        work = sizing.workload()
        alone: list[float] = []
        together: list[float] = []
        # The first time compiles.
        run_together(replicas)
        for _ in range(args.repeat):
            alone.append(statistics.mean(replica.run() for replica in replicas))
            together.append(run_together(replicas))
        ratios = [len(replicas) * one / all_ for one, all_ in zip(alone, together, strict=True)]
        ratio = statistics.median(ratios)
        yield {
            "test": "replicas", "replicas": len(replicas), "requests_each": len(work), "ratio": round(ratio, 3),
            "goal": REPLICAS_GOAL, "is_reached": ratio >= REPLICAS_GOAL,
            "alone_s": [round(value, 3) for value in alone], "together_s": [round(value, 3) for value in together],
        }  # fmt: skip
    finally:
        for replica in replicas:
            replica.close()


def run_together(replicas: list[Replica]) -> float:
    """Seconds until the last one is done."""
    for replica in replicas:
        replica.start()
    return max(float(replica.read()["seconds"]) for replica in replicas)


class Replica:
    """An engine in a process of its own, which runs the workload on each line that it reads."""

    def __init__(self, args: argparse.Namespace, index: int) -> None:
        command = [sys.executable, __file__, "--random-weights", args.random_weights, "--replica", str(index)]
        command += [f"--gpu-memory-fraction={args.gpu_memory_fraction}", *(["--dry-run"] if args.dry_run else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{GO}\n")
        self._process.stdin.flush()

    def read(self) -> Result:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: Result = json.loads(line)
                return found
        raise SystemExit(f"a replica ended with exit code {self._process.wait()}")

    def run(self) -> float:
        self.start()
        return float(self.read()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve_replica(args: argparse.Namespace, sizing: Sizing) -> None:
    begin = time.perf_counter()
    engine = MeasuredEngine(load_executor(sizing.config(args, device_index=args.replica)))
    print(json.dumps({"ready": round(time.perf_counter() - begin, 1)}), flush=True)
    for line in sys.stdin:
        if line.strip() == GO:
            print(json.dumps(rounded(engine.run(sizing.workload()), "seconds", digits=4)), flush=True)
    engine.core.close()


TESTS = {"decode": bench_decode, "prefill": bench_prefill}


def integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", choices=[*TESTS, "replicas", []], help="what to measure")
    parser.add_argument("--random-weights", default="8B", choices=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--tensor-parallel", type=int, default=2, metavar="N", help="ranks, or replicas")
    parser.add_argument("--peer-memory", action=argparse.BooleanOptionalAction, default=True, help="no: NCCL only")
    parser.add_argument("--batches", type=integers, default=(1, 64))
    parser.add_argument("--gpu-memory-fraction", type=float, default=0.9)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--replica", type=int, metavar="GPU", help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape, on a CPU")
    args = parser.parse_args()
    if not args.dry_run and torch.cuda.device_count() < args.tensor_parallel:
        parser.error(f"{args.tensor_parallel} GPUs are needed, torch finds {torch.cuda.device_count()} (try --dry-run)")
    return args


def main() -> None:
    args = parse_arguments()
    sizing = Sizing(args)
    if args.replica is not None:
        serve_replica(args, sizing)
        return

    def show(result: Result) -> None:
        facts = {"shape": sizing.shape, "ranks": args.tensor_parallel, "peer_memory": args.peer_memory}
        card = "none, a dry run" if args.dry_run else torch.cuda.get_device_name()
        print(json.dumps({**result, **facts, "torch": torch.__version__, "card": card}), flush=True)

    if "replicas" in args.tests:
        for result in bench_replicas(args, sizing):
            show(result)
    names = [name for name in args.tests if name in TESTS]
    if names:
        engine, facts = load(args, sizing)
        show({"test": "ready", **facts})
        for name in names:
            for result in TESTS[name](engine, args, sizing):
                show(result)
        engine.core.close()


if __name__ == "__main__":
    main()
