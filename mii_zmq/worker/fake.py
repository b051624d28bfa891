# SPDX-License-Identifier: Apache-2.0
"""A deterministic executor without a model, for tests and benchmarks of everything around one.

The next token is a pure function of a sequence's tokens so far, whatever the batch, the chunks or preemptions. The
executor is also the strictest reader of step plans: it keeps slots and block tables as a real one does, stores in each
KV cell the hash of all tokens up to it, and raises `PlanViolation` when a plan would read or overwrite something wrong.
Content written by a failed step counts as poisoned: whoever reads it fails too, as with non-finite values.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError, InternalError
from mii_zmq.worker.fake_model import ALPHABETS, EOS_TOKEN_ID, VOCAB_SIZE, FakeModel, extend_hash
from mii_zmq.worker.plan import EngineLimits, NewSequence, SamplingSpec, StepPlan, StepResult, StepRow

POISON = -1
"""Content of a cell that a failed step wrote."""


class PlanViolation(InternalError):
    """A step plan that a real executor would silently compute nonsense from."""


@dataclass(slots=True)
class Faults:
    """What a test makes go wrong, by step number."""

    submit: dict[int, Exception] = field(default_factory=dict)
    """`submit` raises once, and has applied nothing."""
    steps: dict[int, Exception] = field(default_factory=dict)
    """The step's `result` raises."""
    rows: dict[int, dict[int, str]] = field(default_factory=dict)
    """Slot -> reason, for rows whose result is void."""


@dataclass(slots=True)
class _Slot:
    num_prompt_tokens: int
    sampling: SamplingSpec
    block_ids: list[int]
    num_tokens: int
    hashes: list[int]
    """`hashes[p]`: of the tokens up to and with position p."""
    num_computed: int = 0


