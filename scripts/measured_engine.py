# SPDX-License-Identifier: Apache-2.0
"""An engine whose runs are timed, and the requests it is given. For `bench_engine`.

Scheduler, executor and kernels as a worker runs them, without sockets. Any executor will do: on a CPU the fake one
shows that requests and arithmetic are right.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.plan import EngineLimits, Executor, PendingStep, SamplingSpec, SequenceRequest, StepPlan

Sizes = list[tuple[int, int]]
"""Per request (prompt tokens, output tokens)."""

MEANS = {"mix2600": (2600, 60), "mix1200": (1200, 128)}
GREEDY = (SamplingSpec(),)


def lengths(name: str, num_requests: int = 256, seed: int = 0) -> Sizes:
    """Those of a workload, all of whose requests arrive at once."""
    draw = random.Random(seed + 1)
    if name == "nano":
        prompts = [draw.randint(100, 1024) for _ in range(num_requests)]
        return list(zip(prompts, [draw.randint(100, 1024) for _ in range(num_requests)], strict=True))

    def clipped(mean: int) -> int:
        return max(1, min(8000, round(draw.gauss(mean, 0.3 * mean))))

    prompts = [clipped(MEANS[name][0]) for _ in range(num_requests)]
    return list(zip(prompts, [clipped(MEANS[name][1]) for _ in range(num_requests)], strict=True))


class TimedExecutor:
    """An executor that notes the time its caller spends in `submit`."""

    def __init__(self, executor: Executor) -> None:
        self.limits: EngineLimits = executor.limits
        self.seconds: list[float] = []
        self._executor = executor

    def submit(self, plan: StepPlan) -> PendingStep:
        begin = time.perf_counter()
        pending = self._executor.submit(plan)
        self.seconds.append(time.perf_counter() - begin)
        return pending

    def close(self) -> None:
        self._executor.close()


class MeasuredEngine:
    """An engine that is measured; prefix cache off."""

    def __init__(self, executor: Executor) -> None:
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

    def requests(self, sizes: Sizes, specs: Sequence[SamplingSpec] = GREEDY) -> list[SequenceRequest]:
        """Requests with random prompts; the sampling settings take turns."""
        vocabulary = range(10, self.vocab_size)
        return [
            SequenceRequest(
                next(self._ids), self._random.choices(vocabulary, k=num_prompt_tokens), num_outputs,
                sampling=specs[index % len(specs)],
            )
            for index, (num_prompt_tokens, num_outputs) in enumerate(sizes)
        ]  # fmt: skip

    def start(self, requests: list[SequenceRequest]) -> None:
        for request in requests:
            self.core.add(request)

    def steps(self) -> Iterator[tuple[float, int, int]]:
        """(time, tokens, ends) after each step, until idle."""
        while self.core.has_work:
            outputs = self.core.step()
            tokens = sum(len(output.token_ids) for output in outputs)
            bad = [output for output in outputs if output.finish_reason not in (None, "length")]
            if bad:
                raise SystemExit(f"a sequence ended with {bad[0].finish_reason}: {bad[0].error}")
            yield time.perf_counter(), tokens, sum(output.finish_reason is not None for output in outputs)

    def run(self, sizes: Sizes, specs: Sequence[SamplingSpec] = GREEDY) -> dict[str, float]:
        """Run requests to the end; seconds in all, and per step while every sequence decodes."""
        self.plan_seconds.clear()
        self.timed.seconds.clear()
        requests = self.requests(sizes, specs)
        gc.collect()
        begin = time.perf_counter()
        self.start(requests)
        stamps = list(self.steps())
        full = [stamp for stamp, tokens, ends in stamps if tokens == len(sizes) and not ends]
        produced, wanted = sum(tokens for _, tokens, _ in stamps), sum(outputs for _, outputs in sizes)
        if produced != wanted:
            raise SystemExit(f"{produced} tokens came, {wanted} were asked for")
        host = [plan + submit for plan, submit in zip(self.plan_seconds, self.timed.seconds, strict=False)]
        return {
            "seconds": stamps[-1][0] - begin,
            "steps": len(self.timed.seconds),
            "full_step_ms": 1e3 * (full[-1] - full[0]) / (len(full) - 1) if len(full) > 2 else 0.0,
            "plan_ms": 1e3 * statistics.median(self.plan_seconds),
            "host_ms": 1e3 * statistics.median(host),
        }

    def run_decode(
        self, batch: int, num_outputs: int, specs: Sequence[SamplingSpec] = GREEDY, num_prompt_tokens: int = 512
    ) -> dict[str, float]:
        """A run of equal requests, and the same with one output token each: what a step between them takes."""
        long = self.run([(num_prompt_tokens, num_outputs)] * batch, specs)
        short = self.run([(num_prompt_tokens, 1)] * batch, specs)
        return {**long, "ms_per_step": 1e3 * (long["seconds"] - short["seconds"]) / (num_outputs - 1)}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure over the runs."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def rounded(figures: dict[str, float], *names: str, digits: int = 3) -> dict[str, Any]:
    return {name: round(figures[name], digits) for name in names}


def ratio(runs: list[dict[str, float]], others: list[dict[str, float]], key: str) -> float:
    """Median of the ratios of runs made one behind the other."""
    pairs = zip(runs, others, strict=True)
    return round(statistics.median(run[key] / other[key] if other[key] else 0.0 for run, other in pairs), 4)
