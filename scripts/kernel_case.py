# SPDX-License-Identifier: Apache-2.0
"""One kernel at one shape: how it is checked, timed and judged. Shared by the files of `bench_kernels`.

Under Triton's interpreter (TRITON_INTERPRET=1) everything is tiny, float32 and on the CPU, and nothing is timed: that
shows that the cases call the kernels rightly, on any machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BF16, F32, F64, I32, I64 = torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_INTERPRETED:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.interpreter import adjust_interpreter

    adjust_interpreter()
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPE = F32 if IS_INTERPRETED else BF16
NAN = float("nan")
HAS_PDL = not IS_INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
"""Programmatic dependent launch, which the engine uses from Hopper on."""

LIMITS = {"read": 4.4, "copy": 4.27}
"""TB/s of pure reads, and of reads and writes: measured on an H200."""
FLOP_LIMIT = 790.0
"""bfloat16 TFLOP/s, likewise."""
MAX_ERROR = 1e-4 if IS_INTERPRETED else 1e-2
MAX_ERROR_RATIO = 1.1
"""Against torch's own bfloat16 error."""
ROTATED_BYTES = 2 * 10**8
"""Input sets together: more than the L2 cache holds."""


@dataclass(frozen=True)
class Shape:
    """Of a model."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    block: int

    @property
    def qkv_heads(self) -> int:
        return self.heads + 2 * self.kv_heads


SHAPE = Shape(4, 2, 16, 64, 96, 301, 16) if IS_INTERPRETED else Shape(32, 8, 128, 4096, 14336, 128256, 64)
"""The 8B Llama shape."""


@dataclass(frozen=True)
class Check:
    """What a comparison with an oracle found, after the outputs had been poisoned."""

    error: float
    """‖out - ref‖ / ‖ref‖; of exact results the share of wrong values."""
    torch_error: float | None = None
    """That of torch's own computation in the same dtype; None: the result is exact."""


@dataclass(frozen=True)
class Goal:
    """What the kernel has to reach."""

    unit: str
    """TB/s or TFLOP/s."""
    least: float


@dataclass(frozen=True)
class Case:
    """One kernel at one shape."""

    name: str
    shape: str
    launch: Callable[[int], None]
    """Run on input set i."""
    num_sets: int
    check: Callable[[], Check]
    """Run on set 0 and compare."""
    num_bytes: float = 0.0
    """That one launch must move, and floating-point operations that it must do; the larger floor is its limit."""
    flops: float = 0.0
    memory: str = "read"
    """Key of LIMITS."""
    goal: Goal | None = None
    rival: Callable[[int], None] | None = None
    """Another way to do the same, timed in turns with it."""


Build = Callable[[], Case]
Builds = Iterator[tuple[str, Build]]
"""(what it is called before it exists, how it is made): a case that cannot be made must not stop the others."""


@dataclass
class Outcome:
    """A case's record, as it is printed, and the rules that it broke."""

    record: dict[str, Any]
    broken: list[str] = field(default_factory=list)


def pick(full: tuple[Any, ...], tiny: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes for the GPU, or for the interpreter."""
    return tiny if IS_INTERPRETED else full


def randn(*shape: int, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE).normal_(0.0, scale)


def poisoned(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.full(shape, NAN if dtype.is_floating_point else -9, dtype=dtype, device=DEVICE)


def ints(values: list[int] | Tensor, dtype: torch.dtype = I32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype, device=DEVICE)


def error(out: Tensor, ref: Tensor) -> float:
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def row_error(out: Tensor, ref: Tensor) -> float:
    """Root mean square over the rows of each row's own error, so that no large row hides the small ones."""
    out, ref = out.double().flatten(1), ref.double().flatten(1)
    return ((out - ref).norm(dim=1) / ref.norm(dim=1)).square().mean().sqrt().item()


def num_sets(num_bytes: float, most: int = 64) -> int:
    return 2 if IS_INTERPRETED else max(1, min(most, int(ROTATED_BYTES / max(num_bytes, 1)) + 1))


def time_launches(launches: list[Callable[[int], None]], sets: int, replays: int) -> list[float]:
    """Microseconds per launch of each: medians over replays, taken in turns, of a graph of 8 launches or more."""
    count = max(8, sets)
    graphs = []
    for launch in launches:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for index in range(count):
                launch(index % sets)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays + 2):
        for graph, found in zip(graphs, times, strict=True):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1000 / count)
    return [sorted(found[2:])[replays // 2] for found in times]


def run_case(case: Case, replays: int) -> Outcome:
    """Check, time and judge."""
    launches = [case.launch, *([case.rival] if case.rival else [])]
    for launch in launches:
        launch(0)  # compiles it
    check = case.check()
    record: dict[str, Any] = {"kernel": case.name, "shape": case.shape, "error": float(f"{check.error:.3g}")}
    if check.torch_error is not None:
        record["torch_error"] = float(f"{check.torch_error:.3g}")
    outcome = Outcome(record, broken_rules(check))
    if IS_INTERPRETED:
        for index in range(case.num_sets):
            case.launch(index)
        return outcome
    microseconds, *others = time_launches(launches, case.num_sets, replays)
    rates = {"TB/s": case.num_bytes / microseconds / 1e6, "TFLOP/s": case.flops / microseconds / 1e6}
    shares = {"TB/s": rates["TB/s"] / LIMITS[case.memory], "TFLOP/s": rates["TFLOP/s"] / FLOP_LIMIT}
    unit = max(shares, key=lambda unit: shares[unit])
    record |= {"us": round(microseconds, 2), unit: round(rates[unit], 3), "share_of_limit": round(shares[unit], 3)}
    if others:
        record["rival_us"] = round(others[0], 2)
    if case.goal and not rates[case.goal.unit] >= case.goal.least:
        outcome.broken.append(f"{rates[case.goal.unit]:.3g} {case.goal.unit}, goal {case.goal.least:g}")
    return outcome


def broken_rules(check: Check) -> list[str]:
    """Those about numbers; NaN breaks every one."""
    if check.torch_error is None:
        return [] if check.error == 0 else [f"{check.error:.3g} of the exact values are wrong"]
    broken = [] if check.error <= MAX_ERROR else [f"error {check.error:.3g}, allowed {MAX_ERROR:g}"]
    # What float32 rounds away differs by chance.
    if not IS_INTERPRETED and not check.error <= MAX_ERROR_RATIO * check.torch_error:
        broken.append(f"error {check.error:.3g}, torch's {check.torch_error:.3g}, allowed {MAX_ERROR_RATIO} times that")
    return broken
