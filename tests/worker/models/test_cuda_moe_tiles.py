# SPDX-License-Identifier: Apache-2.0
"""The choice of tile sizes: every item list fits its grid, and small steps still fill the card."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.worker.models.cuda_moe_tiles import FIXED_FEW, FIXED_MANY, MoeSizes, MoeTiles, choose_tiles

MIXTRAL = MoeSizes(8, 8, 2, 4096, 14336)
QWEN = MoeSizes(128, 128, 8, 2048, 768)


def programs(sizes: MoeSizes, tiles: MoeTiles, num_tokens: int) -> tuple[float, float]:
    hits = sizes.expected_hits(num_tokens)
    up = hits * -(-sizes.inner // tiles.up.tile_n) * tiles.up.split_k
    return up, hits * -(-sizes.hidden // tiles.down.tile_n) * tiles.down.split_k


@settings(max_examples=40, deadline=None)
@given(
    choices=st.lists(st.sets(st.integers(0, 8), min_size=3, max_size=3), max_size=70),
    held=st.integers(0, 9),
    tile_m=st.sampled_from([16, 32, 64, 128]),
)
def test_no_choice_makes_more_items_than_the_grid_holds(choices: list[set[int]], held: int, tile_m: int) -> None:
    counts = [sum(expert in chosen for chosen in choices) for expert in range(held)]
    items = sum(-(-count // tile_m) for count in counts)
    assert items <= MoeSizes(9, held, 3, 64, 64).max_items(len(choices), tile_m)


@pytest.mark.parametrize("sizes", [MIXTRAL, QWEN])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 16, 64, 256, 1024, 4096])
def test_the_card_is_filled(sizes: MoeSizes, num_tokens: int) -> None:
    tiles = choose_tiles(sizes, num_tokens, 132, False)
    assert min(programs(sizes, tiles, num_tokens)) >= 132
    assert tiles.up.split_k == 1, "an activation needs the whole sum"


def test_only_a_few_tokens_are_split() -> None:
    assert choose_tiles(MIXTRAL, 1, 132, False).down.split_k == 2
    assert all(choose_tiles(MIXTRAL, count, 132, False).down.split_k == 1 for count in (4, 64, 4096))


def test_items_grow_with_the_rows_per_expert() -> None:
    rows = [choose_tiles(MIXTRAL, count, 132, False).tile_m for count in (1, 16, 64, 128, 4096)]
    assert rows == [16, 16, 32, 64, 128]
    assert choose_tiles(QWEN, 64, 132, False).tile_m == 16


def test_deterministic_tiles_never_split() -> None:
    chosen = {choose_tiles(MIXTRAL, count, 132, True) for count in (1, 16, 64, 512, 4096)}
    assert chosen == {FIXED_FEW, FIXED_MANY}
    assert all(tiles.up.split_k == tiles.down.split_k == 1 for tiles in chosen)
