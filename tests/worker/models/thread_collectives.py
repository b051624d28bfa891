# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: `Collectives` over a shared list, and a function that runs one call per rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
TIMEOUT_S = 60.0


class ThreadGroup:
    """What the ranks' collectives share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.slots: list[Tensor] = [torch.empty(0)] * world_size
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT_S)

    def run(self, call: Callable[[int], Result]) -> list[Result]:
        """call(rank) on all ranks at once; a rank that fails frees the others from waiting for it."""

        def guarded(rank: int) -> Result:
            try:
                return call(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.world_size) as threads:
            futures = [threads.submit(guarded, rank) for rank in range(self.world_size)]
            errors = [future.exception() for future in futures]
            for error in errors:
                if error is not None and not isinstance(error, threading.BrokenBarrierError):
                    raise error
            return [future.result() for future in futures]


class ThreadCollectives:
    """Implements `parallel.Collectives` for one rank of a group."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._exchange(x)).sum(0))

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        parts = self._exchange(x)
        assert [part.shape[1] for part in parts] == sizes
        return torch.cat(parts, dim=1)

    def agree(self, value: int) -> int:
        return int(torch.stack(self._exchange(torch.tensor(value))).min())

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._group.slots[self._rank] = x.clone()
        self._group.barrier.wait()
        slots = list(self._group.slots)
        # Nobody writes its next tensor before all have read this one.
        self._group.barrier.wait()
        return slots
