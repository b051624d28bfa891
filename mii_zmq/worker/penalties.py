# SPDX-License-Identifier: Apache-2.0
"""What a request changes in its logits: penalties, biases, the tokens it allows, bad words, stop ids not due yet.

The classes that `apply_` hold the settings of one batch's rows as packed device tensors; `OutputCounts` holds one
table row per sequence that needs counts. The histories are read on the device, since the host learns drawn ids late.
Knows nothing of how a token is then chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mii_zmq.worker.plan import SamplingSpec

NEVER = 2**62
"""A position that no sequence reaches."""
_ADDED = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)
"""[256, 8]: what a byte of a mask adds to the logits of its tokens."""


class OutputCounts:
    """How often each token stands in a sequence's output, for the slots with a presence or frequency penalty."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.table = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """[rows, V]; grows by doubling, rows are reused."""
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []

    @torch.inference_mode()
    def add(self, slot: int, output_token_ids: list[int]) -> None:
        if not self._free:
            num_rows, vocab_size = self.table.shape
            self._free = list(range(max(4, 2 * num_rows) - 1, num_rows - 1, -1))
            self.table = torch.cat([self.table, self.table.new_zeros(len(self._free), vocab_size)])
        row = self._row_of[slot] = self._free.pop()
        ids = torch.tensor(output_token_ids, dtype=torch.int64, device=self.table.device)
        counts = self.table[row].zero_()
        counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def remove(self, slot: int) -> None:
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def row(self, slot: int) -> int:
        return self._row_of[slot]


class Penalties:
    """The penalised rows of one batch."""

    def __init__(
        self, rows: Sequence[tuple[int, int, SamplingSpec]], counts: OutputCounts, device: torch.device
    ) -> None:
        """`rows` holds (row of the batch, slot, spec)."""
        self._row_list = [row for row, _, _ in rows]
        self._rows = torch.tensor(self._row_list, device=device)
        self._slots = torch.tensor([slot for _, slot, _ in rows], device=device)
        self._repetition = torch.tensor([[spec.repetition_penalty] for _, _, spec in rows], device=device)
        self._has_repetition = any(spec.repetition_penalty != 1.0 for _, _, spec in rows)
        self._counts = counts
        counted = [index for index, (_, _, spec) in enumerate(rows) if needs_counts(spec)]
        self._counted = torch.tensor(counted, dtype=torch.int64, device=device)
        table_rows = [counts.row(rows[index][1]) for index in counted]
        self._table_rows = torch.tensor(table_rows, dtype=torch.int64, device=device)
        self._presence = torch.tensor([[rows[index][2].presence_penalty] for index in counted], device=device)
        self._frequency = torch.tensor([[rows[index][2].frequency_penalty] for index in counted], device=device)

    def apply_(self, logits: Tensor, positions: Tensor, positions_host: list[int], token_ids: Tensor) -> None:
        """Change the logits of the tokens in each row's history; the cost follows its length, not the vocabulary.

        Repetition: as transformers, over prompt and output. Presence and frequency: as OpenAI, over the output.
        """
        length = max(positions_host[row] for row in self._row_list)
        history = token_ids[:, :length].index_select(0, self._slots).long()
        is_valid = torch.arange(length, device=history.device) < positions.index_select(0, self._rows).unsqueeze(1)
        # Padding repeats a token of the history: every copy of a token reads and writes the same value.
        history = torch.where(is_valid, history, history[:, :1])
        flat = history + (self._rows * logits.shape[1]).unsqueeze(1)
        values = logits.view(-1).take(flat)
        if self._has_repetition:
            values = torch.where(values < 0, values * self._repetition, values / self._repetition)
        if len(self._table_rows):
            at = history.index_select(0, self._counted) + (self._table_rows * logits.shape[1]).unsqueeze(1)
            counts = self._counts.table.view(-1).take(at)
            lowered = self._frequency * counts + self._presence * (counts > 0)
            values.index_add_(0, self._counted, lowered, alpha=-1)
        logits.view(-1).put_(flat, values)

    def record_(self, drawn: Tensor) -> None:
        """Count the tokens drawn for the batch [R]."""
        if len(self._table_rows):
            ids = drawn.index_select(0, self._rows.index_select(0, self._counted))
            ones = torch.ones_like(ids, dtype=torch.int32)
            self._counts.table.index_put_((self._table_rows, ids), ones, accumulate=True)


