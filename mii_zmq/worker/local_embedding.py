# SPDX-License-Identifier: Apache-2.0
"""One prompt under way in an engine of the calling process, of which the embedding is wanted."""

from __future__ import annotations

import queue
from collections.abc import Callable

from mii_zmq.errors import MiiError
from mii_zmq.worker.embedding import PreparedEmbedding, shape_vector


class LocalEmbedding:
    """Ask for its `result` once. Belongs to the thread that asks."""

    def __init__(self, prepared: PreparedEmbedding, cancel: Callable[[LocalEmbedding], None]) -> None:
        self.sequence = prepared.sequence
        self._prepared = prepared
        self._cancel = cancel
        self._answer: queue.SimpleQueue[bytes | MiiError] = queue.SimpleQueue()
        self._is_over = False

    def put(self, vector: bytes) -> None:
        """The engine thread's: the pooled vector."""
        self._answer.put(vector)

    def fail(self, error: MiiError) -> None:
        """What ended the sequence without one; any thread's."""
        self._answer.put(error)

    def result(self) -> bytes:
        """Wait for the vector, cut and scaled as asked: float32, little endian. Raises the MiiError that ended it."""
        answer = self._answer.get()
        self._is_over = True
        if isinstance(answer, MiiError):
            raise answer
        return shape_vector(answer, self._prepared.dimensions, self._prepared.normalize)

    def cancel(self) -> None:
        """Stop computing; harmless after the end."""
        if not self._is_over:
            self._is_over = True
            self._cancel(self)
