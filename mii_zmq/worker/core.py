# SPDX-License-Identifier: Apache-2.0
"""The overlapped execution loop: one scheduler, one executor, at most two steps in flight.

`step` plans and submits step n + 1 before it reads the result of step n, so that planning and staging hide behind the
device's work. After a step that raises its sequences are computed again: in smaller steps if memory ran out, else apart
from each other, so that only the one with which steps fail ends by it. A fault of the device makes `step` raise, as do
`MAX_FAILED_STEPS` failed steps without a good one between. Masks for sequences with a grammar come from a
`GrammarService`, which nothing here waits for. Knows neither tensors nor sockets; driven by one thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from mii_zmq.errors import InternalError, InvalidRequest, MiiError
from mii_zmq.logs import place_of
from mii_zmq.worker.plan import EngineLimits, EngineStats, Executor, PendingStep, SequenceOutput, SequenceRequest
from mii_zmq.worker.scheduler import Scheduler
from mii_zmq.worker.step_faults import FaultKind, classify
from mii_zmq.worker.step_times import StepTimes

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 16
"""In a row: more than the search for one bad request among a thousand takes, few enough that a dead device ends before
anybody is blamed for it."""

TraceEntry = tuple[str, int]
"""'plan', 'submit' or 'read', and the step's number."""


class Trace(Protocol):
    """Where trace entries go: a list, or a file (`step_trace.StepTrace`)."""

    def append(self, entry: TraceEntry, /) -> None: ...


class MaskEvent(NamedTuple):
    """What a grammar allows behind a sequence's first `num_output_tokens` output tokens."""

    seq_id: int
    num_output_tokens: int
    mask: bytes | None
    """As in `StepPlan.masks`; None: the output is complete."""
    error: MiiError | None = None
    """The sequence cannot go on."""


class GrammarService(Protocol):
    """Follows sequences along their grammars, elsewhere: no call waits for anything."""

    def open(self, request: SequenceRequest) -> None:
        """A sequence with a grammar starts; the first mask, behind its resumed tokens, will come."""
        ...

    def advance(self, seq_id: int, token_id: int) -> None:
        """The newest output token of a sequence; the mask behind it will come."""
        ...

    def close(self, seq_id: int) -> None:
        """A sequence has ended."""
        ...

    def poll(self) -> list[MaskEvent]:
        """Send what was asked since the last call, and return what has come. To be called twice a second at least."""
        ...

    def poll_set(self) -> list[tuple[int, int]]:
        """File descriptors and their `select.poll` events at which `poll` has something to do."""
        ...

    def shut_down(self) -> None: ...


