#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""All-reduce between the GPUs of a group: right for every size, and which of its three ways is the fastest.

    python scripts/ranks_collectives.py [--world-size 2]

First the cases of `tests/worker/collectives_cases.py`. Then, for 1 to 8,192 rows of 4,096 and 8,192 bfloat16 values,
the error against float64 and the microseconds of a call inside a CUDA graph, median of `--rounds` replays: one-shot
(also fused with residual and norm) and two-shot over peer memory, and NCCL. One JSON line per size; the last line holds
the thresholds that belong into `cuda_collectives`. `--dry-run` tries it between two processes on a CPU, over gloo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from mii_zmq.worker import collectives as group_collectives
from tests.worker.collectives_cases import BF16, CASES, check_reduce, part_of, replay
from tests.worker.rank_processes import Place, run_on_ranks

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
WIDTHS = (4096, 8192)
KERNEL_BYTES = 64 * 2**20
"""The largest tensor with which the kernels are tried here; more than `HALF_BYTES`, to see where that should be."""
ONE_SHOT_BYTES = 8 * 2**20
CALL_BYTES = 2**28
"""Of all buffers of one graph."""
MAX_CALLS = 24
SLEEP_CYCLES = 2_000_000
"""About a millisecond, in which the host queues the rest."""
Reduce = Callable[[Tensor], None]
Result = dict[str, Any]


@dataclass(frozen=True)
class Ways:
    """What can reduce a tensor, by name; `norm` is the fused form, which leaves its input undefined."""

    by_name: dict[str, Reduce]
    meet: Reduce
    """A small exchange, behind which the ranks' devices go on at the same time."""
    norm: Callable[[Tensor], None] | None = None

    def for_size(self, num_bytes: int) -> dict[str, Reduce]:
        limits = {"one_shot": ONE_SHOT_BYTES, "two_shot": KERNEL_BYTES}
        return {name: way for name, way in self.by_name.items() if num_bytes <= limits.get(name, num_bytes)}


def make_ways(place: Place) -> Ways:
    collectives: Any = place.collectives
    if isinstance(collectives, group_collectives.TorchCollectives):
        return Ways({"gloo" if place.device.type == "cpu" else "nccl": collectives.reduce}, collectives.reduce)
    from mii_zmq.worker import cuda_collectives

    fallback = collectives._fallback
    # From here on `place.collectives` must not reduce anything: its buffer has the size of before.
    cuda_collectives.HALF_BYTES = KERNEL_BYTES
    # As when the group opened them: without multicast above all.
    with group_collectives._environment(group_collectives._NCCL_ENVIRONMENT):
        over_peers = cuda_collectives.SymmetricCollectives(fallback, place.rank, place.device)

    def limited(one_shot_bytes: int) -> Reduce:
        def reduce(x: Tensor) -> None:
            over_peers._one_shot_bytes = one_shot_bytes
            over_peers.reduce(x)

        return reduce

    def norm(x: Tensor) -> None:
        over_peers._one_shot_bytes = ONE_SHOT_BYTES
        assert over_peers.reduce_add_norm(x, residuals[x.shape], weights[x.shape[1]], x, 1e-5)

    residuals = Cached(lambda shape: part_of(place, 9, *shape))
    weights = Cached(lambda width: part_of(place, 10, 1, width)[0])
    one_shot = limited(ONE_SHOT_BYTES)
    return Ways({"one_shot": one_shot, "two_shot": limited(0), "nccl": fallback.reduce}, one_shot, norm)


