# SPDX-License-Identifier: Apache-2.0
"""A step plan -> the flattened batch that the decoder runs, and the per-slot state that plans only send changes of.

The history of token ids lives on the device, because a sampled id is written there and read by the next step before
the host has seen it. Block tables are needed on the host, where attention is planned. All arrays of a step are made
by a few vectorised operations. Knows nothing of the model but its context length and the length at which it rotates
positions differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mii_zmq.kernels import CellMapping, RaggedLayout
from mii_zmq.worker.models.decoder import ForwardBatch
from mii_zmq.worker.plan import StepPlan, StepRow
from mii_zmq.worker.pooled_rows import NO_POOLINGS, PooledRow, pooled_rows


class SlotState:
    """One row per slot: token ids (on the device), block table and rope length (on the host)."""

    def __init__(
        self,
        max_sequences: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        rope_border: int | None = None,
        recomputes_at_border: bool = False,
    ) -> None:
        """The last two as in `EngineLimits`; without a border no rope lengths are kept."""
        self.block_size = block_size
        self.device = device
        # One more than the longest sequence, so that the token drawn behind it has a place.
        self.token_ids = torch.zeros(max_sequences, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_tables = np.zeros((max_sequences, -(-max_model_len // block_size)), dtype=np.int64)
        self.fixed_rope_lengths = None if rope_border is None else np.zeros(max_sequences, dtype=np.int64)
        """Least rope length of any token in the slot; one at position p has max(this, p + 1)."""
        self._recomputes_at_border = recomputes_at_border
        self._num_blocks = [0] * max_sequences

    def apply(self, plan: StepPlan) -> None:
        """Take over new sequences and grown block tables."""
        for slot in plan.freed_slots:
            self._num_blocks[slot] = 0
        for new in plan.new:
            ids = torch.tensor(new.token_ids, dtype=torch.int32)
            self.token_ids[new.slot, : len(ids)] = ids.to(self.device)
            if self.fixed_rope_lengths is not None:
                self.fixed_rope_lengths[new.slot] = new.fixed_rope_length(self._recomputes_at_border)
            self._num_blocks[new.slot] = 0
            self._append_blocks(new.slot, new.block_ids)
        for row in plan.rows:
            if row.new_block_ids:
                self._append_blocks(row.slot, row.new_block_ids)

    def begun_blocks(self, rows: list[StepRow]) -> list[int]:
        """Blocks whose first cell is written in this step and whose last one is not."""
        begun = []
        for row in rows:
            end = row.start + row.num_tokens
            index, filled = divmod(end, self.block_size)
            if filled and index * self.block_size >= row.start:
                begun.append(int(self.block_tables[row.slot, index]))
        return begun

    def record(self, slots: list[int], positions: list[int], drawn: Tensor) -> None:
        """Append drawn ids on the device; nobody waits for them."""
        self.token_ids[_indices(slots, self.device), _indices(positions, self.device)] = drawn.to(torch.int32)

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        held = self._num_blocks[slot]
        self.block_tables[slot, held : held + len(block_ids)] = block_ids
        self._num_blocks[slot] = held + len(block_ids)


@dataclass(frozen=True)
class ScoredRow:
    """A row of which the probabilities of the known tokens behind its own are wanted."""

    slot: int
    start: int
    """Position of its first token."""
    count: int
    """Of its tokens that have a known successor."""
    first_logit: int
    """Row of the logits that belongs to its first token."""


@dataclass(frozen=True)
class RaggedBatch:
    """A step ready to run."""

    forward: ForwardBatch
    sample_slots: list[int]
    """Slots that draw a token, in the order of the logits."""
    sample_positions: list[int]
    """Position of each drawn token."""
    plan_order: list[int]
    """Index into the drawn tokens, for each row of the plan that samples."""
    sample_logits: Tensor | None = None
    """Rows of the logits that are sampled; None: all of them."""
    scored: tuple[ScoredRow, ...] = ()
    pooled: tuple[PooledRow, ...] = ()
    """Rows that contribute to a vector, in the order of the hidden states."""


def build_batch(plan: StepPlan, state: SlotState, poolings: Mapping[int, str] = NO_POOLINGS) -> RaggedBatch:
    """Flatten the plan's rows: decodes first, by ascending length, so that attention can run them in dense groups.

    `poolings`: of the slots that are pooled, how.
    """
    rows = plan.rows
    starts = np.array([row.start for row in rows], dtype=np.int64)
    counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
    order = np.lexsort((starts, counts > 1))
    starts, counts = starts[order], counts[order]
    slots = np.array([row.slot for row in rows], dtype=np.int64)[order]
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start_loc[1:])
    token_slots = np.repeat(slots, counts)
    positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], counts)
    block_ids = state.block_tables[token_slots, positions // state.block_size]
    lengths = starts + counts
    width = -(-int(lengths.max()) // state.block_size)
    samples = np.array([row.sample for row in rows], dtype=bool)[order]
    positions_on_device = _to_device(positions, state.device)
    rope_lengths = None
    if state.fixed_rope_lengths is not None:
        rope_lengths = _to_device(np.maximum(state.fixed_rope_lengths[token_slots], positions + 1), state.device)
    sample_tokens = query_start_loc[1:][samples] - 1
    logit_tokens: np.ndarray = sample_tokens
    scored: tuple[ScoredRow, ...] = ()
    if any(row.score for row in rows):
        logit_tokens, scored = _add_scored([rows[index] for index in order], query_start_loc, sample_tokens)
    pooled, states = [], []
    if poolings:
        ordered = [rows[index] for index in order]
        pooled = pooled_rows(ordered, query_start_loc[:-1].tolist(), poolings)
        states = [token for row in pooled for token in row.tokens]
    forward = ForwardBatch(
        token_ids=state.token_ids[_to_device(token_slots, state.device), positions_on_device],
        positions=positions_on_device,
        mapping=CellMapping(
            _to_device(block_ids, state.device), _to_device(positions % state.block_size, state.device)
        ),
        layout=RaggedLayout(query_start_loc, lengths, state.block_tables[slots, :width], state.block_size),
        logit_rows=_to_device(logit_tokens, state.device) if len(logit_tokens) else None,
        rope_lengths=rope_lengths,
        hidden_rows=_indices(states, state.device) if states else None,
    )
    sampled_order = order[samples]
    return RaggedBatch(
        forward=forward,
        sample_slots=slots[samples].tolist(),
        sample_positions=lengths[samples].tolist(),
        plan_order=np.argsort(sampled_order).tolist(),
        sample_logits=_to_device(np.searchsorted(logit_tokens, sample_tokens), state.device) if scored else None,
        scored=scored,
        pooled=tuple(pooled),
    )


def _add_scored(
    rows: list[StepRow], query_start_loc: np.ndarray, sample_tokens: np.ndarray
) -> tuple[np.ndarray, tuple[ScoredRow, ...]]:
    """Tokens whose logits are wanted, in order, when those of whole rows are; rows are in the batch's order."""
    scored = [(row, begin) for row, begin in zip(rows, query_start_loc[:-1].tolist(), strict=True) if row.score]
    is_wanted = np.zeros(query_start_loc[-1], dtype=bool)
    is_wanted[sample_tokens] = True
    for row, begin in scored:
        is_wanted[begin : begin + row.num_tokens] = True
    logit_tokens = np.flatnonzero(is_wanted)
    return logit_tokens, tuple(
        ScoredRow(row.slot, row.start, row.num_tokens - row.sample, int(np.searchsorted(logit_tokens, begin)))
        for row, begin in scored
    )


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _indices(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
