# SPDX-License-Identifier: Apache-2.0
"""Runs step plans on a model: apply the plan's changes, forward, sample, remember the drawn ids on the device.

`submit` returns at once; one thread runs the steps in order, and torch releases the interpreter lock while it
computes, so the scheduler plans the next step meanwhile. A sequence whose sampling options cannot be applied fails by
itself; any other exception fails its step (`result()` raises it) and leaves the state as the plans say, so that later
plans run. Knows nothing of scheduling: what a plan says is done.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from mii_zmq.errors import InternalError
from mii_zmq.kernels import KvLayer
from mii_zmq.worker.batch import RaggedBatch, ScoredRow, SlotState, build_batch
from mii_zmq.worker.kv_pool import KvPool
from mii_zmq.worker.memory_bill import MemoryBill
from mii_zmq.worker.models.decoder import ForwardBatch
from mii_zmq.worker.plan import (
    NOT_FINITE,
    EngineLimits,
    Executor,
    NewSequence,
    SamplingSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from mii_zmq.worker.pooled_rows import note_poolings
from mii_zmq.worker.pooling import Pooler, to_bytes
from mii_zmq.worker.token_logprobs import LogprobSlots, measure, unpack

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What the executor needs of a model."""

    def forward(self, batch: ForwardBatch, kv_layers: Sequence[KvLayer]) -> Tensor | None: ...

    def forward_hidden(
        self, batch: ForwardBatch, kv_layers: Sequence[KvLayer]
    ) -> tuple[Tensor | None, Tensor | None]: ...


class TokenSampler(Protocol):
    """Logits to token ids, with per-slot state."""

    def install(self, slot: int, spec: SamplingSpec, token_ids: list[int], num_prompt_tokens: int) -> None: ...

    def release(self, slots: list[int]) -> None: ...

    def prepare(self, slots: list[int]) -> dict[int, str]: ...

    def sample(
        self,
        logits: Tensor,
        slots: list[int],
        positions: list[int],
        token_ids: Tensor,
        masks: Mapping[int, bytes] | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class LoadedExecutor(Executor, Protocol):
    """An executor with the bill of its memory."""

    bill: MemoryBill


class ModelExecutor:
    """Implements `plan.Executor`."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        sampler: TokenSampler,
        limits: EngineLimits,
        bill: MemoryBill,
        num_threads: int | None = None,
    ) -> None:
        self.limits = limits
        self.bill = bill
        self._model = model
        self._pool = pool
        self._sampler = sampler
        self._state = SlotState(
            limits.max_sequences, limits.max_model_len, limits.block_size, pool.slab.device, limits.rope_border,
            limits.recomputes_at_border,
        )  # fmt: skip
        self._logprobs = LogprobSlots()
        self._poolings: dict[int, str] = {}
        self._pooler = Pooler()
        self._last_step = 0
        self._void: dict[int, str] = {}
        """Slots whose sampling options cannot be applied, and why: they draw greedily, and nothing counts."""
        self._num_threads = num_threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="executor", initializer=self._start_thread)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue one step. The plan must not change afterwards."""
        return self._thread.submit(self._run, plan)

    def close(self) -> None:
        """Wait for the running step, drop the others, end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _start_thread(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        if plan.step != self._last_step + 1:
            raise InternalError(f"step {plan.step} follows step {self._last_step}; a plan was lost or sent twice")
        self._last_step = plan.step
        self._apply(plan)
        if not plan.rows:
            return StepResult(plan.step, [])
        batch = build_batch(plan, self._state, self._poolings)
        if not batch.pooled:
            return self._draw(plan, batch, self._model.forward(batch.forward, self._pool.layers))
        logits, hidden = self._model.forward_hidden(batch.forward, self._pool.layers)
        result = self._draw(plan, batch, logits)
        slots, vectors = self._pooler.add(hidden, batch.pooled)
        if vectors is not None:
            result.pooled, failed = to_bytes(slots, vectors.cpu().numpy())
            result.failed |= failed
        return result

    def _draw(self, plan: StepPlan, batch: RaggedBatch, logits: Tensor | None) -> StepResult:
        if logits is None:
            return StepResult(plan.step, [])
        logits = logits.float()
        scores = {row.slot: self._score(row, logits) for row in batch.scored}
        if batch.sample_logits is not None:
            logits = logits[batch.sample_logits]
        result = self._sample(plan, batch, logits) if batch.sample_slots else StepResult(plan.step, [])
        result.scores = scores
        for row in plan.rows:
            if row.slot in self._void:
                result.failed[row.slot] = self._void[row.slot]
        return result

    def _score(self, row: ScoredRow, logits: Tensor) -> list[TokenLogprobs]:
        if not row.count:
            return []
        wanted = logits[row.first_logit : row.first_logit + row.count]
        following = self._state.token_ids[row.slot, row.start + 1 : row.start + 1 + row.count]
        width = self._logprobs.prompt_width(row.slot)
        return unpack(measure(wanted, following, width).cpu().numpy(), [width] * row.count)

    def _apply(self, plan: StepPlan) -> None:
        # The tables first: they must match the scheduler's even if a later part of this step fails.
        self._state.apply(plan)
        self._pool.zero_blocks(plan.zeroed)
        self._pool.copy_blocks(plan.copies)
        self._sampler.release(plan.freed_slots)
        self._logprobs.release(plan.freed_slots)
        for slot in plan.freed_slots:
            self._void.pop(slot, None)
        note_poolings(self._poolings, plan.freed_slots, plan.new)
        self._pooler.release(plan.freed_slots)
        for new in plan.new:
            self._install(new)
        self._pool.zero_blocks(self._state.begun_blocks(plan.rows))

    def _install(self, new: NewSequence) -> None:
        self._void.pop(new.slot, None)
        self._logprobs.install(new.slot, new.sampling)
        try:
            self._sampler.install(new.slot, new.sampling, new.token_ids, new.num_prompt_tokens)
        except Exception as error:
            logger.exception("the sampling options of slot %d cannot be applied; its sequence ends", new.slot)
            self._make_void(new.slot, f"the sampling options cannot be applied: {type(error).__name__}: {error}")

    def _make_void(self, slot: int, reason: str) -> None:
        self._void[slot] = reason
        self._sampler.install(slot, SamplingSpec(), [0], 1)

    def _sample(self, plan: StepPlan, batch: RaggedBatch, logits: Tensor) -> StepResult:
        slots, positions = batch.sample_slots, batch.sample_positions
        for slot, reason in self._sampler.prepare(slots).items():
            self._make_void(slot, reason)
        measured = self._logprobs.rows(slots)
        # A copy: the sampler edits the logits in place.
        raw = logits[list(measured)] if measured else None
        drawn, is_finite = self._sampler.sample(logits, slots, positions, self._state.token_ids, plan.masks)
        self._state.record(slots, positions, drawn)
        token_ids, finite = drawn.tolist(), is_finite.tolist()
        failed = {slot: NOT_FINITE for slot, is_fine in zip(slots, finite, strict=True) if not is_fine}
        result = StepResult(plan.step, [token_ids[index] for index in batch.plan_order], failed)
        if raw is not None:
            widths = list(measured.values())
            packed = measure(raw, drawn[list(measured)], max(widths)).cpu().numpy()
            result.logprobs = dict(zip((slots[row] for row in measured), unpack(packed, widths), strict=True))
        return result