class Cached(dict[Any, Tensor]):
    """Tensors made when they are first asked for: while a graph is captured they are there."""

    def __init__(self, make: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Tensor:
        return self.setdefault(key, self._make(key))


def time_us(place: Place, meet: Reduce, way: Reduce, rows: int, width: int, rounds: int) -> float:
    """Microseconds of a call, each on a buffer of its own, all calls in one graph."""
    source = part_of(place, place.rank.rank, rows, width)
    num_calls = max(2, min(MAX_CALLS, CALL_BYTES // (2 * source.numel())))
    held = [source.clone() for _ in range(num_calls)]
    meeting = torch.ones(1, 64, dtype=BF16, device=place.device)

    def reduce_all() -> None:
        for x in held:
            way(x)

    run = replay(place, reduce_all)
    found = []
    for _ in range(rounds):
        for x in held:
            x.copy_(source)
        meeting.fill_(1.0)
        found.append(measured_us(place, lambda: meet(meeting), run) / num_calls)
    return statistics.median(found)


def measured_us(place: Place, meet: Callable[[], None], run: Callable[[], object]) -> float:
    """From the ranks' meeting on their devices, so that what the hosts do apart does not count."""
    if place.device.type == "cpu":
        meet()
        begin = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - begin)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    meet()
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def measure(place: Place, ways: Ways, rows: int, width: int, rounds: int) -> Result:
    num_bytes = 2 * rows * width
    result: Result = {"test": "all_reduce", "rows": rows, "width": width, "bytes": num_bytes}
    for name, way in ways.for_size(num_bytes).items():
        found = check_reduce(place, way, rows, width)
        result[f"{name}_error"] = float(f"{found.error:.2e}")
        result["is_right"] = result.get("is_right", True) and found.is_right
        result[f"{name}_us"] = round(time_us(place, ways.meet, way, rows, width, rounds), 2)
    if ways.norm is not None and num_bytes <= ONE_SHOT_BYTES:
        result["one_shot_norm_us"] = round(time_us(place, ways.meet, ways.norm, rows, width, rounds), 2)
    return result


def thresholds(results: list[Result]) -> dict[str, int]:
    """Sizes in bytes up to which, from the smallest on, one-shot is the fastest way, and either kernel beats NCCL.

    A lead of less than 2 percent is none.
    """
    one_shot = half = 0
    ordered = sorted(results, key=lambda result: result["bytes"])
    is_one_shot = is_kernel = True
    for result in ordered:
        times = {name: result[f"{name}_us"] for name in ("one_shot", "two_shot", "nccl") if f"{name}_us" in result}
        is_one_shot = is_one_shot and times.get("one_shot", float("inf")) <= 1.02 * min(times.values())
        kernels = [value for name, value in times.items() if name != "nccl"]
        is_kernel = is_kernel and bool(kernels) and min(kernels) <= 1.02 * times["nccl"]
        one_shot = result["bytes"] if is_one_shot else one_shot
        half = result["bytes"] if is_kernel else half
    return {"ONE_SHOT_BYTES": one_shot, "HALF_BYTES": half}


def table(results: list[Result]) -> str:
    columns = ("rows", "width", "one_shot_us", "one_shot_norm_us", "two_shot_us", "nccl_us")
    lines = ["".join(f"{name:>18}" for name in columns)]
    lines += ["".join(f"{result.get(name, '-'):>18}" for name in columns) for result in results]
    return "\n".join(lines)


def work(place: Place, args: argparse.Namespace) -> bool:
    """What each rank does; rank 0 tells."""
    show = print if place.is_first else lambda *words, **options: None
    for name in [] if args.dry_run else CASES:
        CASES[name](place)
        show(json.dumps({"test": f"case {name}", "is_right": True}), flush=True)
    ways, results = make_ways(place), []
    for rows in ROWS[:3] if args.dry_run else ROWS:
        for width in (64,) if args.dry_run else WIDTHS:
            results.append(measure(place, ways, rows, width, args.rounds))
            show(json.dumps(results[-1]), flush=True)
    is_right = all(result["is_right"] for result in results)
    facts: Result = {"test": "thresholds", "world_size": place.rank.world_size, "ways": list(ways.by_name)}
    if len(ways.by_name) > 1:
        facts |= thresholds(results)
    show(table(results))
    show(json.dumps({**facts, "is_right": is_right}), flush=True)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry-run", action="store_true", help="without GPUs")
    args = parser.parse_args()
    if not args.dry_run and torch.cuda.device_count() < args.world_size:
        sys.exit(
            f"{args.world_size} GPUs are needed, and torch finds {torch.cuda.device_count()} (--dry-run does without)"
        )
    is_right = run_on_ranks(work, args, world_size=args.world_size, on_gpu=not args.dry_run)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
