#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks and times every Triton kernel on one NVIDIA GPU, against an oracle and against what the card can give.

    python scripts/bench_kernels.py [--only GROUP ...] [--replays N]

Kernels are launched by the engine's own classes, so with the tile sizes and the memory layout that it uses. Each case
draws fresh random inputs, poisons its outputs, compares with a float64 oracle (beside the error of torch's own bfloat16
computation), then times launches inside a CUDA graph that rotates over input sets larger than the L2 cache. One JSON
line per case: microseconds per launch, TB/s or TFLOP/s of the work that has to be done, and its share of the limit;
`rival_us` is another way to do the same, for small-batch linears cuBLAS with separate kernels around it. A table with
the rules that were broken comes last; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from kernel_case import DEVICE, IS_INTERPRETED, Build, Builds, Outcome, run_case
from kernel_cases_attention import attention_cases
from kernel_cases_linear import linear_cases
from kernel_cases_sampling import sampling_cases
from kernel_cases_small import small_cases

GROUPS = {
    "attention": attention_cases,
    "linear": linear_cases,
    "small": small_cases,
    "sampling": sampling_cases,
}
COLUMNS = ("kernel", "shape", "us", "share_of_limit", "rival_us", "error", "torch_error")
logger = logging.getLogger(__name__)


class DeviceLost(Exception):
    """The card answers no more; after an illegal access nothing else runs in this process."""


def run_one(label: str, build: Build, replays: int) -> Outcome:
    """A case, or what became of it: one that does not compile or run must not hide the others' figures."""
    try:
        outcome = run_case(build(), replays)
        outcome.record["broken"] = outcome.broken
        return outcome
    except Exception as failure:
        logger.exception("%s failed", label)
        text = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        return Outcome({"kernel": label, "broken": [text]}, [text])


def release_memory() -> None:
    if not IS_INTERPRETED:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as failure:
            raise DeviceLost(str(failure)) from failure


def run_group(cases: Builds, wanted: str, replays: int, outcomes: list[Outcome]) -> None:
    for label, build in cases:
        if wanted in label:
            begin = time.perf_counter()
            outcomes.append(run_one(label, build, replays))
            outcomes[-1].record["took_s"] = round(time.perf_counter() - begin, 2)
            print(json.dumps(outcomes[-1].record), flush=True)
            release_memory()


def table(outcomes: list[Outcome]) -> str:
    """One line per case: figures, and the rules that it broke."""
    lines = [f"{'kernel':18} {'shape':30} {'us':>9} {'of limit':>8} {'rival us':>9} {'error':>8} {'torch':>8}"]
    for outcome in outcomes:
        kernel, shape, *figures = (str(outcome.record.get(key, "")) for key in COLUMNS)
        us, share, rival, error, torch_error = figures
        line = f"{kernel:18} {shape:30} {us:>9} {share:>8} {rival:>9} {error:>8} {torch_error:>8}"
        lines.append(line.rstrip() + "".join(f"\n    BROKEN: {rule}" for rule in outcome.broken))
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(GROUPS), default=list(GROUPS), help="groups (default: all)")
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases whose name holds this")
    parser.add_argument("--replays", type=int, default=9, help="timed replays per case")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes in Triton's interpreter, without a GPU")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not IS_INTERPRETED and not torch.cuda.is_available():
        print("bench_kernels needs an NVIDIA GPU, and torch finds none here; --interpret needs none", file=sys.stderr)
        return 2
    torch.manual_seed(time.time_ns() % 2**31)
    outcomes: list[Outcome] = []
    try:
        for name in args.only:
            run_group(GROUPS[name](), args.cases, args.replays, outcomes)
    except DeviceLost as failure:
        outcomes.append(Outcome({"kernel": "the cases after it"}, [f"not run, the device is lost: {failure}"]))
    card = "interpreter" if IS_INTERPRETED else torch.cuda.get_device_name(DEVICE)
    failed = sum(bool(outcome.broken) for outcome in outcomes)
    summary = {"card": card, "torch": torch.__version__, "triton": triton.__version__}
    print(table(outcomes))
    print(json.dumps({**summary, "cases": len(outcomes), "failed": failed}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
