# SPDX-License-Identifier: Apache-2.0
"""The overlapped execution loop: one scheduler, one executor, at most two steps in flight.

`step` plans and submits step n + 1 before it reads the result of step n, so that planning and staging hide behind the
device's work. A step that raises ends the sequences in it and nothing else; after `MAX_FAILED_STEPS` of them without a
good one between, the device counts as dead and `step` raises. Knows neither tensors nor sockets; driven by one thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from mii_zmq.errors import InternalError
from mii_zmq.worker.plan import EngineLimits, EngineStats, Executor, PendingStep, SequenceOutput, SequenceRequest
from mii_zmq.worker.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""In a row: more than one bad request causes, few enough that a dead device fails little before the engine ends."""

TraceEntry = tuple[str, int]
"""'plan', 'submit' or 'read', and the step's number."""


class Trace(Protocol):
    """Where trace entries go: a list, or a file (`step_trace.StepTrace`)."""

    def append(self, entry: TraceEntry, /) -> None: ...


class EngineCore:
    """An engine: token ids in, token ids out. Owns the executor and closes it."""

    def __init__(
        self,
        executor: Executor,
        *,
        model: str = "",
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = Scheduler(executor.limits, model=model, prefix_cache=prefix_cache)
        self._clock = clock
        self._trace = trace
        self._in_flight: deque[tuple[int, PendingStep]] = deque()
        self._num_failed_steps = 0
        """Since the last good one."""

    @property
    def limits(self) -> EngineLimits:
        return self.executor.limits

    @property
    def has_work(self) -> bool:
        """`step` has something to do; false means that it would return nothing until the next `add` or `cancel`."""
        return bool(self._in_flight) or self.scheduler.has_work

    def add(self, request: SequenceRequest) -> None:
        """Take a sequence; its outputs come from `step`, the last of them with a finish_reason.

        Raises:
            PromptTooLong, InvalidRequest: it can never run; nothing was kept.
        """
        self.scheduler.add(request, self._clock())

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """End sequences with finish_reason 'cancelled'; unknown and finished ids are ignored."""
        self.scheduler.cancel(seq_ids)

    def step(self) -> list[SequenceOutput]:
        """Keep the device busy and return what became known. Waits for a step only when there is one to read.

        Raises:
            InternalError: one step after the other fails; the engine is of no use any more and should be restarted.
        """
        outputs: list[SequenceOutput] = []
        was_submitted = self._submit_next(outputs)
        if self._in_flight and (len(self._in_flight) > 1 or not was_submitted):
            self._read_oldest(outputs)
        outputs += self.scheduler.take_outputs()
        return outputs

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def close(self) -> None:
        """Close the executor; steps in flight are abandoned."""
        self._in_flight.clear()
        self.executor.close()

    def _submit_next(self, outputs: list[SequenceOutput]) -> bool:
        try:
            plan = self.scheduler.plan(self._clock())
        except Exception as error:
            logger.exception("planning failed; every sequence of the engine ends")
            outputs += self.scheduler.fail_all(_one_line("planning failed", error))
            return False
        if plan is None:
            return False
        self._note("plan", plan.step)
        try:
            pending = self.executor.submit(plan)
        except Exception as error:
            logger.exception("step %d could not be submitted; its sequences end", plan.step)
            message = _one_line(f"step {plan.step} could not be submitted", error)
            self._fail_step(plan.step, message, outputs, submitted=False)
            return False
        self._in_flight.append((plan.step, pending))
        self._note("submit", plan.step)
        return True

    def _read_oldest(self, outputs: list[SequenceOutput]) -> None:
        step, pending = self._in_flight.popleft()
        try:
            result = pending.result()
            self._note("read", step)
            outputs += self.scheduler.complete(result)
            self._num_failed_steps = 0
        except Exception as error:
            logger.exception("step %d failed; its sequences end", step)
            self._fail_step(step, _one_line(f"step {step} failed", error), outputs, submitted=True)

    def _fail_step(self, step: int, message: str, outputs: list[SequenceOutput], *, submitted: bool) -> None:
        try:
            outputs += self.scheduler.fail_step(step, message, submitted=submitted)
        except Exception:
            logger.exception("the scheduler's accounting is broken; every sequence of the engine ends")
            outputs += self.scheduler.fail_all(message)
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise InternalError(
                f"{self._num_failed_steps} steps failed one after the other, so the device counts as dead; the last: "
                f"{message}"
            )

    def _note(self, event: str, step: int) -> None:
        if self._trace is not None:
            self._trace.append((event, step))


def _one_line(what: str, error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{what}: {type(error).__name__}: {text}" if text else f"{what}: {type(error).__name__}"
