# SPDX-License-Identifier: Apache-2.0
"""Dynamic SplitFuse: which tokens of which sequences the next step computes.

Events in (`add`, `cancel`, `complete`, `fail_step`), a `StepPlan` out of `plan`; no I/O, no clock, no threads. `plan`
may run before the results of earlier steps are known. Knows token ids and block ids, never tensors or text.

Policy. Decodes go first; the rest of the token budget is filled with prompt chunks: the oldest prompt gets at least
half of it, then the shortest remaining ones, then the oldest again. Age is arrival, moved by priority. A prompt that
finds no room is passed by smaller ones until it has waited `ageing_s`; a preempted one is never passed. A started
prompt has the blocks for its remainder set aside. When a decode finds no free block, the newest and least urgent
running sequence is preempted, so that the oldest one always goes on.

Invariants (see `check`): every block and slot has the owners that the tables say; free blocks cover what is set aside;
rows never exceed the budget; each sequence ends with exactly one finish_reason and no token is reported twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from mii_zmq.errors import InternalError, InvalidRequest
from mii_zmq.worker.plan import (
    EngineLimits,
    EngineStats,
    SequenceOutput,
    SequenceRequest,
    StepPlan,
    StepResult,
    StepRow,
)
from mii_zmq.worker.residency import Residency
from mii_zmq.worker.sequence import Chunk, PlannedStep, Sequence, SequenceQueue, SequenceState, make_sequence

AGEING_S = 5.0
MAX_MISFITS = 4
"""Waiting prompts without room that one plan looks at before it stops admitting."""

WAITING, RUNNING, FINISHED = SequenceState.WAITING, SequenceState.RUNNING, SequenceState.FINISHED


class Scheduler:
    """The sequences of one engine. Not thread-safe; results are completed in step order."""

    def __init__(
        self, limits: EngineLimits, *, model: str = "", prefix_cache: bool = True, ageing_s: float = AGEING_S
    ) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self._ageing_s = ageing_s
        self._step = 0
        self._number = 0
        self._sequences: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._in_flight: deque[PlannedStep] = deque()
        self._pending: list[SequenceOutput] = []
        self._waiting = SequenceQueue(lambda sequence: sequence.order_key)
        self._waiting_by_size = SequenceQueue(lambda sequence: (sequence.num_expected_tokens, sequence.order_key))
        self._parked: set[Sequence] = set()
        """Preempted with a token in flight; they queue again when it is known."""
        self._prefilling = SequenceQueue(lambda sequence: sequence.order_key)
        self._decoding = SequenceQueue(lambda sequence: sequence.order_key)
        self._draining: set[Sequence] = set()
        """Running with every token planned; they end when the last result is read."""
        self._num_max_tokens = 0
        """Sum of `max_tokens` over unfinished sequences."""
        self._residency = Residency(limits, model, prefix_cache)
        self.blocks = self._residency.blocks

    def add(self, request: SequenceRequest, now: float) -> None:
        """Take a sequence.

        Raises:
            PromptTooLong, InvalidRequest: it can never run; nothing was kept.
        """
        if request.seq_id in self._sequences:
            raise InvalidRequest(f"sequence id {request.seq_id} is in use; choose another", param="seq_id")
        sequence = make_sequence(request, self.limits, now, self._number)
        sequence.root_hash = self.blocks.root_hash(request.cache_salt)
        self._number += 1
        self._sequences[sequence.seq_id] = sequence
        self._num_max_tokens += sequence.max_tokens
        self._queue(sequence)
        if request.resumed_token_ids and (reason := sequence.finish_reason()):
            self._finish(sequence, reason)
        elif sequence.deadline is not None:
            if len(self._deadlines) > 64 + 2 * len(self._sequences):
                self._deadlines = [entry for entry in self._deadlines if not entry[2].is_finished]
                heapify(self._deadlines)
            heappush(self._deadlines, (sequence.deadline, self._number, sequence))

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """End sequences with finish_reason 'cancelled'; unknown and finished ids are ignored."""
        for seq_id in seq_ids:
            if sequence := self._sequences.get(seq_id):
                self._finish(sequence, "cancelled")

    def take_outputs(self) -> list[SequenceOutput]:
        """Ends that came with no result: cancelled, expired or failed sequences, resumed ones that were complete."""
        outputs, self._pending = self._pending, []
        return outputs

    def complete(self, result: StepResult) -> list[SequenceOutput]:
        """Take the result of the oldest step in flight; returns what it and the events since the last one produced.

        Raises:
            InternalError: it is not that step's result; nothing was changed.
        """
        planned = self._in_flight[0] if self._in_flight else None
        if planned is None or planned.step != result.step or len(planned.sampled) != len(result.token_ids):
            raise InternalError(
                f"a result of step {result.step} with {len(result.token_ids)} tokens does not answer "
                + (f"step {planned.step} with {len(planned.sampled)}" if planned else "any step in flight")
            )
        if result.failed:
            self._fail_rows(planned, result.failed)
        self._in_flight.popleft()
        outputs, size = self._pending, self.limits.block_size
        for sequence, token_id in zip(planned.sampled, result.token_ids, strict=True):
            if sequence is None or sequence.state is FINISHED:
                continue
            sequence.num_in_flight -= 1
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            output = SequenceOutput(sequence.seq_id, [token_id])
            outputs.append(output)
            if not sequence.has_emitted:
                sequence.has_emitted = True
                output.num_cached_tokens = sequence.num_cached_tokens
            reason = None
            if token_id in sequence.stop_token_ids or len(token_ids) >= sequence.max_tokens:
                reason = sequence.finish_reason()
            if reason is not None:
                self._register_known_blocks(sequence)
                self._end(sequence)
                output.finish_reason = reason
            elif sequence.state is WAITING:
                if not sequence.num_in_flight:
                    self._parked.discard(sequence)
                    self._queue(sequence)
            elif len(token_ids) % size <= 1:
                # A block can be offered once its last token is known and that token's KV is planned: this result
                # completes both under the overlapped loop, the next one does without overlap.
                self._register_known_blocks(sequence)
        return self.take_outputs()

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now (see `take_outputs` for expired sequences)."""
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heappop(self._deadlines)[2]
            if not sequence.is_finished:
                self._finish(sequence, "deadline")
        planned = PlannedStep(self._step + 1)
        self._plan_decodes(planned)
        num_decodes = len(planned.rows)
        planned.sampled = list(planned.sequences)
        if self._prefilling or self._waiting:
            self._plan_prompts(planned, self.limits.token_budget - num_decodes, now)
        if not planned.rows:
            return None
        chunks = zip(planned.rows[num_decodes:], planned.sequences[num_decodes:], strict=True)
        planned.sampled += [sequence for row, sequence in chunks if row.sample]
        self._step += 1
        self._in_flight.append(planned)
        self._residency.seal(planned)
        return planned.to_plan()

    def _plan_decodes(self, planned: PlannedStep) -> None:
        size, add_row, add_sequence = self.limits.block_size, planned.rows.append, planned.sequences.append
        ended = []
        for sequence in tuple(self._decoding):
            if sequence.state is not RUNNING:
                continue
            position = sequence.num_computed_tokens
            new_block_ids: list[int] = []
            if position % size == 0:
                if not self._make_room(sequence):
                    continue
                new_block_ids.append(self._residency.allocate_for_decode(sequence))
            add_row(StepRow(sequence.slot, position, 1, True, new_block_ids))
            add_sequence(sequence)
            sequence.num_computed_tokens = position + 1
            sequence.num_in_flight += 1
            if position + 2 >= sequence.max_tokens:
                ended.append(sequence)
        self._residency.num_computed_tokens += len(planned.rows)
        for sequence in ended:
            self._decoding.remove(sequence)
            self._draining.add(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """See to a free block for a decode, by preemption if need be. False: the sequence sits this step out.

        Decodes are planned oldest first, so a victim never has a row in the plan yet.
        """
        while not self._residency.has_free_block:
            if self._draining:
                return False  # their blocks come back with the next result, which is cheaper than a recompute
            victim = self._decoding[-1]
            if self._prefilling and self._prefilling[-1].order_key > victim.order_key:
                victim = self._prefilling[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._register_known_blocks(sequence)
        self._leave(sequence)
        self._wait(sequence)

    def _plan_prompts(self, planned: PlannedStep, budget: int, now: float) -> None:
        if not budget:
            return
        by_age = self._is_oldest_due(now)
        head = self._choose_head(planned)
        if head is None:
            self._plan_other_prompts(planned, None, budget, by_age)
            return
        chunk = self._residency.open_chunk(planned, head)
        is_alone = not self._waiting and len(self._prefilling) == 1
        budget -= self._compute(planned, chunk, budget if is_alone else (budget + 1) // 2)
        budget = self._plan_other_prompts(planned, head, budget, by_age)
        if budget and head.in_prefill:
            self._compute(planned, chunk, budget)

    def _is_oldest_due(self, now: float) -> bool:
        """Nobody may be admitted before the oldest waiting sequence any more."""
        if not self._waiting:
            return False
        oldest = self._waiting[0]
        return oldest.has_run or now - oldest.arrival >= self._ageing_s

    def _choose_head(self, planned: PlannedStep) -> Sequence | None:
        oldest = self._prefilling[0] if self._prefilling else None
        if self._waiting:
            waiting = self._waiting[0]
            if (oldest is None or waiting.order_key < oldest.order_key) and self._admit(planned, waiting):
                return waiting
        return oldest

    def _plan_other_prompts(self, planned: PlannedStep, head: Sequence | None, budget: int, by_age: bool) -> int:
        """Fill the budget with the shortest prompts, started or waiting. Returns what is left of it."""
        started = [sequence for sequence in self._prefilling if sequence is not head]
        started.sort(key=lambda sequence: sequence.num_uncomputed_tokens, reverse=True)
        queue = self._waiting if by_age else self._waiting_by_size
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
        if self._parked or not self._residency.admit(planned, sequence):
            return False
        self._waiting.remove(sequence)
        self._waiting_by_size.remove(sequence)
        sequence.state = RUNNING
        sequence.in_prefill = True
        self._prefilling.add(sequence)
        return True

    def _compute(self, planned: PlannedStep, chunk: Chunk, max_tokens: int) -> int:
        num_tokens = self._residency.grow_chunk(planned, chunk, max_tokens)
        if chunk.row.sample:
            sequence = chunk.sequence
            self._prefilling.remove(sequence)
            sequence.in_prefill = False
            sequence.num_in_flight += 1
            if sequence.num_tokens >= sequence.max_tokens:
                self._draining.add(sequence)
            else:
                self._decoding.add(sequence)
        return num_tokens

    def _queue(self, sequence: Sequence) -> None:
        sequence.num_expected_tokens = self._residency.estimate(sequence)
        self._waiting.add(sequence)
        self._waiting_by_size.add(sequence)

    def _wait(self, sequence: Sequence) -> None:
        """A sequence that ran waits to be computed again from all its known tokens."""
        sequence.state = WAITING
        sequence.has_run = True
        if sequence.num_in_flight:
            self._parked.add(sequence)
        else:
            self._queue(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Out of every queue and set; slot and blocks come back."""
        if sequence.state is WAITING:
            if sequence in self._parked:
                self._parked.remove(sequence)
            else:
                self._waiting.remove(sequence)
                self._waiting_by_size.remove(sequence)
            return
        if sequence in self._draining:
            self._draining.remove(sequence)
        else:
            (self._prefilling if sequence.in_prefill else self._decoding).remove(sequence)
        sequence.in_prefill = False
        self._residency.release(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.state = FINISHED
        del self._sequences[sequence.seq_id]
        self._num_max_tokens -= sequence.max_tokens

    def _finish(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        self._end(sequence)
        self._pending.append(SequenceOutput(sequence.seq_id, [], reason, error))

    def _register_known_blocks(self, sequence: Sequence) -> None:
        self._residency.register_known_blocks(sequence, self._in_flight[-1] if self._in_flight else None)

    def fail_step(self, step: int, message: str, *, submitted: bool = True) -> list[SequenceOutput]:
        """A step raised: every sequence with a row in it ends with 'error'; those that read their blocks start over.

        `submitted` False: the executor never took the plan, which is the newest; its number is used again.
        """
        planned = next((item for item in self._in_flight if item.step == step), None)
        if planned is None:
            return self.fail_all(message)
        if not submitted:
            self._step = step - 1
            self._residency.unseal(planned)
        failed = {sequence for sequence in planned.sequences if sequence is not None}
        self._discard_content(planned, failed)
        self._in_flight.remove(planned)
        for sequence in failed:
            if not sequence.is_finished:
                self._finish(sequence, "error", message)
        return self.take_outputs()

    def _fail_rows(self, planned: PlannedStep, reasons: dict[int, str]) -> None:
        """End the sequences of failed rows, but not those that failed only because they read another one's blocks."""
        rows = zip(planned.rows, planned.sequences, strict=True)
        failed = {sequence: reasons[row.slot] for row, sequence in rows if sequence and row.slot in reasons}
        writers = {block_id: sequence for sequence, block_id in planned.registered if sequence in failed}
        causes = {
            sequence: reason
            for sequence, reason in failed.items()
            if all(writers.get(block_id, sequence) is sequence for block_id in sequence.block_ids)
        }
        self._discard_content(planned, set(causes))
        for sequence, reason in causes.items():
            if not sequence.is_finished:
                self._finish(sequence, "error", reason)

    def _discard_content(self, planned: PlannedStep, failed: set[Sequence]) -> None:
        """Forget the blocks that `failed` offered since `planned`; whoever shares or copied one starts over."""
        steps = [item for item in self._in_flight if item.step >= planned.step]
        sources = set(failed)
        while True:
            block_ids = set().union(*(item.blocks_written_for(sources) for item in steps))
            readers = {item for item in self._sequences.values() if not block_ids.isdisjoint(item.block_ids)}
            readers.update(*(item.readers_by_copy(block_ids) for item in steps))
            readers = {item for item in readers - sources if not item.is_finished}
            if not readers:
                break
            for sequence in readers:
                for item in steps:
                    item.forget(sequence)
                sequence.num_in_flight = 0
                self._leave(sequence)
                self._wait(sequence)
            sources |= readers
        self.blocks.invalidate(block_ids)

    def fail_all(self, message: str) -> list[SequenceOutput]:
        """After a bug: end every sequence and start with an empty pool; steps in flight yield nothing."""
        for sequence in self._sequences.values():
            sequence.state = FINISHED
            self._pending.append(SequenceOutput(sequence.seq_id, [], "error", message))
        self._residency.reset(self._sequences.values())
        self._sequences.clear()
        self._num_max_tokens = 0
        for queue in (self._waiting, self._waiting_by_size, self._prefilling, self._decoding):
            queue.clear()
        self._parked.clear()
        self._draining.clear()
        for planned in self._in_flight:
            planned.registered.clear()
        return self.take_outputs()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._pending)

    def stats(self) -> EngineStats:
        blocks, num_running = self.blocks, self._residency.num_running
        return EngineStats(
            step=self._step,
            num_running=num_running,
            num_waiting=len(self._sequences) - num_running,
            num_outstanding_tokens=self._num_max_tokens - self._residency.num_computed_tokens,
            num_blocks=blocks.num_blocks,
            num_used_blocks=blocks.num_used,
            num_cached_blocks=blocks.num_cached,
            num_preemptions=self.num_preemptions,
            num_prefix_queried_tokens=blocks.num_queried_tokens,
            num_prefix_hit_tokens=blocks.num_hit_tokens,
            num_prefix_evictions=blocks.num_evictions,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running sequences go on."""
        self.blocks.reset_prefix_cache()

    def check(self) -> None:
        """Verify every invariant; for tests and idle times.

        Raises:
            InternalError: with the first violation found.
        """
        waiting, running = [*self._waiting, *self._parked], [*self._prefilling, *self._decoding, *self._draining]
        if Counter(waiting + running) != Counter(self._sequences.values()):
            raise InternalError("the queues and the table of sequences differ")
        if set(self._waiting) != set(self._waiting_by_size):
            raise InternalError("the two waiting queues differ")
        self._residency.check(running)
        in_flight = Counter(sequence for planned in self._in_flight for sequence in planned.sampled if sequence)
        for sequence in waiting + running:
            if sequence.num_in_flight != in_flight[sequence]:
                raise InternalError(f"sequence {sequence.seq_id}: {sequence.num_in_flight} tokens in flight")
            expected = WAITING if sequence in set(waiting) else RUNNING
            if sequence.state is not expected or (expected is WAITING and sequence.block_ids):
                raise InternalError(f"sequence {sequence.seq_id} is {sequence.state.value} in the wrong queue")