class EngineCore:
    """An engine: token ids in, token ids out. Owns the executor and the grammar service, and closes them."""

    def __init__(
        self,
        executor: Executor,
        *,
        model: str = "",
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
        grammars: GrammarService | None = None,
    ) -> None:
        """Without `grammars`, requests with one are refused."""
        self.executor = executor
        self.limits: EngineLimits = replace(executor.limits, takes_grammars=grammars is not None)
        self.scheduler = Scheduler(executor.limits, model=model, prefix_cache=prefix_cache)
        self._clock = clock
        self._trace = trace
        self.times = StepTimes()
        self._in_flight: deque[tuple[int, PendingStep]] = deque()
        self._last_taken = 0
        """The newest step that the executor took."""
        self._num_failed_steps = 0
        """Since the last good one."""
        self._end: InternalError | None = None
        """Raised by the next step."""
        self._grammars = grammars
        self._lacks_masks = False
        """Nothing can be planned before a mask, a request or a cancellation has come."""

    @property
    def has_work(self) -> bool:
        """`step` has something to do; false means that it would return nothing until the next `add` or `cancel`, until
        `take_masks` found something, or `max_wait_s` has passed."""
        if self._in_flight or self._end is not None:
            return True
        return self.scheduler.has_work and (not self._lacks_masks or self.max_wait_s(1.0) <= 0)

    def max_wait_s(self, at_most: float) -> float:
        """How long there may be nothing to do, if nothing comes."""
        deadline = self.scheduler.next_deadline
        return at_most if deadline is None else max(0.0, min(at_most, deadline - self._clock()))

    @property
    def awaits_masks(self) -> bool:
        """There are sequences, and each of them waits for a mask, or for what such sequences hold."""
        return self._lacks_masks and self.scheduler.has_work

    def poll_set(self) -> Sequence[tuple[int, int]]:
        """File descriptors and their events behind which `take_masks` finds something."""
        return () if self._grammars is None else self._grammars.poll_set()

    def take_masks(self) -> None:
        """Exchange news with the grammar service. `step` does it, too."""
        if self._grammars is None:
            return
        for seq_id, token_id in self.scheduler.take_grammar_changes():
            if token_id is None:
                self._grammars.close(seq_id)
            else:
                self._grammars.advance(seq_id, token_id)
        for event in self._grammars.poll():
            self._lacks_masks = False
            if event.error is not None:
                self.scheduler.fail(event.seq_id, event.error)
            else:
                self.scheduler.take_mask(event.seq_id, event.num_output_tokens, event.mask)

    def add(self, request: SequenceRequest) -> None:
        """Take a sequence; its outputs come from `step`, the last of them with a finish_reason.

        If its grammar cannot be opened, that is its end, and comes from `step` as well.

        Raises:
            PromptTooLong, InvalidRequest: it can never run; nothing was kept.
        """
        if request.grammar is not None and self._grammars is None:
            raise InvalidRequest("structured_output: this engine takes no grammars", param="structured_output")
        self.scheduler.add(request, self._clock())
        self._lacks_masks = False
        if request.grammar is not None and self._grammars is not None:
            self._open_grammar(self._grammars, request)

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """End sequences with finish_reason 'cancelled'; unknown and finished ids are ignored."""
        self.scheduler.cancel(seq_ids)
        self._lacks_masks = False

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running sequences go on."""
        self.scheduler.reset_prefix_cache()

    def step(self) -> list[SequenceOutput]:
        """Keep the device busy and return what became known. Waits for a step only when there is one to read.

        Raises:
            InternalError: the engine is of no use any more and should be restarted: the device or a rank is lost, or
                steps or requests keep failing with nobody to blame.
        """
        if self._end is not None:
            raise self._end
        outputs: list[SequenceOutput] = []
        self.take_masks()
        was_submitted = self._submit_next(outputs)
        if self._in_flight and (len(self._in_flight) > 1 or not was_submitted):
            self._read_oldest(outputs)
        outputs += self.scheduler.take_outputs()
        self.take_masks()
        if self.scheduler.recovery.is_hopeless:
            # With the next call, so that these outputs arrive.
            self._end = InternalError(
                "steps keep failing whatever is in them, or no request gets finite logits any more; the device or the "
                "weights in it count as broken"
            )
        return outputs

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def close(self) -> None:
        """Close the executor; steps in flight are abandoned."""
        self._in_flight.clear()
        if self._grammars is not None:
            self._grammars.shut_down()
        self.executor.close()

    def _open_grammar(self, grammars: GrammarService, request: SequenceRequest) -> None:
        try:
            grammars.open(request)
        except Exception as error:  # noqa: BLE001 - its text may quote the grammar
            logger.error("the grammar of sequence %d cannot be opened; it ends: %s", request.seq_id, place_of(error))
            if not isinstance(error, MiiError):
                error = InternalError(_one_line("structured_output: the request's grammar cannot be opened", error))
            # As any end it lets go of everything, also of what the service has of it, and is reported once, even where
            # the sequence was complete when it came.
            self.scheduler.fail(request.seq_id, error)

    def _submit_next(self, outputs: list[SequenceOutput]) -> bool:
        started = time.monotonic()
        try:
            plan = self.scheduler.plan(self._clock())
        except Exception as error:
            logger.exception("planning failed; every sequence of the engine ends")
            outputs += self.scheduler.fail_all(_one_line("planning failed", error))
            return False
        if plan is None:
            self._lacks_masks = not self._in_flight and self.scheduler.awaits_masks
            return False
        self._lacks_masks = False
        started = self.times.took(self.times.plan, started)
        self._note("plan", plan.step)
        try:
            pending = self.executor.submit(plan)
        except Exception as error:  # noqa: BLE001
            # What earlier steps yield is sound, and has to be known before anything starts over. If one of them fails,
            # that starts this one over as well.
            num_failed_steps = self.scheduler.recovery.num_failed_steps
            while self._in_flight:
                self._read_oldest(outputs)
            if self.scheduler.recovery.num_failed_steps == num_failed_steps:
                self._on_failure(plan.step, f"step {plan.step} could not be submitted", error, outputs)
            return False
        self._last_taken = plan.step
        self._in_flight.append((plan.step, pending))
        self.times.took(self.times.submit, started)
        self._note("submit", plan.step)
        return True

    def _read_oldest(self, outputs: list[SequenceOutput]) -> None:
        step, pending = self._in_flight.popleft()
        started = time.monotonic()
        try:
            result = pending.result()
        except Exception as error:  # noqa: BLE001
            self._on_failure(step, f"step {step} failed", error, outputs)
            return
        started = self.times.took(self.times.wait, started)
        self._note("read", step)
        try:
            outputs += self.scheduler.complete(result)
        except Exception as error:
            logger.exception("the scheduler failed on step %d; every sequence of the engine ends", step)
            outputs += self.scheduler.fail_all(_one_line("the scheduler failed", error), step)
        self.times.took(self.times.finish, started)
        self._num_failed_steps = 0

    def _on_failure(self, step: int, what: str, error: Exception, outputs: list[SequenceOutput]) -> None:
        message = _one_line(what, error)
        kind = self._abandon_steps(classify(error))
        if kind is FaultKind.FATAL:
            raise InternalError(f"{message}; the engine cannot go on after that") from error
        self._num_failed_steps += 1
        logger.warning("%s; its sequences are computed again", message, exc_info=self._num_failed_steps == 1)
        try:
            if self.scheduler.retry(step, self._last_taken, message, is_memory=kind is FaultKind.MEMORY):
                self._num_failed_steps -= 1
        except Exception:
            logger.exception("the scheduler's accounting is broken; every sequence of the engine ends")
            outputs += self.scheduler.fail_all(message)
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise InternalError(
                f"{self._num_failed_steps} steps failed one after the other, so the device counts as dead; the last: "
                f"{message}"
            )

    def _abandon_steps(self, kind: FaultKind) -> FaultKind:
        """Wait for the steps behind a failed one, whose results mean nothing. Returns the worst fault of all."""
        while self._in_flight:
            step, pending = self._in_flight.popleft()
            try:
                self.scheduler.recovery.abandon(pending.result())
            except Exception as error:  # noqa: BLE001
                logger.info("%s", _one_line(f"step {step} failed too", error))
                if classify(error) is FaultKind.FATAL:
                    kind = FaultKind.FATAL
        return kind

    def _note(self, event: str, step: int) -> None:
        if self._trace is not None:
            self._trace.append((event, step))


def _one_line(what: str, error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{what}: {type(error).__name__}: {text}" if text else f"{what}: {type(error).__name__}"
