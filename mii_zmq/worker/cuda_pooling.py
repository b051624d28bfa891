# SPDX-License-Identifier: Apache-2.0
"""Embeddings on a GPU: the final hidden states of the tokens that count, by runs of the last layer's end and the norm.

Runs eagerly between the trunk's graph and the head's, for steps with pooled rows only. Sums stay on the device; vectors
that are complete come to the host by an asynchronous copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mii_zmq.worker.cuda_listed_tokens import ListedTokens, to_host
from mii_zmq.worker.models.cuda_decoder import CudaDecoder
from mii_zmq.worker.plan import StepPlan
from mii_zmq.worker.pooled_rows import PooledRow, note_poolings
from mii_zmq.worker.pooling import Pooler, to_bytes


@dataclass(frozen=True, slots=True)
class PendingVectors:
    """On their way to the host."""

    slots: list[int]
    vectors: Tensor

    def read(self) -> tuple[dict[int, bytes], dict[int, str]]:
        """As `pooling.to_bytes`."""
        return to_bytes(self.slots, self.vectors.numpy())


class CudaPooling:
    """Queues work on the current stream."""

    def __init__(self, decoder: CudaDecoder, listed: ListedTokens) -> None:
        self.poolings: dict[int, str] = {}
        """Of the slots that are pooled, how."""
        self._decoder, self._listed = decoder, listed
        self._pooler = Pooler()

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's changes of slots."""
        note_poolings(self.poolings, plan.freed_slots, plan.new)
        self._pooler.release(plan.freed_slots)

    def add(self, rows: list[PooledRow]) -> PendingVectors | None:
        """Add what the step's rows give. Call between trunk and head: the head's inputs are put back."""
        tokens = np.array([token for row in rows for token in row.tokens], dtype=np.int64)
        parts = [states.clone() for _, states in self._listed.run(tokens, self._decoder.states)] if len(tokens) else []
        slots, vectors = self._pooler.add(torch.cat(parts) if parts else None, rows)
        return None if vectors is None else PendingVectors(slots, to_host(vectors))
