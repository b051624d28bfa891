# SPDX-License-Identifier: Apache-2.0
"""A rank's place among those that share one copy of the model, its share of a dimension, and what ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RankInfo:
    """Rank `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")

    def span(self, count: int) -> tuple[int, int]:
        """[start, stop) of this rank's share of `count` things; the first ranks hold one more if it is uneven."""
        size, more = divmod(count, self.world_size)
        start = self.rank * size + min(self.rank, more)
        return start, start + size + (self.rank < more)


class Collectives(Protocol):
    """What the ranks of a group exchange in every step; all of them call the same things in the same order."""

    def reduce(self, x: Tensor) -> None:
        """Replace `x` by its sum over the ranks, the same bits on each."""

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """[R, own size] of every rank, side by side in rank order: [R, sum of sizes]."""

    def agree(self, value: int) -> int:
        """The smallest of the ranks' values."""