class TokenBiases:
    """What the rows of one batch add to the logits of some tokens."""

    def __init__(
        self, rows: Sequence[tuple[int, tuple[tuple[int, float], ...]]], vocab_size: int, device: torch.device
    ) -> None:
        """`rows` holds (row of the batch, `SamplingSpec.logit_bias`); ids outside the vocabulary are ignored."""
        entries = [(row, *entry) for row, biases in rows for entry in biases if 0 <= entry[0] < vocab_size]
        self._rows = torch.tensor([row for row, _, _ in entries], dtype=torch.int64, device=device)
        self._token_ids = torch.tensor([token_id for _, token_id, _ in entries], dtype=torch.int64, device=device)
        self._values = torch.tensor([value for _, _, value in entries], dtype=torch.float32, device=device)

    def apply_(self, logits: Tensor, positions: Tensor, positions_host: list[int], token_ids: Tensor) -> None:
        logits.index_put_((self._rows, self._token_ids), self._values, accumulate=True)


class AllowedTokens:
    """The rows of one batch that may draw some tokens only."""

    def __init__(self, rows: Sequence[tuple[int, tuple[int, ...]]], vocab_size: int, device: torch.device) -> None:
        """`rows` holds (row of the batch, `SamplingSpec.allowed_token_ids`); ids outside the vocabulary are ignored."""
        self._rows = [row for row, _ in rows]
        self._forbidden = torch.ones(len(rows), vocab_size, dtype=torch.bool, device=device)
        for index, (_, allowed) in enumerate(rows):
            known = [token_id for token_id in allowed if 0 <= token_id < vocab_size]
            self._forbidden[index, torch.tensor(known, dtype=torch.int64, device=device)] = False

    def apply_(self, logits: Tensor, positions: Tensor, positions_host: list[int], token_ids: Tensor) -> None:
        for row, forbidden in zip(self._rows, self._forbidden, strict=True):
            # Added, not assigned: a NaN must stay one.
            logits[row] += torch.zeros_like(logits[row]).masked_fill_(forbidden, float("-inf"))


@dataclass(frozen=True, slots=True)
class MaskEntry:
    """Never draw `token_id` while the history ends with `prefix` and the position is below `until`."""

    row: int
    slot: int
    token_id: int
    prefix: tuple[int, ...] = ()
    until: int = NEVER


class TokenMasks:
    """The masked tokens of one batch."""

    def __init__(self, entries: Sequence[MaskEntry], device: torch.device) -> None:
        self._deadlines = {(entry.row, entry.until) for entry in entries}
        self._rows = torch.tensor([entry.row for entry in entries], device=device)
        self._slots = torch.tensor([[entry.slot] for entry in entries], device=device)
        self._token_ids = torch.tensor([entry.token_id for entry in entries], device=device)
        self._until = torch.tensor([entry.until for entry in entries], device=device)
        width = max(len(entry.prefix) for entry in entries)
        # Right-aligned; -1 matches anything.
        prefixes = [(-1,) * (width - len(entry.prefix)) + entry.prefix for entry in entries]
        self._prefixes = torch.tensor(prefixes, dtype=torch.int64, device=device)
        self._offsets = torch.arange(-width, 0, device=device)

    def apply_(self, logits: Tensor, positions: Tensor, positions_host: list[int], token_ids: Tensor) -> None:
        """Set what is masked now to -inf."""
        if not any(positions_host[row] < until for row, until in self._deadlines):
            return
        positions = positions.index_select(0, self._rows)
        is_masked = positions < self._until
        if len(self._offsets):
            columns = positions.unsqueeze(1) + self._offsets
            matches = (token_ids[self._slots, columns.clamp(min=0)] == self._prefixes) & (columns >= 0)
            is_masked &= (matches | (self._prefixes < 0)).all(-1)
        # Added, not assigned: a token may stand in several entries of which one is active.
        change = torch.zeros_like(is_masked, dtype=logits.dtype).masked_fill_(is_masked, float("-inf"))
        logits.index_put_((self._rows, self._token_ids), change, accumulate=True)


def apply_masks_(logits: Tensor, masks: Sequence[tuple[int, bytes]]) -> None:
    """Keep rows of `logits` [R, V] from drawing all but what their masks (`StepPlan.masks`) allow: (row, mask) each."""
    vocab_size = logits.shape[1]
    for row, mask in masks:
        added = _ADDED[np.frombuffer(mask, dtype=np.uint8)].reshape(-1)[:vocab_size]
        # Added, not assigned: a NaN must stay one.
        logits[row] += torch.from_numpy(added).to(logits.device)


def needs_counts(spec: SamplingSpec) -> bool:
    return spec.presence_penalty != 0.0 or spec.frequency_penalty != 0.0
