# SPDX-License-Identifier: Apache-2.0
"""Launches of the tiled GEMM: one weight matrix over any number of tokens, its gate folded in.

The deterministic mode multiplies everything with it; the ordinary one takes it where it beats cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mii_zmq.kernels.triton.invariant_gemm import invariant_gemm_kernel

GROUP = 8


@dataclass(frozen=True)
class GemmTiles:
    """Tile sizes of the GEMM."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    num_warps: int

    def stages_for(self, gated: bool, use_tma: bool) -> int:
        """A gate's tiles take more shared memory than cards without the copy engine have for all stages."""
        return self.stages if use_tma or not gated else self.stages - 1


FEW = GemmTiles(64, 32, 128, 4, 4)
"""Narrow, so that even a small matrix is spread over the whole card: with few tokens the bytes of weights count."""
MANY = GemmTiles(128, 128, 64, 4, 8)
"""Large, so that every byte loaded is used often."""


class TiledGemm:
    """One weight matrix, [N, K], or [2 N, K] where the first half's silu gates the second."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, gated: bool, adds_to_out: bool, pdl: bool) -> None:
        """`gated` takes no bias."""
        self._weight, self._bias, self._gated, self._adds, self._pdl = weight, bias, gated, adds_to_out, pdl
        self.num_out = weight.shape[0] // 2 if gated else weight.shape[0]
        self._use_tma = pdl and _is_aligned(weight)
        self._descriptors: dict[GemmTiles, TensorDescriptor] = {}
        if self._use_tma:
            self._descriptors = {tiles: _descriptor(weight, tiles.tile_n, tiles.tile_k) for tiles in (FEW, MANY)}

    def run(self, x: Tensor, out: Tensor, tiles: GemmTiles) -> None:
        """Tokens of `x` [T, K] into `out` [T, N]."""
        num_tokens, width = x.shape
        use_tma = self._use_tma and _is_aligned(x)
        grid = (triton.cdiv(num_tokens, tiles.tile_m) * triton.cdiv(self.num_out, tiles.tile_n),)
        invariant_gemm_kernel[grid](
            x, _descriptor(x, tiles.tile_m, tiles.tile_k) if use_tma else None, self._weight,
            self._descriptors.get(tiles) if use_tma else None, self._bias, out, num_tokens, self.num_out, width,
            x.stride(0), out.stride(0),
            TILE_M=tiles.tile_m, TILE_N=tiles.tile_n, TILE_K=tiles.tile_k, GROUP=GROUP, GATED=self._gated,
            HAS_BIAS=self._bias is not None, HAS_RESIDUAL=self._adds, STAGES=tiles.stages_for(self._gated, use_tma),
            USE_TMA=use_tma, PDL=self._pdl, num_warps=tiles.num_warps, **launch_options(self._pdl),
        )  # fmt: skip


def launch_options(pdl: bool) -> dict[str, bool]:
    """Programmatic dependent launch: the kernel may start before its predecessor ends."""
    return {"launch_pdl": True} if pdl else {}


def _is_aligned(matrix: Tensor) -> bool:
    """Whether the copy engine can address it: rows at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
