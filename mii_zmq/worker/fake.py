# SPDX-License-Identifier: Apache-2.0
"""A deterministic executor without a model, for tests and benchmarks of everything around one.

The next token is a pure function of a sequence's tokens so far, whatever the batch, the chunks or preemptions. The
executor is also the strictest reader of step plans: it keeps slots and block tables as a real one does, stores in each
KV cell the hash of all tokens up to it and of the rotary lengths they were computed under, and raises `PlanViolation`
when a plan would read or overwrite something wrong.
Content written by a failed step counts as poisoned, as do numbers that are not finite: whoever reads it fails too, and
where a failed row had such numbers in a block, the block must be zeroed before anybody else gets it.

What a test makes go wrong is in `fake_faults`, and how to ask for it in a model's name in `fake_options`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from mii_zmq.errors import InternalError
from mii_zmq.worker.fake_faults import Faults, Hook
from mii_zmq.worker.fake_model import FakeModel, extend_hash, pooled_bytes
from mii_zmq.worker.plan import (
    NOT_FINITE,
    EngineLimits,
    NewSequence,
    SamplingSpec,
    StepPlan,
    StepResult,
    StepRow,
    TokenLogprobs,
)

POISON = -1
"""Content of a cell that a failed step wrote."""
NAN = -2
"""Content of a cell that holds no finite number."""


class PlanViolation(InternalError):
    """A step plan that a real executor would silently compute nonsense from."""


@dataclass(slots=True, eq=False)
class _Slot:
    num_prompt_tokens: int
    sampling: SamplingSpec
    token_ids: list[int]
    """Those that it began with."""
    block_ids: list[int]
    num_tokens: int
    hashes: list[int]
    """`hashes[p]`: of the tokens up to and with position p."""
    contents: list[int]
    """`contents[p]`: what the KV cell of position p must hold; the list `hashes` for a model without a border."""
    fixed_rope_length: int
    hooks: dict[Hook, int]
    """What goes wrong with it, and from how many output tokens on."""
    num_computed: int = 0
    states: list[list[float]] = field(default_factory=list)
    """Of a prompt that is pooled: all hidden states, made with its first row."""
    num_pooled: int = 0
    """Of them, those that rows have computed."""

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


class FakePendingStep:
    """A step that is ready at `due`."""

    def __init__(self, result: StepResult | Exception, due: float, executor: FakeExecutor) -> None:
        self.spoiled: list[tuple[int, _Slot]] = []
        """Slots of failed rows, and what was in them."""
        self._result = result
        self._due = due
        self._executor = executor

    def done(self) -> bool:
        return self._executor.clock() >= self._due

    def result(self) -> StepResult:
        self._executor.wait_until(self, self._due)
        self._executor.note_spoiled(self.spoiled)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class FakeExecutor:
    """Executes step plans on token hashes. A step takes `step_ms`, and `prefill_ms` for each token of rows with more
    than one, and starts when the one before has ended."""

    def __init__(
        self,
        limits: EngineLimits,
        model: FakeModel | None = None,
        *,
        step_ms: float = 0.0,
        prefill_ms: float = 0.0,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits
        self.model = model or FakeModel()
        self.step_ms = step_ms
        self.prefill_ms = prefill_ms
        self.faults = faults or Faults()
        self.clock = clock
        self.violations: list[str] = []
        """Every violation found, because the engine survives the exception."""
        self._sleep = sleep
        self._step = 0
        self._due = 0.0
        self._unread: deque[FakePendingStep] = deque()
        self._slots: dict[int, _Slot] = {}
        self._measured: set[int] = set()
        """Slots that want to know how probable their tokens are."""
        self._cells: dict[int, list[int | None]] = {}
        self._holders: list[set[int]] = [set() for _ in range(limits.num_blocks)]
        self._to_zero: set[int] = set()
        self._is_closed = False

    def submit(self, plan: StepPlan) -> FakePendingStep:
        """Run the plan at once; its result can be read when its time has passed.

        Raises:
            PlanViolation: the plan is wrong.
        """
        fault = self.faults.submit.pop(plan.step, None)
        if fault is not None:
            raise fault
        self._require(not self._is_closed, "the executor is closed")
        self._require(plan.step == self._step + 1, f"step {plan.step} follows step {self._step}")
        self._step = plan.step
        result = self._run(plan)
        num_prefilled = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1) if self.prefill_ms else 0
        self._due = max(self._due, self.clock()) + (self.step_ms + num_prefilled * self.prefill_ms) / 1000
        if self.faults.hangs:
            self._due = float("inf")
        pending = FakePendingStep(result, self._due, self)
        if isinstance(result, StepResult):
            pending.spoiled = [(slot, self._slots[slot]) for slot in result.failed]
        self._unread.append(pending)
        return pending

    def wait_until(self, pending: FakePendingStep, due: float) -> None:
        """Block until a step is done; results are read in submission order."""
        self._require(bool(self._unread) and self._unread[0] is pending, "results are read out of order")
        self._unread.popleft()
        is_timed = bool(self.step_ms or self.prefill_ms or self.faults.hangs)
        while is_timed and (remaining := due - self.clock()) > 0:
            self._sleep(min(remaining, 1.0))

    def note_spoiled(self, spoiled: list[tuple[int, _Slot]]) -> None:
        """It is known from now on that these slots hold numbers that are not finite."""
        for number, slot in spoiled:
            if self._slots.get(number) is slot:
                self._to_zero.update(block_id for block_id in slot.block_ids if NAN in self._cells.get(block_id, ()))

    def close(self) -> None:
        self._is_closed = True
        self._slots.clear()

    @property
    def num_held_slots(self) -> int:
        return len(self._slots)

    def _run(self, plan: StepPlan) -> StepResult | Exception:
        self._require(0 < plan.num_tokens <= self.limits.token_budget, f"a step of {plan.num_tokens} tokens")
        for slot in plan.freed_slots:
            self._free(slot)
        for block_id in plan.zeroed:
            self._require(not self._holders[block_id], f"block {block_id} is zeroed while held")
            self._cells.pop(block_id, None)
            self._to_zero.discard(block_id)
        for source, destination in plan.copies:
            self._copy(source, destination)
        for new in plan.new:
            self._add(new)
        new_slots = {new.slot for new in plan.new}
        self._require(len({row.slot for row in plan.rows}) == len(plan.rows), "a slot has two rows")
        self._require(new_slots <= {row.slot for row in plan.rows}, "a new sequence has no row")
        for row in plan.rows:
            self._attach(row, row.slot in new_slots)
        sampled = {row.slot for row in plan.rows if row.sample}
        self._require(plan.masks.keys() <= sampled, f"masks for slots {sorted(plan.masks.keys() - sampled)}")
        hooks = {row.slot: self._due_hooks(row) for row in plan.rows} if self.faults.markers else {}
        fault = self.faults.of_step(plan.step, plan.num_tokens, set().union(*hooks.values()))
        void = self.faults.rows.pop(plan.step, {})
        failed = {row.slot: void[row.slot] for row in plan.rows if row.slot in void}
        writers: dict[int, int] = {}
        for row in plan.rows:
            is_spoiled = row.slot in failed or Hook.NAN in hooks.get(row.slot, ())
            self._write(row, writers, NAN if is_spoiled else POISON if fault else None)
        token_ids: list[int] = []
        for row in plan.rows:
            wrong = self._read(row)
            if wrong is not None:
                self._spoil(row, wrong)
                if row.sample or row.pool:
                    failed.setdefault(row.slot, NOT_FINITE)
            if row.sample:
                token_ids.append(self._draw(row, plan.masks.get(row.slot)))
        scores, logprobs, pooled = self._scores(plan), self._logprobs(plan, token_ids), self._pooled(plan)
        return fault or StepResult(plan.step, token_ids, failed, scores, logprobs, pooled)

    def _scores(self, plan: StepPlan) -> dict[int, list[TokenLogprobs]]:
        scores = {}
        for row in plan.rows:
            if row.score:
                slot = self._slots[row.slot]
                end = row.start + row.num_tokens + (not row.sample)
                width = slot.sampling.num_prompt_logprobs
                scores[row.slot] = [self.model.logprobs(i, width) for i in slot.token_ids[row.start + 1 : end]]
        return scores

    def _pooled(self, plan: StepPlan) -> dict[int, bytes]:
        pooled = {}
        for row in plan.rows:
            slot = self._slots[row.slot]
            pooling, end = slot.sampling.pooling, row.start + row.num_tokens
            if not pooling:
                continue
            slot.states = slot.states or self.model.hidden_states(slot.token_ids, self.limits.hidden_size)
            slot.num_pooled += row.num_tokens
            if row.pool:
                is_whole = slot.num_pooled == end
                self._require(is_whole or pooling == "last", f"slot {row.slot} is pooled without all of its tokens")
                pooled[row.slot] = pooled_bytes(slot.states, pooling)
        return pooled

    def _logprobs(self, plan: StepPlan, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        if not self._measured:
            return {}
        logprobs = {}
        for slot, token_id in zip((row.slot for row in plan.rows if row.sample), token_ids, strict=True):
            num_top = self._slots[slot].sampling.num_logprobs
            if num_top is not None:
                logprobs[slot] = self.model.logprobs(token_id, num_top)
        return logprobs

    def _due_hooks(self, row: StepRow) -> set[Hook]:
        slot = self._slots[row.slot]
        return {hook for hook, after in slot.hooks.items() if slot.num_output_tokens >= after}

    def _free(self, slot: int) -> None:
        self._require(slot in self._slots, f"slot {slot} is freed but not held")
        self._measured.discard(slot)
        for block_id in self._slots.pop(slot).block_ids:
            self._holders[block_id].discard(slot)

    def _copy(self, source: int, destination: int) -> None:
        self._require(source in self._cells, f"block {source} is copied but was never written")
        self._require(not self._holders[destination], f"a copy overwrites block {destination}, which is held")
        self._cells[destination] = list(self._cells[source])

    def _add(self, new: NewSequence) -> None:
        self._require(0 <= new.slot < self.limits.max_sequences, f"slot {new.slot} does not exist")
        self._require(new.slot not in self._slots, f"slot {new.slot} is given away while held")
        self._require(0 < new.num_prompt_tokens <= len(new.token_ids), f"slot {new.slot}: impossible prompt length")
        hashes = list(accumulate(new.token_ids, extend_hash, initial=0))[1:]
        fixed = new.fixed_rope_length(self.limits.recomputes_at_border)
        contents = hashes if self.limits.rope_border is None else []
        hooks = self.faults.hooks_for(new.token_ids[: new.num_prompt_tokens])
        slot = _Slot(
            new.num_prompt_tokens, new.sampling, new.token_ids, [], len(hashes), hashes, contents, fixed, hooks
        )
        for position in range(len(contents), len(hashes)):
            contents.append(self._content(slot, position))
        self._slots[new.slot] = slot
        if new.sampling.num_logprobs is not None:
            self._measured.add(new.slot)
        self._append_blocks(new.slot, new.block_ids)

    def _content(self, slot: _Slot, position: int) -> int:
        """Depends on how every token so far is rotated, as keys and values of a real model do."""
        border = self.limits.rope_border or 0
        length = max(slot.fixed_rope_length, position + 1)
        if length <= border:
            length = 0
        elif self.limits.recomputes_at_border:
            length = 1
        before = slot.contents[position - 1] if position else 0
        return extend_hash(extend_hash(before, slot.hashes[position]), length)

    def _append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        table = self._slots[slot].block_ids
        for block_id in block_ids:
            self._require(0 <= block_id < self.limits.num_blocks, f"block {block_id} does not exist")
            self._require(slot not in self._holders[block_id], f"slot {slot} lists block {block_id} twice")
            self._require(block_id not in self._to_zero, f"slot {slot} gets block {block_id}, which was not zeroed")
            self._holders[block_id].add(slot)
            table.append(block_id)

    def _attach(self, row: StepRow, is_new: bool) -> None:
        """Check the row against its slot and append its blocks."""
        slot = self._slots.get(row.slot)
        if slot is None:
            raise self._violation(f"slot {row.slot} has a row but no sequence")
        if row.new_block_ids:
            self._require(not is_new, f"slot {row.slot} is new and gets its blocks twice")
            self._append_blocks(row.slot, row.new_block_ids)
        size, end = self.limits.block_size, row.start + row.num_tokens
        ends, is_pooled = end == slot.num_tokens, bool(slot.sampling.pooling)
        problem = None
        if row.start != slot.num_computed and not (
            row.start > slot.num_computed and (is_new or slot.num_computed % size == row.start % size == 0)
        ):
            problem = f"starts at {row.start} but has computed {slot.num_computed}"
        elif row.num_tokens < 1 or end > slot.num_tokens:
            problem = f"computes tokens {row.start} to {end - 1} of {slot.num_tokens}"
        elif (row.sample, row.pool) != (ends and not is_pooled, ends and is_pooled):
            problem = f"has sample {row.sample} and pool {row.pool} at {end} of {slot.num_tokens} tokens"
        elif end > len(slot.block_ids) * size:
            problem = f"has no block for position {end - 1}"
        elif slot.num_tokens >= self.limits.max_model_len + is_pooled:
            problem = f"grows past the model's length of {self.limits.max_model_len}"
        elif self.limits.recomputes_at_border and slot.fixed_rope_length <= (self.limits.rope_border or 0) < end:
            problem = f"computes position {end - 1} on top of keys rotated for at most {self.limits.rope_border}"
        if problem:
            raise self._violation(f"slot {row.slot} {problem}")

    def _write(self, row: StepRow, writers: dict[int, int], wrong: int | None) -> None:
        """Write the row's cells, with `wrong` if that is set. Whoever holds such a block too must not have got that far
        in earlier steps."""
        slot, size = self._slots[row.slot], self.limits.block_size
        position, end = row.start, row.start + row.num_tokens
        while position < end:
            index, offset = divmod(position, size)
            stop = min(end, (index + 1) * size)
            block_id = slot.block_ids[index]
            if len(self._holders[block_id]) > 1:
                self._check_other_holders(row.slot, block_id, offset)
            if writers.setdefault(block_id, row.slot) != row.slot:
                raise self._violation(f"two rows write block {block_id}")
            cells = self._cells.get(block_id)
            if cells is None:
                cells = self._cells[block_id] = [None] * size
            length = stop - position
            cells[offset : offset + length] = slot.contents[position:stop] if wrong is None else [wrong] * length
            position = stop

    def _check_other_holders(self, writer: int, block_id: int, offset: int) -> None:
        for holder in self._holders[block_id]:
            other = self._slots[holder]
            if holder != writer:
                position = other.block_ids.index(block_id) * self.limits.block_size + offset
                self._require(
                    other.num_computed <= position, f"slot {writer} writes block {block_id}, in use by slot {holder}"
                )

    def _read(self, row: StepRow) -> int | None:
        """Attend: all cells up to the row's end must hold this sequence. Returns what spoils them, if something does.

        What earlier steps have checked stays right, since nobody else may write there; only the rest is compared.
        """
        slot, size = self._slots[row.slot], self.limits.block_size
        end = row.start + row.num_tokens
        first, last = slot.num_computed // size, (end - 1) // size
        wrong = None
        for index in range(first, last + 1):
            start, stop = index * size, min(end, (index + 1) * size)
            found = self._cells.get(slot.block_ids[index], [])[: stop - start]
            if NAN in found or POISON in found:
                wrong = NAN if NAN in found else wrong or POISON
            elif found != slot.contents[start:stop]:
                raise self._violation(f"slot {row.slot} reads another sequence's KV at positions {start} to {stop - 1}")
        slot.num_computed = end
        return wrong

    def _spoil(self, row: StepRow, wrong: int) -> None:
        slot, size = self._slots[row.slot], self.limits.block_size
        for position in range(row.start, row.start + row.num_tokens):
            self._cells[slot.block_ids[position // size]][position % size] = wrong

    def _draw(self, row: StepRow, mask: bytes | None) -> int:
        slot = self._slots[row.slot]
        self._require((mask is not None) == slot.sampling.is_masked, f"slot {row.slot} samples with mask {mask!r}")
        token_id = self.model.next_token(slot.hashes[-1], slot.num_output_tokens, slot.sampling, mask)
        slot.hashes.append(extend_hash(slot.hashes[-1], token_id))
        if slot.contents is not slot.hashes:
            slot.contents.append(self._content(slot, slot.num_tokens))
        slot.num_tokens += 1
        return token_id

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise self._violation(message)

    def _violation(self, message: str) -> PlanViolation:
        self.violations.append(f"step {self._step}: {message}")
        return PlanViolation(self.violations[-1])
