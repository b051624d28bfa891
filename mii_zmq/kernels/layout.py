# SPDX-License-Identifier: Apache-2.0
"""The shapes that kernels agree on: one layer of the KV pool, and the ragged batch seen by attention.

Knows nothing of sequences, slots of the executor or models. A *tile* is the [token, dim] plane of one (block, layer,
k or v, kv head); it is contiguous, and tile numbers are 64-bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class KvLayer:
    """One layer of the KV pool, as views of the slab."""

    blocks: Tensor
    """[B, 2, Hk, block_size, D]: keys at 0, values at 1."""
    cells: Tensor = field(init=False)
    """[B, block_size, 2, Hk, D]: the same memory, indexed by token cell."""
    tiles: Tensor = field(init=False)
    """[N, block_size * D]: the slab from this layer's first tile on; tile (block, kv, head) of this layer is row
    `block * tiles_per_block + kv * Hk + head`."""
    tiles_per_block: int = field(init=False)

    def __post_init__(self) -> None:
        num_blocks, _, num_kv_heads, block_size, head_dim = self.blocks.shape
        tile = block_size * head_dim
        tiles_per_block = self.blocks.stride(0) // tile if num_blocks > 1 else 2 * num_kv_heads
        rows = (num_blocks - 1) * tiles_per_block + 2 * num_kv_heads
        object.__setattr__(self, "cells", self.blocks.permute(0, 3, 1, 2, 4))
        object.__setattr__(self, "tiles", self.blocks.as_strided((rows, tile), (tile, 1)))
        object.__setattr__(self, "tiles_per_block", tiles_per_block)


@dataclass(frozen=True)
class RaggedLayout:
    """Which tokens of a step belong to which sequence, and where each sequence's keys and values lie.

    Row r owns the tokens query_start_loc[r] .. query_start_loc[r + 1] of the flattened batch; they are the last ones
    of its `seq_lens[r]` tokens. Attention runs fastest when one-token rows come first, by ascending length.
    """

    query_start_loc: np.ndarray
    """[R + 1] int64."""
    seq_lens: np.ndarray
    """[R] int64, this step's tokens included."""
    block_tables: np.ndarray
    """[R, W] int64; entries behind ceil(seq_len / block_size) are not read."""
    block_size: int

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])


@dataclass(frozen=True)
class CellMapping:
    """The KV cell of each token of a step."""

    block_ids: Tensor
    """[T] int64."""
    offsets: Tensor
    """[T] int64, within the block."""


@dataclass(frozen=True)
class AttentionShape:
    """Facts of one model's attention that do not change from step to step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    tiles_per_block: int
    dtype: torch.dtype
    device: torch.device
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they stay."""
    alibi_slopes: Tensor | None = None
    """[Hq] float32: slope * (key position - query position) is added to each scaled score."""


@dataclass(frozen=True)
class MoeShape:
    """Facts of one model's mixture of experts."""

    top_k: int
    renormalise: bool
    """The chosen weights are divided by their sum."""
    first_expert: int
    """Of those that this rank holds; tokens routed to others contribute nothing here."""