class FakePendingStep:
    """A step that is ready at `due`."""

    def __init__(self, result: StepResult | Exception, due: float, executor: FakeExecutor) -> None:
        self._result = result
        self._due = due
        self._executor = executor

    def done(self) -> bool:
        return self._executor.clock() >= self._due

    def result(self) -> StepResult:
        self._executor.wait_until(self, self._due)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class FakeExecutor:
    """Executes step plans on token hashes. A step takes `step_ms` and starts when the one before has ended."""

    def __init__(
        self,
        limits: EngineLimits,
        model: FakeModel | None = None,
        *,
        step_ms: float = 0.0,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits
        self.model = model or FakeModel()
        self.step_ms = step_ms
        self.faults = faults or Faults()
        self.clock = clock
        self.violations: list[str] = []
        """Every violation found, because the engine survives the exception."""
        self._sleep = sleep
        self._step = 0
        self._due = 0.0
        self._unread: deque[FakePendingStep] = deque()
        self._slots: dict[int, _Slot] = {}
        self._cells: dict[int, list[int | None]] = {}
        self._holders: list[set[int]] = [set() for _ in range(limits.num_blocks)]
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
        self._due = max(self._due, self.clock()) + self.step_ms / 1000
        pending = FakePendingStep(result, self._due, self)
        self._unread.append(pending)
        return pending

    def wait_until(self, pending: FakePendingStep, due: float) -> None:
        """Block until a step is done; results are read in submission order."""
        self._require(bool(self._unread) and self._unread[0] is pending, "results are read out of order")
        self._unread.popleft()
        remaining = due - self.clock() if self.step_ms else 0.0
        if remaining > 0:
            self._sleep(remaining)

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
        for source, destination in plan.copies:
            self._copy(source, destination)
        for new in plan.new:
            self._add(new)
        new_slots = {new.slot for new in plan.new}
        self._require(len({row.slot for row in plan.rows}) == len(plan.rows), "a slot has two rows")
        self._require(new_slots <= {row.slot for row in plan.rows}, "a new sequence has no row")
        for row in plan.rows:
            self._attach(row, row.slot in new_slots)
        fault = self.faults.steps.pop(plan.step, None)
        failed = dict(self.faults.rows.pop(plan.step, {}))
        writers: dict[int, int] = {}
        for row in plan.rows:
            self._write(row, writers, is_poisoned=fault is not None or row.slot in failed)
        token_ids = []
        for row in plan.rows:
            if not self._read(row):
                failed.setdefault(row.slot, "non-finite logits")
                self._poison(row)
            if row.sample:
                token_ids.append(self._draw(row))
        return fault or StepResult(plan.step, token_ids, failed)

    def _free(self, slot: int) -> None:
        self._require(slot in self._slots, f"slot {slot} is freed but not held")
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
        self._slots[new.slot] = _Slot(new.num_prompt_tokens, new.sampling, [], len(hashes), hashes)
        self._append_blocks(new.slot, new.block_ids)

    def _append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        table = self._slots[slot].block_ids
        for block_id in block_ids:
            self._require(0 <= block_id < self.limits.num_blocks, f"block {block_id} does not exist")
            self._require(slot not in self._holders[block_id], f"slot {slot} lists block {block_id} twice")
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
        problem = None
        if row.start != slot.num_computed and not (
            row.start > slot.num_computed and (is_new or slot.num_computed % size == row.start % size == 0)
        ):
            problem = f"starts at {row.start} but has computed {slot.num_computed}"
        elif row.num_tokens < 1 or end > slot.num_tokens:
            problem = f"computes tokens {row.start} to {end - 1} of {slot.num_tokens}"
        elif row.sample != (end == slot.num_tokens):
            problem = f"has sample {row.sample} at {end} of {slot.num_tokens} tokens"
        elif end > len(slot.block_ids) * size:
            problem = f"has no block for position {end - 1}"
        elif slot.num_tokens >= self.limits.max_model_len:
            problem = f"grows past the model's length of {self.limits.max_model_len}"
        if problem:
            raise self._violation(f"slot {row.slot} {problem}")

    def _write(self, row: StepRow, writers: dict[int, int], is_poisoned: bool) -> None:
        """Write the row's cells. Whoever holds such a block too must not have got that far in earlier steps."""
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
            cells[offset : offset + length] = [POISON] * length if is_poisoned else slot.hashes[position:stop]
            position = stop

    def _check_other_holders(self, writer: int, block_id: int, offset: int) -> None:
        for holder in self._holders[block_id]:
            other = self._slots[holder]
            if holder != writer:
                position = other.block_ids.index(block_id) * self.limits.block_size + offset
                self._require(
                    other.num_computed <= position, f"slot {writer} writes block {block_id}, in use by slot {holder}"
                )

    def _read(self, row: StepRow) -> bool:
        """Attend: all cells up to the row's end must hold this sequence. False: one of them is poisoned.

        What earlier steps have checked stays right, since nobody else may write there; only the rest is compared.
        """
        slot, size = self._slots[row.slot], self.limits.block_size
        end = row.start + row.num_tokens
        first, last = slot.num_computed // size, (end - 1) // size
        is_sound = True
        for index in range(first, last + 1):
            start, stop = index * size, min(end, (index + 1) * size)
            found = self._cells.get(slot.block_ids[index], [])[: stop - start]
            if POISON in found:
                is_sound = False
            elif found != slot.hashes[start:stop]:
                raise self._violation(f"slot {row.slot} reads another sequence's KV at positions {start} to {stop - 1}")
        slot.num_computed = end
        return is_sound

    def _poison(self, row: StepRow) -> None:
        slot, size = self._slots[row.slot], self.limits.block_size
        for position in range(row.start, row.start + row.num_tokens):
            self._cells[slot.block_ids[position // size]][position % size] = POISON

    def _draw(self, row: StepRow) -> int:
        slot = self._slots[row.slot]
        num_output_tokens = slot.num_tokens - slot.num_prompt_tokens
        token_id = self.model.next_token(slot.hashes[-1], num_output_tokens, slot.sampling)
        slot.hashes.append(extend_hash(slot.hashes[-1], token_id))
        slot.num_tokens += 1
        return token_id

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise self._violation(message)

    def _violation(self, message: str) -> PlanViolation:
        self.violations.append(f"step {self._step}: {message}")
        return PlanViolation(self.violations[-1])


_LIMIT_OPTIONS = ("max_model_len", "num_blocks", "block_size", "max_sequences", "token_budget")
_OPTIONS = ("vocab", "alphabet", "step_ms", "eos_after", "eos_every", *_LIMIT_OPTIONS)


def is_fake_model(model: str) -> bool:
    return model.startswith("fake:")


def make_fake_executor(config: EngineConfig) -> FakeExecutor:
    """Build from a model name such as 'fake:step_ms=5,num_blocks=64'; options there win over the config's fields.

    Raises:
        ConfigError: unknown option or impossible value.
    """
    options = _parse_options(config.model)
    limits = EngineLimits(
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or 8192,
        num_blocks=config.num_blocks or 4096,
        block_size=config.block_size,
        max_sequences=config.max_sequences,
        token_budget=config.token_budget or 512,
        eos_token_ids=(EOS_TOKEN_ID,),
    )
    for name in _LIMIT_OPTIONS:
        if name in options:
            limits = replace(limits, **{name: _positive(name, options[name])})  # type: ignore[arg-type]
    if limits.block_size & (limits.block_size - 1):
        raise ConfigError(f"option block_size of the fake model is {limits.block_size}; it must be a power of two")
    counts = {name: _positive(name, options[name]) for name in ("eos_after", "eos_every") if name in options}
    model = FakeModel(ALPHABETS[_choice("alphabet", options.get("alphabet", "printable"), ALPHABETS)], **counts)
    _choice("vocab", options.get("vocab", "bytes"), ("bytes",))
    return FakeExecutor(limits, model, step_ms=_milliseconds(options.get("step_ms", "0")))


def _parse_options(model: str) -> dict[str, str]:
    if not is_fake_model(model):
        raise ConfigError(f"{model!r} is not a fake model; such names are 'fake:' and options, as in 'fake:step_ms=5'")
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in model.partition(":")[2].split(","))):
        name, separator, value = part.partition("=")
        if name not in _OPTIONS or not separator:
            raise ConfigError(
                f"option {part!r} of the fake model is unknown; known are {', '.join(_OPTIONS)} as NAME=VALUE"
            )
        if name in options:
            raise ConfigError(f"option {name} of the fake model is given twice")
        options[name] = value
    return options


def _positive(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**31):
        raise ConfigError(f"option {name} of the fake model is {text!r}; it must be a whole number above 0")
    return int(text)


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 60_000:
        raise ConfigError(f"option step_ms of the fake model is {text!r}; it must be 0 to 60000 milliseconds")
    return value


def _choice(name: str, value: str, allowed: dict[str, tuple[int, ...]] | tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigError(f"option {name} of the fake model is {value!r}; it must be one of {', '.join(allowed)}")
    return value
