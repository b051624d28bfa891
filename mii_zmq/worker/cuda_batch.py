# SPDX-License-Identifier: Apache-2.0
"""A step plan -> the one int32 buffer that goes to the GPU, and the bucket whose CUDA graph runs it.

The buffer is a fixed part (header, rows, samples, attention tiles), whose offsets are baked into graphs, and behind it
the step's changes to token histories, block tables and rope lengths. Rows are sorted: those with one token first, they
are decodes to the kernels whatever the scheduler calls them, unless every row is to be tiles. Knows nothing of torch or
of a GPU, and of the model only whether its rotary embedding knows lengths.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mii_zmq.worker.plan import EngineLimits, NewSequence, StepPlan, StepRow
from mii_zmq.worker.pooled_rows import NO_POOLINGS, PooledRow, pooled_rows

HEADER = 16
NUM_SAMPLES = 3
"""The header's word that holds the number of rows with logits."""
ALIGN = 16
"""Offsets are multiples of it, so that kernels see aligned pointers."""
UPDATE_WORDS = 4
TOKEN_IDS, BLOCK_TABLES = 0, 1

DECODE_BUCKETS = (1, 2, 4, 8, *range(16, 64, 8), *range(64, 513, 16))
MIXED_BUCKETS = (64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960, 1024)


