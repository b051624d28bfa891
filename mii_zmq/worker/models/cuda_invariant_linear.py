# SPDX-License-Identifier: Apache-2.0
"""Linear layers of the deterministic mode: what `FusedLinear` does, with rows that do not depend on each other.

The norm in front is a kernel of its own, one program per token, and so is an activation behind that is not the silu of
a gate; between them runs one GEMM kernel, in one of two tile sizes. Which one, depends on the number of tokens, and no
bit of the result depends on it.
"""

from __future__ import annotations

import triton
from torch import Tensor

from mii_zmq.worker.models.cuda_gemm import FEW, MANY, GemmTiles, TiledGemm
from mii_zmq.worker.models.cuda_linear import Norm, Scratch, can_fold_gate, run_activation


class InvariantLinear:
    """One weight matrix and its surroundings; the interface is that of `FusedLinear`."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        scratch: Scratch,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        gated: bool = False,
        adds_to_out: bool = False,
        pdl: bool = False,
        num_processors: int,
    ) -> None:
        self.weight, self._scratch, self._norm = weight, scratch, norm
        self._activation, self._gated, self._pdl, self._num_processors = activation, gated, pdl, num_processors
        folds = can_fold_gate(activation, gated, bias)
        self._wide = None if activation is None or folds else scratch.wide_rows(weight.shape[0])
        self._gemm = TiledGemm(weight, bias, gated=folds, adds_to_out=adds_to_out, pdl=pdl)

    def run(self, x: Tensor, out: Tensor) -> None:
        """Tokens of `x` [T, K] into `out` [T, N]."""
        num_tokens = x.shape[0]
        if self._norm is not None:
            normed = self._scratch.normed[:num_tokens]
            self._norm.run(x, normed, self._pdl)
            x = normed
        target = out if self._wide is None else self._wide[:num_tokens]
        self.multiply(x, target, self.tiles(num_tokens))
        if self._wide is not None and self._activation is not None:
            run_activation(target, out, self._activation, self._gated, self._pdl)

    def tiles(self, num_tokens: int) -> GemmTiles:
        """The large ones where they keep at least half of the card busy."""
        programs = triton.cdiv(num_tokens, MANY.tile_m) * triton.cdiv(self._gemm.num_out, MANY.tile_n)
        return MANY if num_tokens > FEW.tile_m and 2 * programs >= self._num_processors else FEW

    def multiply(self, x: Tensor, out: Tensor, tiles: GemmTiles) -> None:
        """The matrix product alone, with a gate that is folded in."""
        self._gemm.run(x, out, tiles)
