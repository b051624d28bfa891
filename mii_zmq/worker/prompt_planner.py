# SPDX-License-Identifier: Apache-2.0
"""Which prompts the rest of a step's token budget goes to, and which waiting sequences are admitted for it.

The oldest prompt gets at least half of the budget, then the shortest remaining ones, then the oldest again. A prompt
that finds no room is passed by smaller ones until it has waited `ageing_s`; a preempted one is never passed. Prompts
here include what a preempted sequence has to compute again. Knows neither decodes nor results.
"""

from __future__ import annotations

from mii_zmq.worker.queues import Queues
from mii_zmq.worker.residency import Residency
from mii_zmq.worker.sequence import Chunk, PlannedStep, Sequence

AGEING_S = 5.0
MAX_MISFITS = 4
"""Waiting prompts without room that one plan looks at before it stops admitting."""


class PromptPlanner:
    """Admission and chunking, on the queues and the blocks that the scheduler owns."""

    def __init__(self, queues: Queues, residency: Residency, ageing_s: float) -> None:
        self._queues = queues
        self._residency = residency
        self._ageing_s = ageing_s

    def plan(self, planned: PlannedStep, budget: int, now: float) -> None:
        """Add prompt chunks of up to `budget` tokens to the step."""
        queues = self._queues
        if not budget or not (queues.prefilling or queues.waiting):
            return
        by_age = self._is_oldest_due(now)
        head = self._choose_head(planned)
        if head is None:
            self._plan_others(planned, None, budget, by_age)
            return
        chunk = self._residency.open_chunk(planned, head)
        is_alone = not queues.waiting and len(queues.prefilling) == 1
        budget -= self._compute(planned, chunk, budget if is_alone else (budget + 1) // 2)
        budget = self._plan_others(planned, head, budget, by_age)
        if budget and head.in_prefill:
            self._compute(planned, chunk, budget)

    def _is_oldest_due(self, now: float) -> bool:
        """Nobody may be admitted before the oldest waiting sequence any more."""
        if not self._queues.waiting:
            return False
        oldest = self._queues.waiting[0]
        return oldest.has_run or now - oldest.arrival >= self._ageing_s

    def _choose_head(self, planned: PlannedStep) -> Sequence | None:
        queues = self._queues
        oldest = queues.prefilling[0] if queues.prefilling else None
        if queues.waiting:
            waiting = queues.waiting[0]
            if (oldest is None or waiting.order_key < oldest.order_key) and self._admit(planned, waiting):
                return waiting
        return oldest

    def _plan_others(self, planned: PlannedStep, head: Sequence | None, budget: int, by_age: bool) -> int:
        """Fill the budget with the shortest prompts, started or waiting. Returns what is left of it."""
        started = [sequence for sequence in self._queues.prefilling if sequence is not head]
        started.sort(key=lambda sequence: sequence.num_uncomputed_tokens, reverse=True)
        queue = self._queues.waiting if by_age else self._queues.waiting_by_size
        max_misfits = 1 if by_age else MAX_MISFITS
        num_misfits = 0
        while budget:
            waiting = queue[num_misfits] if num_misfits < min(max_misfits, len(queue)) else None
            if started and (
                by_age or waiting is None or started[-1].num_uncomputed_tokens <= waiting.num_expected_tokens
            ):
                sequence = started.pop()
            elif waiting is None:
                break
            elif self._admit(planned, waiting):
                sequence = waiting
            else:
                num_misfits += 1
                continue
            budget -= self._compute(planned, self._residency.open_chunk(planned, sequence), budget)
        return budget

    def _admit(self, planned: PlannedStep, sequence: Sequence) -> bool:
        if self._queues.parked or not self._residency.admit(planned, sequence):
            return False
        self._queues.start(sequence)
        return True

    def _compute(self, planned: PlannedStep, chunk: Chunk, max_tokens: int) -> int:
        num_tokens = self._residency.grow_chunk(planned, chunk, max_tokens)
        if chunk.row.sample or chunk.row.pool:
            if chunk.sequence.mask is not None:
                planned.masks[chunk.row.slot] = chunk.sequence.mask
            chunk.sequence.num_in_flight += chunk.row.sample
            self._queues.end_prefill(chunk.sequence)
        return num_tokens
