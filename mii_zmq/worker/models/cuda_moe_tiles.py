# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the experts' products, by what a step of so many tokens is expected to hit. Knows no tensors.

A pure function of the shape, the card and the number of tokens, because the choice is made when a graph is captured;
what tokens really hit is read by the kernels themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ProductTiles:
    """Of one of the two products."""

    tile_n: int
    tile_k: int
    stages: int
    num_warps: int
    split_k: int = 1
    tma: bool = False
    """Weights come through tensor descriptors (Hopper)."""


@dataclass(frozen=True)
class MoeTiles:
    tile_m: int
    """Rows per work item: an expert with more of them is read more often, though from the cache."""
    up: ProductTiles
    down: ProductTiles


@dataclass(frozen=True)
class MoeSizes:
    """One layer's numbers on one rank."""

    num_experts: int
    held: int
    top_k: int
    hidden: int
    inner: int

    def expected_hits(self, num_tokens: int) -> float:
        """Held experts that some token chooses, if choices are even."""
        return self.held * (1.0 - (1.0 - self.top_k / self.num_experts) ** num_tokens)

    def max_items(self, num_tokens: int, tile_m: int) -> int:
        """Most work items that so many tokens can make; a token chooses an expert at most once."""
        entries = num_tokens * self.top_k
        return min(self.held * -(-num_tokens // tile_m), entries // tile_m + min(self.held, entries))


STREAMING = {
    16: MoeTiles(16, ProductTiles(64, 128, 3, 4), ProductTiles(64, 256, 3, 4)),
    32: MoeTiles(32, ProductTiles(64, 64, 4, 4), ProductTiles(64, 256, 3, 4)),
    64: MoeTiles(64, ProductTiles(64, 64, 4, 4), ProductTiles(64, 128, 4, 4)),
}
"""Rows per item -> tiles where the bytes of the weights are the cost: those of the dense layers' skinny GEMM."""
COMPUTING = MoeTiles(128, ProductTiles(128, 64, 3, 8), ProductTiles(128, 64, 4, 8))
"""Where every byte loaded is used often."""
FIXED_FEW = MoeTiles(32, ProductTiles(64, 64, 4, 4), ProductTiles(64, 128, 4, 4))
FIXED_MANY = COMPUTING
"""Of the deterministic mode. Sums are the same in both: one chain over K in steps of the tensor core's depth."""
FILL = 1.4
"""Programs per multiprocessor that keep the whole card busy."""
NARROWEST = 16
SPLIT_TOKENS = 16
MAX_SPLIT = 4
"""The second product's sums are split over K at most so often, and only for so many tokens."""
SPLIT_STEPS = 8
"""A part of K is at least so many tiles."""


def choose_tiles(sizes: MoeSizes, num_tokens: int, num_processors: int, deterministic: bool) -> MoeTiles:
    """Items hold half as many rows again as an expert gets on average, so that few experts need two."""
    wanted = 1.5 * num_tokens * sizes.top_k / sizes.num_experts
    if deterministic:
        return FIXED_FEW if wanted <= FIXED_FEW.tile_m else FIXED_MANY
    tile_m = next((rows for rows in STREAMING if wanted <= rows or num_tokens <= rows), None)
    if tile_m is None:
        return COMPUTING
    tiles = STREAMING[tile_m]
    hits, programs = sizes.expected_hits(num_tokens), FILL * num_processors
    up, down = tiles.up, tiles.down
    while hits * -(-sizes.inner // up.tile_n) < programs and up.tile_n > NARROWEST:
        up = replace(up, tile_n=up.tile_n // 2)
    while hits * -(-sizes.hidden // down.tile_n) * down.split_k < programs:
        can_split = num_tokens <= SPLIT_TOKENS and down.split_k < MAX_SPLIT
        if can_split and sizes.inner >= 2 * down.split_k * down.tile_k * SPLIT_STEPS:
            down = replace(down, split_k=2 * down.split_k)
        elif down.tile_n > NARROWEST:
            down = replace(down, tile_n=down.tile_n // 2)
        else:
            break
    return MoeTiles(tile_m, up, down)
