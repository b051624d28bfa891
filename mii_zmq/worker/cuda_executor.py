# SPDX-License-Identifier: Apache-2.0
"""Runs step plans on one GPU: one copy in, the trunk's graph, the head's graph, one copy out, no waiting in between.

`submit` packs the plan, queues everything on one CUDA stream and returns; drawn ids go into the slots' histories on
the device, where the next step finds them, and reach the host through a ring of pinned buffers when `result` waits for
the step's event. A sequence whose sampling options cannot be applied fails by itself, any other exception fails its
step. Knows nothing of scheduling: what a plan says is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from mii_zmq.errors import InternalError
from mii_zmq.kernels.triton.updates import TILE as UPDATE_TILE
from mii_zmq.kernels.triton.updates import apply_updates_kernel, copy_blocks_kernel
from mii_zmq.worker.cuda_batch import (
    Bucket,
    PackedLayout,
    PackedStep,
    StepPacker,
    choose_bucket,
    decode_bucket,
    decode_buckets,
    row_bucket,
)
from mii_zmq.worker.cuda_graphs import GraphCache
from mii_zmq.worker.cuda_listed_tokens import ListedTokens, upload
from mii_zmq.worker.cuda_logprobs import CudaLogprobs, PendingLogprobs, PendingScores
from mii_zmq.worker.cuda_pooling import CudaPooling, PendingVectors
from mii_zmq.worker.cuda_sampler import CudaSampler
from mii_zmq.worker.cuda_sampling_slots import SamplingVariant
from mii_zmq.worker.kv_pool import KvPool
from mii_zmq.worker.memory_bill import MemoryBill
from mii_zmq.worker.models.cuda_buffers import DeviceState
from mii_zmq.worker.models.cuda_decoder import CudaDecoder
from mii_zmq.worker.plan import NOT_FINITE, EngineLimits, NewSequence, SamplingSpec, StepPlan, StepResult
from mii_zmq.worker.sampler import MIN_TEMPERATURE

logger = logging.getLogger(__name__)

RING = 4
"""Steps whose host buffers exist at the same time; more than are ever in flight."""
UPDATE_WORDS = 1 << 16
"""int32 values of changes that travel in the step's own buffer; more take a buffer of their own."""
GREEDY = SamplingVariant()


class CudaPendingStep:
    """A queued step."""

    def __init__(
        self,
        step: int,
        packed: PackedStep,
        out: np.ndarray,
        event: torch.cuda.Event,
        void: dict[int, str],
        logprobs: PendingLogprobs | None,
        scores: PendingScores | None,
        vectors: PendingVectors | None,
    ) -> None:
        """`void`: slots of the step whose tokens do not count, and why."""
        self._step, self._packed, self._out, self._event, self._void = step, packed, out, event, void
        self._logprobs, self._scores, self._vectors = logprobs, scores, vectors

    def done(self) -> bool:
        return bool(self._event.query())

    def result(self) -> StepResult:
        self._event.synchronize()
        packed, num_rows = self._packed, len(self._packed.sample_slots)
        token_ids: list[int] = self._out[0, :num_rows].tolist()
        finite = self._out[1, :num_rows]
        failed = {}
        if not finite.all():
            failed = {packed.sample_slots[row]: NOT_FINITE for row in np.flatnonzero(finite == 0)}
        if packed.plan_order is not None:
            token_ids = [token_ids[index] for index in packed.plan_order]
        result = StepResult(self._step, token_ids, {**failed, **self._void})
        if self._logprobs is not None:
            result.logprobs = self._logprobs.read()
        if self._scores is not None:
            result.scores = self._scores.read()
        if self._vectors is not None:
            result.pooled, spoiled = self._vectors.read()
            result.failed |= spoiled
        return result


