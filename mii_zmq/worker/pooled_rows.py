# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a step have a share in the vectors of prompts that are pooled. Pure, for both executors.

The last token's vector needs that token alone, the first one's likewise, a mean needs every one; what a row has to give
is added to its slot's sum, so that a prompt in chunks comes to the same as a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mii_zmq.worker.plan import NewSequence, StepRow

NO_POOLINGS: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PooledRow:
    """What one row gives to its slot's vector."""

    slot: int
    tokens: range
    """Where its tokens that count lie in the batch; may be empty."""
    is_first: bool
    """The sum begins with it."""
    divisor: int
    """Of the sum, which is complete with this row; 0: it goes on."""


def pooled_rows(rows: Sequence[StepRow], begins: Sequence[int], poolings: Mapping[int, str]) -> list[PooledRow]:
    """Of the rows of pooled slots, those that have something to give or to report.

    `begins`: where each row's tokens begin in the batch. `poolings`: by slot, only of those that are pooled.
    """
    found = []
    for row, begin in zip(rows, begins, strict=True):
        pooling = poolings.get(row.slot)
        if pooling is None:
            continue
        end = begin + row.num_tokens
        is_first, tokens, divisor = row.start == 0, range(begin, end), row.start + row.num_tokens
        if pooling == "last":
            is_first, tokens, divisor = True, range(end - 1, end) if row.pool else range(0), 1
        elif pooling == "first":
            tokens, divisor = range(begin, begin + 1) if is_first else range(0), 1
        if tokens or row.pool:
            found.append(PooledRow(row.slot, tokens, is_first, divisor if row.pool else 0))
    return found


def note_poolings(poolings: dict[int, str], freed_slots: Sequence[int], new: Sequence[NewSequence]) -> None:
    """Keep `poolings` in step with a plan's changes."""
    for slot in freed_slots:
        poolings.pop(slot, None)
    for sequence in new:
        poolings.pop(sequence.slot, None)
        if sequence.sampling.pooling:
            poolings[sequence.slot] = sequence.sampling.pooling
