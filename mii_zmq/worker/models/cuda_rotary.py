# SPDX-License-Identifier: Apache-2.0
"""Rotary tables on a GPU: cosines and sines by position, made once, one pair of tables per distinct embedding.

Where the frequencies depend on a sequence's length (`RopeConfig.border`), the row that a token takes, or the table
itself, is made once per step from the slots' lengths. Knows nothing of layers or attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from mii_zmq.kernels.triton.rope_length import dynamic_tables_kernel, longrope_rows_kernel
from mii_zmq.worker.cuda_batch import PackedLayout
from mii_zmq.worker.models.cuda_buffers import DeviceState
from mii_zmq.worker.models.rotary import inverse_frequencies
from mii_zmq.worker.models.spec import RopeConfig

ROWS_TILE, TABLE_TILE = 64, 16
"""Tokens per program."""


@dataclass(frozen=True)
class Rotation:
    """How the tokens of a step are rotated by the layers of one embedding."""

    cosines: Tensor | None
    """[rows, rotary_dim / 2] float32; None: no rotation."""
    sines: Tensor | None
    rows: Tensor
    """[T] int32: each token's row of the tables."""
    rotary_dim: int


class RotaryTables:
    """All rotary embeddings of a model."""

    def __init__(
        self,
        ropes: tuple[RopeConfig | None, ...],
        state: DeviceState,
        layout: PackedLayout,
        positions: Tensor,
        max_model_len: int,
    ) -> None:
        """`positions` [max_tokens] int32: of the step's tokens, for embeddings that know no length."""
        self._state, self._layout = state, layout
        self._positions = positions
        self._num_rows = max_model_len + 1
        self._per_step: list[Callable[[int], None]] = []
        made = {rope: self._make(rope) for rope in dict.fromkeys(ropes)}
        self.by_layer = [made[rope] for rope in ropes]

    def prepare(self, num_tokens: int) -> None:
        """Make what depends on the step: kernel launches, none where no embedding knows lengths."""
        for launch in self._per_step:
            launch(num_tokens)

    def _make(self, rope: RopeConfig | None) -> Rotation:
        if rope is None:
            return Rotation(None, None, self._positions, 0)
        if rope.border is None:
            return self._table(rope, [inverse_frequencies(rope)], self._positions)
        max_tokens, device = len(self._positions), self._positions.device
        if rope.kind == "longrope":
            both = [inverse_frequencies(rope), inverse_frequencies(rope, rope.border + 1)]
            rotation = self._table(rope, both, torch.zeros_like(self._positions))
            self._per_step.append(partial(self._choose_rows, rope, rotation))
        else:
            table = torch.zeros(max_tokens, rope.rotary_dim // 2, dtype=torch.float32, device=device)
            rows = torch.arange(max_tokens, dtype=torch.int32, device=device)
            rotation = Rotation(table, torch.zeros_like(table), rows, rope.rotary_dim)
            self._per_step.append(partial(self._fill_tables, rope, rotation))
        return rotation

    def _table(self, rope: RopeConfig, frequencies: list[Tensor], rows: Tensor) -> Rotation:
        device = self._positions.device
        position = torch.arange(self._num_rows, device=device).float()
        angles = torch.cat([torch.outer(position, part.to(device)) for part in frequencies])
        cosines, sines, factor = angles.cos(), angles.sin(), rope.attention_factor
        if factor != 1.0:
            cosines, sines = cosines.mul_(factor), sines.mul_(factor)
        return Rotation(cosines, sines, rows, rope.rotary_dim)

    def _choose_rows(self, rope: RopeConfig, rotation: Rotation, num_tokens: int) -> None:
        rows = self._layout.max_rows
        longrope_rows_kernel[(triton.cdiv(num_tokens, ROWS_TILE),)](
            self._state.packed, self._state.rope_lengths, rotation.rows, num_tokens, rope.border, self._num_rows,
            MAX_ROWS=rows, SEARCH_STEPS=rows.bit_length(), TILE=ROWS_TILE,
        )  # fmt: skip

    def _fill_tables(self, rope: RopeConfig, rotation: Rotation, num_tokens: int) -> None:
        rows, pairs = self._layout.max_rows, rope.rotary_dim // 2
        dynamic_tables_kernel[(triton.cdiv(num_tokens, TABLE_TILE),)](
            self._state.packed, self._state.rope_lengths, rotation.cosines, rotation.sines, num_tokens, rope.border,
            THETA=rope.theta, FACTOR=rope.factor, ATTENTION_FACTOR=rope.attention_factor, PAIRS=pairs,
            PAD=triton.next_power_of_2(pairs), MAX_ROWS=rows, SEARCH_STEPS=rows.bit_length(), TILE=TABLE_TILE,
        )  # fmt: skip
