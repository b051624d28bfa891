# SPDX-License-Identifier: Apache-2.0
"""Dynamic SplitFuse: which tokens of which sequences the next step computes.

Events in (`add`, `cancel`, `complete`, `retry`), a `StepPlan` out of `plan`; no I/O, no clock, no threads. `plan` may
run before the results of earlier steps are known. Knows token ids and block ids, never tensors or text.

Policy. Decodes go first; the rest of the token budget is filled with prompt chunks (`prompt_planner`). Age is arrival,
moved by priority. A started prompt has the blocks for its remainder set aside. When a decode finds no free block, the
newest and least urgent running sequence is preempted, so that the oldest one always goes on. A sequence that grows
past the border behind which the model rotates every position differently is preempted, too, and computed again.
A sequence with a grammar is in a plan only when the mask for its next token is known (`take_mask`); from the moment
that the token is planned until the mask behind it has come it waits, and nobody waits for it.
What happens after steps and rows that failed is in `recovery`; tokens that were reported stay as they are.

Invariants (see `check`): every block and slot has the owners that the tables say; free blocks cover what is set aside;
rows never exceed the budget; each sequence ends with exactly one finish_reason and no token is reported twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from mii_zmq.errors import InternalError, InvalidRequest, MiiError
from mii_zmq.worker.plan import (
    EngineLimits,
    EngineStats,
    SequenceOutput,
    SequenceRequest,
    StepPlan,
    StepResult,
    StepRow,
)
from mii_zmq.worker.prompt_planner import AGEING_S, PromptPlanner
from mii_zmq.worker.queues import Queues
from mii_zmq.worker.recovery import Recovery
from mii_zmq.worker.residency import Residency
from mii_zmq.worker.sequence import PlannedStep, Sequence, SequenceState, make_sequence

WAITING, RUNNING, FINISHED = SequenceState.WAITING, SequenceState.RUNNING, SequenceState.FINISHED


class Scheduler:
    """The sequences of one engine. Not thread-safe; results are completed in step order."""

    def __init__(
        self, limits: EngineLimits, *, model: str = "", prefix_cache: bool = True, ageing_s: float = AGEING_S
    ) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self._now = 0.0
        """When the newest step was planned."""
        self._step = 0
        self._number = 0
        self._sequences: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._in_flight: deque[PlannedStep] = deque()
        self._pending: list[SequenceOutput] = []
        self._grammar_changes: list[tuple[int, int | None]] = []
        self._num_max_tokens = 0
        """Sum of `max_tokens` over unfinished sequences."""
        self._queues = Queues()
        self._residency = Residency(limits, model, prefix_cache)
        self._prompts = PromptPlanner(self._queues, self._residency, ageing_s)
        self.recovery = Recovery(limits, self._queues, self._residency, self._in_flight, self._set_back, self._finish)
        self.blocks = self._residency.blocks

    def add(self, request: SequenceRequest, now: float) -> None:
        """Take a sequence.

        Raises:
            PromptTooLong, InvalidRequest: it can never run; nothing was kept.
        """
        if request.seq_id in self._sequences:
            raise InvalidRequest(f"sequence id {request.seq_id} is in use; choose another", param="seq_id")
        sequence = make_sequence(request, self.limits, now, self._number)
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

    def take_mask(self, seq_id: int, num_output_tokens: int, mask: bytes | None) -> None:
        """What the token behind so many output tokens may be; None: the grammar allows no more, so 'stop' is due.

        A mask that answers anything but the sequence's present state is ignored.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is None or not sequence.lacks_mask or sequence.num_output_tokens != num_output_tokens:
            return
        if mask is None:
            self._finish(sequence, "stop")
            return
        sequence.mask = mask
        if sequence.state is RUNNING:
            self._queues.end_await(sequence)
        else:
            self._queues.unmasked.remove(sequence)
            self._queue(sequence)

    def fail(self, seq_id: int, error: MiiError) -> None:
        """End a sequence with finish_reason 'error'; unknown and finished ids are ignored."""
        if sequence := self._sequences.get(seq_id):
            self._finish(sequence, "error", error)

    def take_grammar_changes(self) -> list[tuple[int, int | None]]:
        """Of sequences with a grammar, in order: (seq_id, its newest token), which asks for the mask behind it, and
        (seq_id, None) where the sequence has ended."""
        changes, self._grammar_changes = self._grammar_changes, []
        return changes

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
            self.recovery.fail_rows(planned, result.failed, self._now)
        self._in_flight.popleft()
        planned.take_scores(result.scores)
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
                self._note_first_output(sequence, output)
            reason = None
            if token_id in sequence.stop_token_ids or len(token_ids) >= sequence.max_tokens:
                reason = sequence.finish_reason()
            if reason is None and sequence.has_grammar:
                self._ask_mask(sequence)
            if reason is not None:
                self._register_known_blocks(sequence)
                self._end(sequence)
                output.finish_reason = reason
                output.timing = sequence.timing
            elif sequence.state is WAITING:
                self._unpark(sequence)
            elif len(token_ids) % size <= 1:
                # A block can be offered once its last token is known and that token's KV is planned: this result
                # completes both under the overlapped loop, the next one does without overlap.
                self._register_known_blocks(sequence)
        if result.logprobs:
            planned.give_logprobs(result.logprobs, outputs)
        self._end_pooled(planned, result)
        self.recovery.note_good_step(planned)
        return self.take_outputs()

    def _end_pooled(self, planned: PlannedStep, result: StepResult) -> None:
        for sequence, vector in planned.take_pooled(result.pooled):
            if sequence.is_finished:
                continue
            self.recovery.numeric_streak.succeeded()
            self._register_known_blocks(sequence)
            self._end(sequence)
            output = SequenceOutput(sequence.seq_id, [], "stop", pooled=vector)
            output.num_cached_tokens = sequence.num_cached_tokens
            output.timing = sequence.timing
            self._pending.append(output)

    def _note_first_output(self, sequence: Sequence, output: SequenceOutput) -> None:
        sequence.has_emitted = True
        self.recovery.numeric_streak.succeeded()
        output.num_cached_tokens = sequence.num_cached_tokens
        output.prompt_scores = sequence.prompt_scores
        output.timing = sequence.timing

    def _unpark(self, sequence: Sequence) -> None:
        if not sequence.num_in_flight:
            self._queues.parked.remove(sequence)
            self._queue(sequence)

    def _ask_mask(self, sequence: Sequence) -> None:
        sequence.mask = None
        self._grammar_changes.append((sequence.seq_id, sequence.token_ids[-1]))

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now (see `take_outputs` for expired sequences)."""
        self._now = now
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heappop(self._deadlines)[2]
            if not sequence.is_finished:
                self._finish(sequence, "deadline")
        if not self.recovery.may_plan():
            return None
        planned = PlannedStep(self._step + 1)
        self._plan_decodes(planned)
        num_decodes = len(planned.rows)
        planned.sampled = list(planned.sequences)
        self._prompts.plan(planned, self.recovery.token_budget - num_decodes, now)
        if not planned.rows:
            return None
        for sequence in planned.new_sequences:
            sequence.started_at = sequence.started_at or now
        chunks = zip(planned.rows[num_decodes:], planned.sequences[num_decodes:], strict=True)
        planned.sampled += [sequence for row, sequence in chunks if row.sample]
        self._step += 1
        self._in_flight.append(planned)
        self._residency.seal(planned)
        return planned.to_plan()

    def _plan_decodes(self, planned: PlannedStep) -> None:
        size, add_row, add_sequence = self.limits.block_size, planned.rows.append, planned.sequences.append
        ended, masked = [], []
        for sequence in tuple(self._queues.decoding):
            if sequence.state is not RUNNING:
                continue
            position = sequence.num_computed_tokens
            if position == sequence.recompute_at:
                self._preempt(sequence)
                continue
            new_block_ids: list[int] = []
            if position % size == 0:
                if not self._make_room(sequence):
                    continue
                new_block_ids.append(self._residency.allocate_for_decode(sequence))
            add_row(StepRow(sequence.slot, position, 1, True, new_block_ids))
            add_sequence(sequence)
            sequence.num_computed_tokens = position + 1
            sequence.num_in_flight += 1
            if sequence.mask is not None:
                planned.masks[sequence.slot] = sequence.mask
            if position + 2 >= sequence.max_tokens:
                ended.append(sequence)
            elif sequence.has_grammar:
                masked.append(sequence)
        self._residency.num_computed_tokens += len(planned.rows)
        for sequence in ended:
            self._queues.drain(sequence)
        for sequence in masked:
            self._queues.await_mask(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """See to a free block for a decode, by preemption if need be. False: the sequence sits this step out.

        Decodes are planned oldest first, so a victim never has a row in the plan yet.
        """
        queues = self._queues
        while not self._residency.has_free_block:
            if queues.draining:
                return False  # their blocks come back with the next result, which is cheaper than a recompute
            victim = queues.newest_running
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._register_known_blocks(sequence)
        self._set_back(sequence)

    def _queue(self, sequence: Sequence) -> None:
        sequence.num_expected_tokens = self._residency.estimate(sequence)
        self._queues.wait(sequence)

    def _set_back(self, sequence: Sequence) -> None:
        """A sequence waits to be computed again from all its known tokens."""
        self._leave(sequence)
        sequence.state = WAITING
        sequence.has_run = True
        sequence.num_setbacks += 1
        if sequence.num_in_flight:
            self._queues.parked.add(sequence)
        else:
            self._queue(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Out of every queue; slot and blocks come back."""
        self._queues.remove(sequence)
        if sequence.state is RUNNING:
            self._residency.release(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.state = FINISHED
        del self._sequences[sequence.seq_id]
        self._num_max_tokens -= sequence.max_tokens
        if sequence.has_grammar:
            self._grammar_changes.append((sequence.seq_id, None))

    def _finish(self, sequence: Sequence, reason: str, error: MiiError | None = None) -> None:
        self._end(sequence)
        self._pending.append(SequenceOutput(sequence.seq_id, [], reason, error, timing=sequence.timing))

    def _register_known_blocks(self, sequence: Sequence) -> None:
        self._residency.register_known_blocks(sequence, self._in_flight[-1] if self._in_flight else None)

    def retry(self, step: int, last_taken: int, message: str, *, is_memory: bool) -> bool:
        """A step raised: compute its sequences again, in smaller steps if memory ran out, else apart from each other.

        `last_taken`: the newest step that the executor took; the failed one may be newer. Returns whether the next step
        has a better chance because it is smaller.
        """
        self._step = last_taken
        if is_memory:
            return self.recovery.retry_smaller(step, last_taken, message)
        self.recovery.retry_apart(step, last_taken, message)
        return False

    def fail_all(self, message: str, last_read: int = 0) -> list[SequenceOutput]:
        """After a bug: end every sequence and start with an empty pool; steps in flight yield nothing, and those up to
        `last_read` are over."""
        for sequence in self._sequences.values():
            sequence.state = FINISHED
            self._pending.append(SequenceOutput(sequence.seq_id, [], "error", InternalError(message)))
            if sequence.has_grammar:
                self._grammar_changes.append((sequence.seq_id, None))
        self.recovery.reset()
        self._residency.reset(self._sequences.values())
        self._sequences.clear()
        self._num_max_tokens = 0
        self._queues.clear()
        while self._in_flight and self._in_flight[0].step <= last_read:
            self._in_flight.popleft()
        for planned in self._in_flight:
            planned.registered.clear()
        return self.take_outputs()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._pending)

    @property
    def awaits_masks(self) -> bool:
        """Some sequences cannot be planned before their masks are known."""
        return bool(self._queues.unmasked or self._queues.awaiting)

    @property
    def next_deadline(self) -> float | None:
        """When `plan` has to end a sequence, at the earliest."""
        while self._deadlines and self._deadlines[0][2].is_finished:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

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
            num_failed_steps=self.recovery.num_failed_steps,
            num_numeric_errors=self.recovery.num_numeric_errors,
            token_budget=self.recovery.token_budget,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running sequences go on."""
        self.blocks.reset_prefix_cache()

    def check(self) -> None:
        """Verify every invariant; for tests and idle times.

        Raises:
            InternalError: with the first violation found.
        """
        self._queues.check(self._sequences.values())
        self._residency.check(self._queues.running)
        in_flight = Counter(sequence for planned in self._in_flight for sequence in planned.sampled if sequence)
        for sequence in self._sequences.values():
            if sequence.num_in_flight != in_flight[sequence]:
                raise InternalError(f"sequence {sequence.seq_id}: {sequence.num_in_flight} tokens in flight")
