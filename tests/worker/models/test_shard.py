# SPDX-License-Identifier: Apache-2.0
"""The parts of a model that its ranks hold: together everything, key/value heads with their query heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mii_zmq.errors import ModelUnsupported
from mii_zmq.worker.models.random_weights import SHAPES
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.parallel import RankInfo


def shards(num_heads: int, num_kv_heads: int, world_size: int) -> list[Shard]:
    config = replace(SHAPES["tiny"], num_heads=num_heads, num_kv_heads=num_kv_heads)
    return [Shard.of(config, RankInfo(rank, world_size)) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "world_size"),
    [
        (32, 8, 2),
        (32, 8, 8),
        (32, 8, 16),
        (32, 8, 32),
        (9, 3, 2),
        (71, 1, 2),
        (71, 1, 8),
        (12, 12, 5),
        (6, 2, 6),
        (4, 2, 1),
    ],
)
def test_heads_are_shared_without_gap_or_overlap(num_heads: int, num_kv_heads: int, world_size: int) -> None:
    group = num_heads // num_kv_heads
    parts = shards(num_heads, num_kv_heads, world_size)
    assert [head for part in parts for head in range(*part.heads)] == list(range(num_heads))
    assert {head for part in parts for head in range(*part.kv_heads)} == set(range(num_kv_heads))
    for part in parts:
        assert {head // group for head in range(*part.heads)} == set(range(*part.kv_heads))
        # Kernels take a rank's query heads as equal groups.
        assert part.num_heads % part.num_kv_heads == 0
    sizes = [part.num_kv_heads for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "world_size"), [(32, 8, 12), (8, 4, 16), (6, 6, 7)])
def test_ranks_without_heads_are_refused(num_heads: int, num_kv_heads: int, world_size: int) -> None:
    with pytest.raises(ModelUnsupported, match=f"cannot be shared by {world_size} ranks"):
        shards(num_heads, num_kv_heads, world_size)
