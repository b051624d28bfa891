# SPDX-License-Identifier: Apache-2.0
"""What a GPU did during some steps of an engine, from the profiler's kernel records. For `bench_engine`.

A step begins with the copy of its packed plan to the device, which the kernel `batch_inputs` follows. Kernels may
overlap (programmatic dependent launch): the device counts as idle only where no record covers the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEP_KERNEL = "batch_inputs"
BEFORE_STEP = ("Memcpy HtoD", "apply_updates", "copy_blocks", STEP_KERNEL)
"""Names of what belongs to a step in front of and with its first kernel."""
NUM_SHOWN = 24
ROPE_KERNEL = "rope_kv"
LINEAR_NAMES = re.compile("gemv|skinny|gemm|nvjet|cutlass|splitK")
MATRICES = ("out", "up", "down", "qkv")
"""In the order in which they follow the rotary embedding."""


@dataclass(frozen=True)
class Record:
    """One kernel or copy; times in microseconds."""

    name: str
    start: float
    end: float


def record(work: Callable[[], None]) -> list[Record]:
    """The records of what `work` runs on the GPU, in order of their start."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    records = [Record(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted(records, key=lambda item: item.start)


def timeline(records: list[Record]) -> dict[str, Any]:
    """Span of a step, and the shares of the time in which the device was idle: in all, and between steps.

    From the first kernel of the first step to that of the last one, so that every step counts with the gap behind it.
    """
    starts = [index for index, item in enumerate(records) if item.name.startswith(STEP_KERNEL)]
    if len(starts) < 2:
        raise ValueError(f"{len(starts)} steps among {len(records)} records of the profiler; there must be two or more")
    inside = records[starts[0] : starts[-1] + 1]
    end = inside[0].start
    gaps = []
    for item in inside:
        gaps.append((max(0.0, item.start - end), item.name))
        end = max(end, item.end)
    span, num_steps = inside[-1].start - inside[0].start, len(starts) - 1
    idle = sum(gap for gap, _ in gaps)
    between = sum(gap for gap, name in gaps if name.startswith(BEFORE_STEP))
    return {
        "steps": num_steps, "step_us": round(span / num_steps, 1), "idle_share": round(idle / span, 5),
        "idle_between_steps_share": round(between / span, 5),
        "longest_gaps_us": [[round(gap, 1), name[:40]] for gap, name in sorted(gaps, reverse=True)[:5]],
    }  # fmt: skip


def kernel_times(records: list[Record]) -> dict[str, list[float]]:
    """By kernel, linears by matrix too: microseconds and launches per step, the longest first."""
    totals: dict[str, list[float]] = {}
    for item, label in zip(records, linear_labels(records), strict=True):
        entry = totals.setdefault(f"{label} {item.name[:60]}".lstrip(), [0.0, 0])
        entry[0] += item.end - item.start
        entry[1] += 1
    num_steps = sum(item.name.startswith(STEP_KERNEL) for item in records)
    top = sorted(totals.items(), key=lambda entry: -entry[1][0])[:NUM_SHOWN]
    return {name: [round(time / num_steps, 1), round(count / num_steps, 1)] for name, (time, count) in top}


def linear_labels(records: list[Record]) -> list[str]:
    """Which matrix each record multiplies with ('' for other kernels), by its place behind the rotary embedding.

    Rotary embedding, attention, out, up, down, the next layer's qkv: so it goes in every layer of one residual stream;
    what comes in qkv's place with no layer behind it is the head.
    """
    labels = [""] * len(records)
    count = len(MATRICES) - 1
    last: list[int] = []
    for index, item in enumerate(records):
        if item.name.startswith(STEP_KERNEL):
            for head in last:
                labels[head] = "head"
            count, last = len(MATRICES) - 1, []
        elif item.name.startswith(ROPE_KERNEL):
            count, last = 0, []
        elif LINEAR_NAMES.search(item.name):
            if "splitKreduce" not in item.name:
                count += 1
            labels[index] = MATRICES[(count - 1) % len(MATRICES)]
            if count == len(MATRICES):
                last.append(index)
    for head in last:
        labels[head] = "head"
    return labels
