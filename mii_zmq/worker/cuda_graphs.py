# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs by key: a sequence of kernels runs eagerly the first time and is replayed from then on.

The first run compiles what has to be compiled and is the step itself; the capture follows it at once and computes
nothing. All graphs share one memory pool; what they read and write are fixed buffers. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch


class GraphCache:
    """Captured graphs on one stream."""

    def __init__(self, stream: torch.cuda.Stream, enabled: bool = True) -> None:
        self._stream = stream
        self._enabled = enabled
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, launch: Callable[[], object]) -> None:
        """Do what `launch` does; it must launch the same kernels with the same arguments for the same key.

        The cache's stream must be the current one.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        launch()
        if self._enabled:
            self._graphs[key] = self._capture(launch)

    def _capture(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would collect garbage and wait for the device each time.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        if self._pool is None:
            self._pool = graph.pool()
        return graph
