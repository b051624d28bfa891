# SPDX-License-Identifier: Apache-2.0
"""What the scheduler does after a step that raised, or rows that failed, so that nobody ends who is not to blame.

After a step that raised, nothing planned from it on counts: all that runs waits to be computed again. If memory ran
out, steps get smaller for a while; else the step's sequences run apart from each other until the culprit is known. A
row without finite logits ends its sequence, unless that used blocks which others had computed: then it is computed
again without. Blocks of which the content is in doubt are found by nobody and zeroed. Has no say in ordinary steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mii_zmq.errors import InternalError, MiiError, NumericError
from mii_zmq.worker.bisection import Bisection
from mii_zmq.worker.plan import NOT_FINITE, EngineLimits, StepResult
from mii_zmq.worker.queues import Queues
from mii_zmq.worker.residency import Residency
from mii_zmq.worker.sequence import PlannedStep, Sequence
from mii_zmq.worker.step_budget import StepBudget
from mii_zmq.worker.step_faults import NumericStreak


class Recovery:
    """Works on the queues, blocks and steps in flight that the scheduler owns."""

    def __init__(
        self,
        limits: EngineLimits,
        queues: Queues,
        residency: Residency,
        in_flight: deque[PlannedStep],
        set_back: Callable[[Sequence], None],
        finish: Callable[[Sequence, str, MiiError], None],
    ) -> None:
        """`set_back` takes a sequence out of everything and lets it wait to be computed again."""
        self.num_failed_steps = 0
        self.num_numeric_errors = 0
        self.numeric_streak = NumericStreak()
        self._limits = limits
        self._queues = queues
        self._residency = residency
        self._in_flight = in_flight
        self._set_back = set_back
        self._finish = finish
        self._budget = StepBudget(limits.token_budget)
        self._bisection = Bisection()

    @property
    def token_budget(self) -> int:
        return self._budget.tokens

    @property
    def is_hopeless(self) -> bool:
        """Steps keep failing with nobody to blame, or one request after the other has no finite logits."""
        return self._bisection.is_hopeless or self.numeric_streak.is_unhealthy

    def may_plan(self) -> bool:
        """Called before every plan. False: wait for the step in flight."""
        if self._bisection.is_active:
            if self._in_flight:
                return False  # one by one, so that it is certain which step failed
            self._bisection.drop_finished()
            self._restrict()
        return True

    def note_good_step(self, planned: PlannedStep) -> None:
        if self._budget.note_good_step():
            self._limit_running()
        if self._bisection.is_active:
            self._bisection.acquit(planned.ends())
            self._restrict()
        else:
            self._bisection.note_good_step()

    def retry_apart(self, step: int, last_taken: int, message: str) -> None:
        """A step raised: look for the sequence that is to blame, which ends with 'error'.

        `last_taken`: the newest step that the executor took; the failed one may be newer.
        """
        planned = self._start_over(step, last_taken)
        for sequence in self._bisection.accuse(planned.ends()):
            self._finish(sequence, "error", InternalError(message))
        self._restrict()

    def retry_smaller(self, step: int, last_taken: int, message: str) -> bool:
        """A step did not fit into memory: make smaller ones.

        False: it had one token, and the newest of its sequences has ended with 'error'.
        """
        planned = self._start_over(step, last_taken)
        is_smaller = self._budget.shrink(sum(row.num_tokens for row in planned.rows))
        self._limit_running()
        if not is_smaller and (sequences := planned.ends()):
            self._finish(max(sequences, key=lambda item: item.order_key), "error", InternalError(message))
        return is_smaller

    def abandon(self, result: StepResult) -> None:
        """Of a step behind one that raised: it means nothing, but says which blocks hold no finite numbers."""
        planned = next(item for item in self._in_flight if item.step == result.step)
        for row, sequence in zip(planned.rows, planned.sequences, strict=True):
            if sequence is not None and row.slot in result.failed:
                self._residency.condemn(sequence)

    def fail_rows(self, planned: PlannedStep, reasons: dict[int, str], now: float) -> None:
        """Rows of a step failed; `reasons` by slot."""
        rows = zip(planned.rows, planned.sequences, strict=True)
        for sequence, reason in [(item, reasons[row.slot]) for row, item in rows if item and row.slot in reasons]:
            self._residency.condemn(sequence)
            if sequence.is_finished:
                continue
            if reason != NOT_FINITE:
                self._finish(sequence, "error", InternalError(reason))
            elif sequence.has_borrowed:
                sequence.is_apart = True
                sequence.num_in_flight = 0
                for item in self._in_flight:
                    item.forget(sequence)
                self._set_back(sequence)
            else:
                self.num_numeric_errors += 1
                self.numeric_streak.failed(now)
                self._finish(sequence, "error", NumericError(f"{reason}, for this request at least"))

    def reset(self) -> None:
        """All sequences have ended."""
        self._bisection.reset()

    def _start_over(self, step: int, last_taken: int) -> PlannedStep:
        self.num_failed_steps += 1
        failed = list(self._in_flight)
        if not failed or failed[0].step != step:
            raise InternalError(f"step {step} failed, but the oldest in flight is another one")
        self._in_flight.clear()
        for planned in failed:
            if planned.step > last_taken:
                self._residency.unseal(planned)
            self._residency.distrust(planned)
        for sequence in [*self._queues.running, *self._queues.parked]:
            sequence.num_in_flight = 0
            self._set_back(sequence)
        return failed[0]

    def _restrict(self) -> None:
        """Let nobody run but the group that is on trial, if there is one."""
        group = self._bisection.group
        for sequence in self._queues.running:
            if group is not None and sequence not in group:
                self._set_back(sequence)
        self._queues.restrict(group)

    def _limit_running(self) -> None:
        # Every decode is in every step.
        self._residency.max_running = min(self._limits.max_sequences, self._budget.tokens)
