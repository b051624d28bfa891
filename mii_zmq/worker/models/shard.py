# SPDX-License-Identifier: Apache-2.0
"""Which heads, channels, experts and vocabulary rows of a model one rank holds.

Query heads must divide evenly; key/value heads are repeated on several ranks where there are fewer of them than ranks.
Channels, experts and vocabulary rows may be shared unevenly, the first ranks taking one more.
"""

from __future__ import annotations

from dataclasses import dataclass

from mii_zmq.errors import ModelUnsupported
from mii_zmq.worker.models.spec import ModelConfig
from mii_zmq.worker.parallel import RankInfo

Span = tuple[int, int]
"""[start, stop)."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model."""

    rank: RankInfo
    heads: Span
    kv_heads: Span
    channels: Span
    """Of the dense MLP's intermediate size."""
    experts: Span
    shared_channels: Span
    """Of the shared expert's intermediate size."""
    vocab: Span

    @classmethod
    def of(cls, config: ModelConfig, rank: RankInfo) -> Shard:
        """Raises ModelUnsupported: the heads cannot be shared by so many ranks."""
        size = rank.world_size
        if config.num_heads % size:
            raise ModelUnsupported(
                f"{config.num_heads} attention heads cannot be shared by {size} ranks; use a tensor_parallel that "
                "divides them"
            )
        if config.num_kv_heads % size and size % config.num_kv_heads:
            raise ModelUnsupported(
                f"{config.num_kv_heads} key/value heads can be neither shared by nor repeated over {size} ranks; use "
                "a tensor_parallel that divides them or is a multiple of them"
            )
        num_held = max(1, config.num_kv_heads // size)
        first = rank.rank * config.num_kv_heads // size
        moe = config.moe
        return cls(
            rank=rank,
            heads=rank.span(config.num_heads),
            kv_heads=(first, first + num_held),
            channels=rank.span(config.intermediate_size),
            experts=rank.span(moe.num_experts) if moe else (0, 0),
            shared_channels=rank.span(moe.shared_intermediate_size) if moe else (0, 0),
            vocab=rank.span(config.vocab_size),
        )

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def num_channels(self) -> int:
        return self.channels[1] - self.channels[0]