class FailedStep:
    """A step that could not be queued."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        raise self._error


@dataclass(frozen=True)
class _HostBuffers:
    """Pinned memory of one step of the ring."""

    packed: Tensor
    out: Tensor
    event: torch.cuda.Event


class CudaExecutor:
    """Implements `plan.Executor`. Used by one thread."""

    def __init__(
        self,
        decoder: CudaDecoder,
        state: DeviceState,
        layout: PackedLayout,
        pool: KvPool,
        limits: EngineLimits,
        use_graphs: bool = True,
    ) -> None:
        self.limits = limits
        self.bill = MemoryBill(
            decoder.weight_bytes, pool.num_bytes, limits.num_blocks, limits.num_blocks * limits.block_size
        )
        """Without graphs until they are captured."""
        self.decoder = decoder
        device = state.packed.device
        self._device, self._state, self._layout, self._pool = device, state, layout, pool
        self._packer = StepPacker(layout, state.token_ids.stride(0), state.block_tables.stride(0), limits)
        self._buckets = decode_buckets(limits.max_sequences)
        self._stream = torch.cuda.Stream(device)
        self.graphs = GraphCache(self._stream, use_graphs)
        pdl = torch.cuda.get_device_capability(device)[0] >= 9
        self._sampler = CudaSampler(limits.max_sequences, limits.vocab_size, device, layout.max_rows, pdl=pdl)
        self._sampler.reserve(GREEDY)
        listed = ListedTokens(state, layout)
        self._logprobs = CudaLogprobs(decoder, state, listed)
        self._pooling = CudaPooling(decoder, listed)
        self._is_plain = [True] * limits.max_sequences
        """Slots whose next token is the largest logit, unmasked."""
        self._void: dict[int, str] = {}
        """Slots whose sampling options cannot be applied, and why: they draw greedily, and nothing counts."""
        self._ring = [self._make_buffers() for _ in range(RING)]
        self._out = torch.zeros(2, layout.max_rows, dtype=torch.int32, device=device)
        self._last_step = 0
        decoder.use_pool(pool.slab)
        torch.cuda.synchronize(device)

    def submit(self, plan: StepPlan) -> CudaPendingStep | FailedStep:
        """Queue one step. The plan must not change afterwards."""
        if plan.step != self._last_step + 1:
            raise InternalError(f"step {plan.step} follows step {self._last_step}; a plan was lost or sent twice")
        self._last_step = plan.step
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                return self._launch(plan)
        except Exception as error:
            logger.exception("step %d could not be queued", plan.step)
            return FailedStep(error)

    def close(self) -> None:
        """Wait for the queued steps."""
        self._stream.synchronize()

    def capture(self, progress: Callable[[str, float], None]) -> None:
        """Compile kernels and capture the graphs of decode-only steps, by running them on nothing."""
        self._state.packed.zero_()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for index, rows in enumerate(self._buckets):
                progress("capturing graphs", index / len(self._buckets))
                self._run_trunk(decode_bucket(rows, self._layout))
                self._run_sampling(rows, GREEDY)
            self._stream.synchronize()

    def logits(self, num_rows: int) -> Tensor:
        """A copy of the logits of the last step's first sampled rows, for tests."""
        self._stream.synchronize()
        return self.decoder.last_logits[:num_rows].clone()

    def _make_buffers(self) -> _HostBuffers:
        words = self._layout.fixed_words + UPDATE_WORDS
        return _HostBuffers(
            packed=torch.zeros(words, dtype=torch.int32, pin_memory=True),
            out=torch.zeros(2, self._layout.max_rows, dtype=torch.int32, pin_memory=True),
            event=torch.cuda.Event(),
        )

    def _launch(self, plan: StepPlan) -> CudaPendingStep:
        buffers = self._ring[plan.step % RING]
        buffers.event.synchronize()
        fixed = self._layout.fixed_words
        host = buffers.packed.numpy()
        self._pooling.apply(plan)
        step = self._packer.pack(plan, host[:fixed], self._pooling.poolings)
        self._pool.zero_blocks(plan.zeroed)
        self._sampler.release(plan.freed_slots)
        self._logprobs.slots.release(plan.freed_slots)
        for new in plan.new:
            self._install(new)
        changes = len(step.updates) if len(step.updates) <= UPDATE_WORDS else 0
        host[fixed : fixed + changes] = step.updates[:changes]
        self._state.packed[: fixed + changes].copy_(buffers.packed[: fixed + changes], non_blocking=True)
        self._apply(step, changes)
        if step.num_rows:
            self._run_trunk(choose_bucket(step, self._layout, self._buckets))
        scores = self._logprobs.of_prompts(step.scored) if step.scored else None
        vectors = self._pooling.add(step.pooled) if step.pooled else None
        logprobs = None
        if step.sample_slots:
            if plan.masks:
                self._sampler.set_masks(plan.masks)
            self._run_head(step)
            buffers.out.copy_(self._out, non_blocking=True)
            logprobs = self._logprobs.of_drawn(step.sample_slots, self._out[0])
        buffers.event.record(self._stream)
        void = {row.slot: self._void[row.slot] for row in plan.rows if row.slot in self._void} if self._void else {}
        return CudaPendingStep(plan.step, step, buffers.out.numpy(), buffers.event, void, logprobs, scores, vectors)

    def _install(self, new: NewSequence) -> None:
        self._void.pop(new.slot, None)
        self._logprobs.slots.install(new.slot, new.sampling)
        try:
            self._sampler.install(new.slot, new.sampling, new.token_ids, new.num_prompt_tokens)
            self._is_plain[new.slot] = is_plain(new.sampling)
        except Exception as error:
            logger.exception("the sampling options of slot %d cannot be applied; its sequence ends", new.slot)
            self._void[new.slot] = f"the sampling options cannot be applied: {type(error).__name__}: {error}"
            self._sampler.install(new.slot, SamplingSpec(), [0], 1)
            self._is_plain[new.slot] = True

    def _apply(self, step: PackedStep, changes: int) -> None:
        if len(step.copies):
            pairs = upload(step.copies, self._device)
            slab = self._pool.slab
            elements = slab.stride(0)
            copy_blocks_kernel[(len(step.copies), triton.cdiv(elements, 8192), slab.shape[1])](
                pairs, slab, elements, slab.stride(1), TILE=8192, num_warps=8
            )
        if step.num_updates:
            updates = self._state.packed[self._layout.fixed_words :] if changes else upload(step.updates, self._device)
            grid = (step.num_updates, triton.cdiv(step.longest_update, UPDATE_TILE))
            apply_updates_kernel[grid](updates, self._state.token_ids, self._state.block_tables, TILE=UPDATE_TILE)

    def _run_trunk(self, bucket: Bucket) -> None:
        def launch() -> None:
            self.decoder.trunk(bucket.num_tokens, bucket.max_decodes, bucket.max_tiles)

        if bucket.is_graph:
            self.graphs.run(("trunk", bucket), launch)
        else:
            launch()

    def _run_head(self, step: PackedStep) -> None:
        slots = step.sample_slots
        rows = row_bucket(len(slots), self._buckets)
        if all(self._is_plain[slot] for slot in slots):
            self._run_sampling(rows, GREEDY)
            return
        variant = self._sampler.prepare(slots)
        self._sampler.reserve(variant)
        self._run_sampling(rows, variant)

    def _run_sampling(self, rows: int, variant: SamplingVariant) -> None:
        self.graphs.run(("sample", rows, variant), lambda: self._sample(rows, variant))

    def _sample(self, rows: int, variant: SamplingVariant) -> None:
        logits = self.decoder.head(rows)
        layout, packed = self._layout, self._state.packed
        self._sampler.sample(
            variant,
            logits,
            packed[layout.sample_slots : layout.sample_slots + rows],
            packed[layout.sample_positions : layout.sample_positions + rows],
            packed[3:4],
            self._state.token_ids,
            self._out[0, :rows],
            self._out[1, :rows],
        )


def is_plain(spec: SamplingSpec) -> bool:
    """Whether the next token is simply the largest logit."""
    is_masked = bool(spec.bad_words) or (spec.min_new_tokens > 0 and bool(spec.stop_token_ids))
    is_edited = spec.needs_penalties or bool(spec.logit_bias or spec.allowed_token_ids or spec.is_masked)
    return spec.temperature < MIN_TEMPERATURE and not is_edited and not is_masked