def _aligned(words: int) -> int:
    return -(-words // ALIGN) * ALIGN


@dataclass(frozen=True)
class PackedLayout:
    """Where everything lies in the buffer, in int32 words."""

    max_sequences: int
    token_budget: int
    tile_tokens: int
    """Query tokens per tile of prompt attention."""
    tiles_only: bool = False
    """Rows with one token are tiles, too, so that a token's result does not depend on how many came with it."""
    row_slots: int = HEADER
    max_rows: int = field(init=False)
    """A power of two, for the kernels."""
    row_starts: int = field(init=False)
    query_starts: int = field(init=False)
    sample_tokens: int = field(init=False)
    sample_slots: int = field(init=False)
    sample_positions: int = field(init=False)
    max_tiles: int = field(init=False)
    tile_rows: int = field(init=False)
    tile_starts: int = field(init=False)
    fixed_words: int = field(init=False)

    def __post_init__(self) -> None:
        rows = max(16, 1 << (self.max_sequences - 1).bit_length())
        tiles = _aligned(-(-self.token_budget // self.tile_tokens) + self.max_sequences)
        offset = HEADER
        for name, words in (
            ("row_slots", rows),
            ("row_starts", rows),
            ("query_starts", rows + ALIGN),
            ("sample_tokens", rows),
            ("sample_slots", rows),
            ("sample_positions", rows),
            ("tile_rows", tiles),
            ("tile_starts", tiles),
        ):
            object.__setattr__(self, name, offset)
            offset += words
        object.__setattr__(self, "max_rows", rows)
        object.__setattr__(self, "max_tiles", tiles)
        object.__setattr__(self, "fixed_words", offset)


@dataclass(frozen=True)
class ScoredChunk:
    """A row of which the probabilities of the known tokens behind its own are wanted."""

    slot: int
    start: int
    """Position of its first token."""
    count: int
    """Of its tokens that have a known successor."""
    first_token: int
    """Where its tokens begin in the batch."""


@dataclass
class PackedStep:
    """What the host keeps of a packed step."""

    num_rows: int
    num_decodes: int
    num_tokens: int
    num_tiles: int
    sample_slots: list[int]
    sample_positions: list[int]
    plan_order: list[int] | None
    """Index into the drawn tokens for each sampling row of the plan; None: the same order."""
    updates: np.ndarray
    """Records and data, to be placed behind the fixed part."""
    num_updates: int
    longest_update: int
    copies: np.ndarray
    """[pairs, 2] int32."""
    scored: list[ScoredChunk]
    pooled: list[PooledRow]


class StepPacker:
    """Turns plans into buffers; knows how many blocks each slot's table holds."""

    def __init__(
        self, layout: PackedLayout, history_stride: int, table_stride: int, limits: EngineLimits | None = None
    ) -> None:
        """`limits`: of a model whose rotary embedding may depend on lengths."""
        self.layout = layout
        self._limits = limits if limits is not None and limits.rope_border is not None else None
        self._history_stride = history_stride
        self._table_stride = table_stride
        self._num_blocks = [0] * layout.max_sequences

    def pack(self, plan: StepPlan, fixed: np.ndarray, poolings: Mapping[int, str] = NO_POOLINGS) -> PackedStep:
        """Write the fixed part into `fixed`; the tables count as changed from here on.

        `poolings`: of the slots that are pooled, how.
        """
        updates, num_updates, longest = self._updates(plan)
        rows = plan.rows
        # Long rows first: with the short ones last, the last programs of decode attention end together.
        ordered = sorted(rows, key=row_order)
        num_decodes = 0 if self.layout.tiles_only else sum(row.num_tokens == 1 for row in rows)
        counts = [row.num_tokens for row in ordered]
        tile_rows, tile_starts = self._tiles(ordered, num_decodes)
        ends = np.cumsum(counts, dtype=np.int32) if counts else np.zeros(0, np.int32)
        num_tokens = int(ends[-1]) if counts else 0
        sampled = [index for index, row in enumerate(ordered) if row.sample]
        slots = [row.slot for row in ordered]
        sample_slots = [slots[index] for index in sampled]
        sample_positions = [ordered[index].start + counts[index] for index in sampled]
        layout = self.layout
        fixed[:5] = (len(rows), num_decodes, num_tokens, len(sampled), len(tile_rows))
        _place(fixed, layout.row_slots, slots)
        _place(fixed, layout.row_starts, [row.start for row in ordered])
        fixed[layout.query_starts] = 0
        _place(fixed, layout.query_starts + 1, ends)
        _place(fixed, layout.sample_tokens, ends[sampled] - 1 if sampled else [])
        _place(fixed, layout.sample_slots, sample_slots)
        _place(fixed, layout.sample_positions, sample_positions)
        _place(fixed, layout.tile_rows, tile_rows)
        _place(fixed, layout.tile_starts, tile_starts)
        plan_order = None
        if not all(map(operator.is_, ordered, rows)):
            drawn = {slot: index for index, slot in enumerate(sample_slots)}
            plan_order = [drawn[row.slot] for row in rows if row.sample]
        return PackedStep(
            num_rows=len(rows),
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            num_tiles=len(tile_rows),
            sample_slots=sample_slots,
            sample_positions=sample_positions,
            plan_order=plan_order,
            updates=updates,
            num_updates=num_updates,
            longest_update=longest,
            copies=np.array(plan.copies, dtype=np.int32).reshape(-1, 2),
            scored=[
                ScoredChunk(row.slot, row.start, row.num_tokens - row.sample, int(end) - row.num_tokens)
                for row, end in zip(ordered, ends, strict=True)
                if row.score
            ],
            pooled=pooled_rows(ordered, [0, *ends[:-1].tolist()], poolings) if poolings else [],
        )

    def _tiles(self, ordered: list[StepRow], num_decodes: int) -> tuple[list[int], list[int]]:
        """Tiles of the rows behind the decodes, those that read most keys first."""
        size = self.layout.tile_tokens
        tiles = [
            (row.start + first, index, first)
            for index, row in enumerate(ordered[num_decodes:], num_decodes)
            for first in range(0, row.num_tokens, size)
        ]
        tiles.sort(reverse=True)
        return [index for _, index, _ in tiles], [first for _, _, first in tiles]

    def _updates(self, plan: StepPlan) -> tuple[np.ndarray, int, int]:
        """Records (target, offset, length, where the data lies) followed by the data."""
        records: list[tuple[int, int, int]] = []
        data: list[int] = []
        for slot in plan.freed_slots:
            self._num_blocks[slot] = 0
        for new in plan.new:
            records.append((TOKEN_IDS, new.slot * self._history_stride, len(new.token_ids)))
            data += new.token_ids
            if self._limits is not None:
                self._set_rope_length(new, self._limits, records, data)
            self._num_blocks[new.slot] = 0
            self._append_blocks(new.slot, new.block_ids, records, data)
        for row in plan.rows:
            if row.new_block_ids:
                self._append_blocks(row.slot, row.new_block_ids, records, data)
        updates = np.empty(UPDATE_WORDS * len(records) + len(data), dtype=np.int32)
        if records:
            table = updates[: UPDATE_WORDS * len(records)].reshape(-1, UPDATE_WORDS)
            table[:, :3] = records
            table[0, 3] = len(records) * UPDATE_WORDS
            table[1:, 3] = table[0, 3] + np.cumsum(table[:-1, 2])
            updates[table.size :] = data
        return updates, len(records), max((length for _, _, length in records), default=0)

    def _set_rope_length(
        self, new: NewSequence, limits: EngineLimits, records: list[tuple[int, int, int]], data: list[int]
    ) -> None:
        """The lengths lie behind the histories."""
        records.append((TOKEN_IDS, self.layout.max_sequences * self._history_stride + new.slot, 1))
        data.append(new.fixed_rope_length(limits.recomputes_at_border))

    def _append_blocks(
        self, slot: int, block_ids: list[int], records: list[tuple[int, int, int]], data: list[int]
    ) -> None:
        if block_ids:
            held = self._num_blocks[slot]
            records.append((BLOCK_TABLES, slot * self._table_stride + held, len(block_ids)))
            data += block_ids
            self._num_blocks[slot] = held + len(block_ids)


@dataclass(frozen=True)
class Bucket:
    """The padded size of a step's trunk; equal buckets share a graph."""

    num_tokens: int
    max_decodes: int
    max_tiles: int
    is_graph: bool


def decode_buckets(max_sequences: int) -> list[int]:
    """Padded row counts, the largest of them enough for every slot."""
    buckets = [bucket for bucket in DECODE_BUCKETS if bucket < max_sequences]
    return [*buckets, max_sequences]


def row_bucket(num_rows: int, buckets: list[int]) -> int:
    return buckets[bisect_left(buckets, num_rows)]


def decode_bucket(num_rows: int, layout: PackedLayout) -> Bucket:
    """That of a step with so many rows of one token."""
    return Bucket(num_rows, 0, num_rows, True) if layout.tiles_only else Bucket(num_rows, num_rows, 0, True)


def choose_bucket(step: PackedStep, layout: PackedLayout, buckets: list[int]) -> Bucket:
    """Decode-only steps by rows; mixed ones by tokens, with room for any mix of rows; big ones exactly, eagerly."""
    if step.num_tokens == step.num_rows:
        return decode_bucket(row_bucket(step.num_rows, buckets), layout)
    if step.num_tokens <= MIXED_BUCKETS[-1]:
        tokens = MIXED_BUCKETS[bisect_left(MIXED_BUCKETS, step.num_tokens)]
        single = min(tokens, layout.max_sequences)
        tiles = -(-tokens // layout.tile_tokens) + (single if layout.tiles_only else MIXED_SPARE_TILES)
        if step.num_tiles <= tiles and tokens <= _aligned(layout.token_budget):
            return Bucket(tokens, 0 if layout.tiles_only else single, tiles, is_graph=True)
    return Bucket(step.num_tokens, step.num_decodes, step.num_tiles, is_graph=False)


MIXED_SPARE_TILES = 24
"""Tiles of a mixed graph beyond what its tokens fill: every prompt chunk may leave one partly empty."""


def row_order(row: StepRow) -> tuple[bool, int]:
    """Sort key of the rows of a step."""
    return row.num_tokens > 1, -row.start


def _place(target: np.ndarray, offset: int, values: list[int] | np.ndarray) -> None:
    target[offset : offset + len(values)] = values
