# SPDX-License-Identifier: Apache-2.0
"""Which heads, channels, experts and vocabulary rows of a model one rank holds.

Key/value heads go to the ranks whole, each with its query heads; where there are fewer of them than ranks, several
ranks repeat one and share its query heads. Nothing has to divide evenly: the first ranks take one more.
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
        heads, kv_heads = _head_spans(config, rank)
        moe = config.moe
        return cls(
            rank=rank,
            heads=heads,
            kv_heads=kv_heads,
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


def _head_spans(config: ModelConfig, rank: RankInfo) -> tuple[Span, Span]:
    num_kv_heads, size = config.num_kv_heads, rank.world_size
    group = config.num_heads // num_kv_heads
    if size <= num_kv_heads:
        start, stop = rank.span(num_kv_heads)
        return (start * group, stop * group), (start, stop)
    repeats, left = divmod(size, num_kv_heads)
    if left or repeats > group:
        raise ModelUnsupported(
            f"{config.num_heads} attention heads over {num_kv_heads} key/value heads cannot be shared by {size} ranks; "
            f"use a tensor_parallel of at most {num_kv_heads}, or a multiple of it up to {config.num_heads}"
        )
    kv_head, place = divmod(rank.rank, repeats)
    start, stop = RankInfo(place, repeats).span(group)
    return (kv_head * group + start, kv_head * group + stop), (kv_head, kv_head + 1)
