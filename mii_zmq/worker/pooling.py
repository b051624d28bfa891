# SPDX-License-Identifier: Apache-2.0
"""Hidden states -> one vector per prompt: sums per slot, in float64, over as many steps as the prompt takes.

So exact a sum hardly depends on where a prompt was cut into chunks.

Works where the hidden states are, without waiting for them. Knows neither model nor plan; `pooled_rows` says what
counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from mii_zmq.worker.plan import NOT_FINITE
from mii_zmq.worker.pooled_rows import PooledRow


class Pooler:
    """The sums of one executor's slots."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def release(self, slots: Iterable[int]) -> None:
        """Forget what the slots have so far."""
        for slot in slots:
            self._sums.pop(slot, None)

    def add(self, hidden: Tensor | None, rows: Sequence[PooledRow]) -> tuple[list[int], Tensor | None]:
        """Add a step's hidden states, [H, D] in the order of the rows' tokens (None: of no token).

        Returns:
            The slots whose vectors are complete, and those, [slots, D] float32 (None: of no slot).
        """
        at = 0
        slots: list[int] = []
        vectors: list[Tensor] = []
        for row in rows:
            count = len(row.tokens)
            if count:
                assert hidden is not None
                part = hidden[at : at + count].sum(0, dtype=torch.float64)
                self._sums[row.slot] = part if row.is_first else self._sums[row.slot] + part
                at += count
            if row.divisor:
                vector = self._sums.pop(row.slot)
                slots.append(row.slot)
                vectors.append((vector / row.divisor).float())
        return slots, torch.stack(vectors) if vectors else None


def to_bytes(slots: Sequence[int], vectors: np.ndarray) -> tuple[dict[int, bytes], dict[int, str]]:
    """[slots, D] float32 as `StepResult.pooled`, and the slots whose numbers are not all finite as its `failed`."""
    is_finite = np.isfinite(vectors).all(1)
    failed = {slot: NOT_FINITE for slot, is_fine in zip(slots, is_finite, strict=True) if not is_fine}
    return {slot: row.astype("<f4").tobytes() for slot, row in zip(slots, vectors, strict=True)}, failed
