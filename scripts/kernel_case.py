# SPDX-License-Identifier: Apache-2.0
"""One kernel at one shape: how it is checked, timed and reported. Shared by the files of `bench_kernels`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LIMITS = {"read": 4.4, "copy": 4.27, "flop": 790.0}
"""TB/s of pure reads and of reads and writes, and bfloat16 TFLOP/s: measured on an H200."""
MAX_ERROR = 1e-2
MAX_ERROR_RATIO = 1.1
"""Against torch's own bfloat16 error."""
ROTATED_BYTES = 2 * 10**8
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB, BLOCK = 32, 8, 128, 4096, 14336, 128256, 64
"""The 8B Llama shape."""
BF16, F32, F64, I32 = torch.bfloat16, torch.float32, torch.float64, torch.int32
DEVICE = torch.device("cuda")
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """One kernel at one shape."""

    name: str
    shape: str
    limit: str
    """A key of LIMITS."""
    amount: float
    """Bytes, or floating-point operations, that one launch must move or do."""
    launch: Callable[[int], None]
    """Run on input set i."""
    num_sets: int
    check: Callable[[], tuple[float, float | None]]
    """Run on set 0 with poisoned outputs -> (error, torch's bfloat16 error if there is one)."""


def randn(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def ints(values: list[int] | Tensor, dtype: torch.dtype = I32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype, device=DEVICE)


def error(out: Tensor, ref: Tensor) -> float:
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def sets_for(num_bytes: int, most: int = 64) -> int:
    return max(1, min(most, ROTATED_BYTES // max(num_bytes, 1) + 1))


def time_case(case: Case, replays: int) -> float:
    """Microseconds per launch: the median over the replays of a graph of at least 8 launches."""
    count = max(8, case.num_sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            case.launch(index % case.num_sets)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(replays + 2):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / count)
    return sorted(times[2:])[replays // 2]


def run_case(case: Case, replays: int) -> bool:
    """Check, time and print; whether the check passed."""
    wrong, own = case.check()
    limit = 0.0 if own is None else min(MAX_ERROR, MAX_ERROR_RATIO * own)
    passed = wrong <= limit
    microseconds = time_case(case, replays)
    rate = case.amount / microseconds / 1e6
    record = {
        "kernel": case.name, "shape": case.shape, "us": round(microseconds, 2),
        "TFLOP/s" if case.limit == "flop" else "TB/s": round(rate, 3),
        "share_of_limit": round(rate / LIMITS[case.limit], 3), "error": float(f"{wrong:.3g}"),
        "torch_bf16_error": None if own is None else float(f"{own:.3g}"), "passed": passed,
    }  # fmt: skip
    print(json.dumps(record), flush=True)
    return passed
