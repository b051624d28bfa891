# SPDX-License-Identifier: Apache-2.0
"""Linear layers of the deterministic mode: what `FusedLinear` does, with rows that do not depend on each other.

The norm in front and the activation behind are kernels of their own, one program per token; between them runs one GEMM
kernel, in one of two tile sizes. Which one, depends on the number of tokens, and no bit of the result depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mii_zmq.kernels.triton.invariant_gemm import invariant_gemm_kernel
from mii_zmq.worker.models.cuda_linear import Norm, Scratch, launch_options, run_activation

GROUP = 8


@dataclass(frozen=True)
class InvariantTiles:
    """Tile sizes of the GEMM."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    num_warps: int


FEW = InvariantTiles(64, 32, 128, 4, 4)
"""Narrow, so that even a small matrix is spread over the whole card: with few tokens the bytes of weights count."""
MANY = InvariantTiles(128, 128, 64, 4, 8)
"""Large, so that every byte loaded is used often."""


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
        self.weight, self._bias, self._scratch = weight, bias, scratch
        self._norm, self._activation, self._gated, self._adds = norm, activation, gated, adds_to_out
        self._pdl = pdl
        self._num_processors = num_processors
        self._wide = None if activation is None else scratch.wide_rows(weight.shape[0])
        self._use_tma = pdl and is_aligned(weight)
        self._descriptors: dict[InvariantTiles, TensorDescriptor] = {}
        if self._use_tma:
            self._descriptors = {tiles: _descriptor(weight, tiles.tile_n, tiles.tile_k) for tiles in (FEW, MANY)}

    def run(self, x: Tensor, out: Tensor) -> None:
        """Tokens of `x` [T, K] into `out` [T, N]."""
        num_tokens = x.shape[0]
        if self._norm is not None:
            normed = self._scratch.normed[:num_tokens]
            self._norm.run(x, normed, self._pdl)
            x = normed
        target = out if self._wide is None else self._wide[:num_tokens]
        self.multiply(x, target, self.tiles(num_tokens))
        if self._activation is not None:
            run_activation(target, out, self._activation, self._gated, self._pdl)

    def tiles(self, num_tokens: int) -> InvariantTiles:
        """The large ones where they keep at least half of the card busy."""
        programs = triton.cdiv(num_tokens, MANY.tile_m) * triton.cdiv(self.weight.shape[0], MANY.tile_n)
        return MANY if num_tokens > FEW.tile_m and 2 * programs >= self._num_processors else FEW

    def multiply(self, x: Tensor, out: Tensor, tiles: InvariantTiles) -> None:
        """The matrix product alone."""
        (num_tokens, width), num_out = x.shape, self.weight.shape[0]
        use_tma = self._use_tma and is_aligned(x)
        grid = (triton.cdiv(num_tokens, tiles.tile_m) * triton.cdiv(num_out, tiles.tile_n),)
        invariant_gemm_kernel[grid](
            x, _descriptor(x, tiles.tile_m, tiles.tile_k) if use_tma else None, self.weight,
            self._descriptors.get(tiles) if use_tma else None, self._bias, out, num_tokens, num_out, width, x.stride(0),
            out.stride(0),
            TILE_M=tiles.tile_m, TILE_N=tiles.tile_n, TILE_K=tiles.tile_k, GROUP=GROUP,
            HAS_BIAS=self._bias is not None, HAS_RESIDUAL=self._adds, STAGES=tiles.stages, USE_TMA=use_tma,
            PDL=self._pdl, num_warps=tiles.num_warps, **launch_options(self._pdl),
        )  # fmt: skip


def is_aligned(matrix: Tensor) -> bool:
    """Whether the copy engine can address it: rows at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
