# SPDX-License-Identifier: Apache-2.0
"""A step plan -> the flattened batch that the decoder runs, and the per-slot state that plans only send changes of.

The history of token ids lives on the device, because a sampled id is written there and read by the next step before
the host has seen it. Block tables are needed on the host, where attention is planned. All arrays of a step are made
by a few vectorised operations. Knows nothing of the model but its context length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mii_zmq.kernels import CellMapping, RaggedLayout
from mii_zmq.worker.models.decoder import ForwardBatch
from mii_zmq.worker.plan import StepPlan, StepRow


class SlotState:
    """One row per slot: token ids (on the device) and block table (on the host)."""

    def __init__(self, max_sequences: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        # One more than the longest sequence, so that the token drawn behind it has a place.
        self.token_ids = torch.zeros(max_sequences, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_tables = np.zeros((max_sequences, -(-max_model_len // block_size)), dtype=np.int64)
        self._num_blocks = [0] * max_sequences

    def apply(self, plan: StepPlan) -> None:
        """Take over new sequences and grown block tables."""
        for slot in plan.freed_slots:
            self._num_blocks[slot] = 0
        for new in plan.new:
            ids = torch.tensor(new.token_ids, dtype=torch.int32)
            self.token_ids[new.slot, : len(ids)] = ids.to(self.device)
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
class RaggedBatch:
    """A step ready to run."""

    forward: ForwardBatch
    sample_slots: list[int]
    """Slots that draw a token, in the order of the logits."""
    sample_positions: list[int]
    """Position of each drawn token."""
    plan_order: list[int]
    """Index into the drawn tokens, for each row of the plan that samples."""


def build_batch(plan: StepPlan, state: SlotState) -> RaggedBatch:
    """Flatten the plan's rows: decodes first, by ascending length, so that attention can run them in dense groups."""
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
    forward = ForwardBatch(
        token_ids=state.token_ids[_to_device(token_slots, state.device), positions_on_device],
        positions=positions_on_device,
        mapping=CellMapping(
            _to_device(block_ids, state.device), _to_device(positions % state.block_size, state.device)
        ),
        layout=RaggedLayout(query_start_loc, lengths, state.block_tables[slots, :width], state.block_size),
        logit_rows=_to_device(query_start_loc[1:][samples] - 1, state.device) if samples.any() else None,
    )
    sampled_order = order[samples]
    return RaggedBatch(
        forward=forward,
        sample_slots=slots[samples].tolist(),
        sample_positions=lengths[samples].tolist(),
        plan_order=np.argsort(sampled_order).tolist(),
    )


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def _indices(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
