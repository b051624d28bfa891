# SPDX-License-Identifier: Apache-2.0
"""A rank's place among those that share one copy of the model, and its share of a dimension.

One rank per group runs today; the loader already slices by `RankInfo`, so that more ranks change no file format.
"""

from __future__ import annotations

from dataclasses import dataclass

from mii_zmq.errors import ModelUnsupported


@dataclass(frozen=True)
class RankInfo:
    """Rank `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")

    def share(self, count: int, what: str) -> int:
        """How many of `count` things each rank holds.

        Raises:
            ModelUnsupported: they cannot be shared evenly.
        """
        if count % self.world_size:
            raise ModelUnsupported(f"{count} {what} cannot be shared by {self.world_size} ranks")
        return count // self.world_size

    def span(self, count: int, what: str) -> tuple[int, int]:
        """[start, stop) of this rank's share."""
        size = self.share(count, what)
        return self.rank * size, (self.rank + 1) * size
