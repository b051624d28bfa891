# SPDX-License-Identifier: Apache-2.0
"""Linear layers on a GPU with what stands around them: the norm in front, the activation or residual sum behind.

    out = activation(W norm(x) + bias)        or        x += W a + bias

Which kernels do it depends on the number of tokens: weight times vector for one, a skinny GEMM for a few, both with
everything folded in, a tiled GEMM with the gate folded in for some hundreds, and cuBLAS between separate kernels for
more. The limits and tile sizes are measured ones, see `GEMV_TILES`, `SKINNY_TILES` and `TILED_TOKENS`; shapes that are
not listed use the nearest sensible choice. All buffers are given, so that everything can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mii_zmq.kernels.triton.elementwise import ACTIVATION_NUMBERS, activation_kernel
from mii_zmq.kernels.triton.gemv import gemv_kernel
from mii_zmq.kernels.triton.norm import add_norm_kernel, norm_add_kernel
from mii_zmq.kernels.triton.skinny_gemm import skinny_gemm_kernel
from mii_zmq.worker.models.cuda_gemm import MANY, TiledGemm, launch_options

ACTIVATION_TILE = 2048


@dataclass(frozen=True)
class GemvTiles:
    """Tile sizes of the weight times vector kernel."""

    rows: int
    tile_k: int
    num_warps: int
    pdl: bool = False
    """Measured slower in a whole step: waiting programs take the place of working ones."""


@dataclass(frozen=True)
class SkinnyTiles:
    """Tile sizes of the skinny GEMM."""

    tile_n: int
    tile_k: int
    split_k: int
    stages: int
    num_warps: int = 4


GEMV_TILES: dict[tuple[int, int, bool], GemvTiles] = {
    (6144, 4096, False): GemvTiles(2, 2048, 8),
    (4096, 4096, False): GemvTiles(1, 2048, 8),
    (14336, 4096, True): GemvTiles(1, 4096, 4),
    (4096, 14336, False): GemvTiles(2, 2048, 4),
}
"""(N, K, gated) -> the fastest on an H200."""
SKINNY_TILES: dict[tuple[int, int, bool], dict[int, SkinnyTiles]] = {
    (6144, 4096, False): {
        16: SkinnyTiles(64, 128, 2, 4),
        32: SkinnyTiles(64, 128, 1, 4),
        64: SkinnyTiles(64, 128, 1, 4),
        128: SkinnyTiles(64, 128, 1, 4),
    },
    (4096, 4096, False): {16: SkinnyTiles(64, 256, 2, 3), 32: SkinnyTiles(64, 128, 1, 6)},
    (14336, 4096, True): {
        16: SkinnyTiles(64, 128, 1, 3),
        32: SkinnyTiles(64, 64, 1, 4),
        64: SkinnyTiles(64, 64, 1, 4),
        128: SkinnyTiles(128, 64, 1, 4, num_warps=8),
    },
    (4096, 14336, False): {
        16: SkinnyTiles(64, 256, 2, 3),
        32: SkinnyTiles(64, 256, 2, 3),
        64: SkinnyTiles(64, 256, 2, 3),
        128: SkinnyTiles(64, 128, 2, 4),
    },
}
"""(N, K, gated) -> padded number of tokens -> the fastest on an H200, where it beats cuBLAS and what surrounds it."""
TILED_TOKENS: dict[tuple[int, int], int] = {(14336, 4096): 1024}
"""(N, K) of a gated matrix -> up to so many tokens the tiled GEMM beats cuBLAS and the activation behind it."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_layer_norm: bool

    @property
    def is_plain_rms(self) -> bool:
        return not self.is_layer_norm and self.bias is None

    def run(self, x: Tensor, out: Tensor, pdl: bool) -> None:
        width = x.shape[1]
        add_norm_kernel[(x.shape[0],)](
            x, None, self.weight, self.bias, out, x.stride(0), 0, out.stride(0), self.eps, 0.0,
            D=width, D_PAD=triton.next_power_of_2(width), IS_LAYER_NORM=self.is_layer_norm, HAS_RESIDUAL=False,
            STORE_RESIDUAL=False, HAS_BIAS=self.bias is not None, PDL=pdl, num_warps=8 if width > 2048 else 4,
            **launch_options(pdl),
        )  # fmt: skip

    def absorb(self, delta: Tensor, x: Tensor, out: Tensor, pdl: bool) -> None:
        """x += delta; out = norm(x)."""
        width = x.shape[1]
        add_norm_kernel[(x.shape[0],)](
            delta, x, self.weight, self.bias, out, delta.stride(0), x.stride(0), out.stride(0), self.eps, 0.0,
            D=width, D_PAD=triton.next_power_of_2(width), IS_LAYER_NORM=self.is_layer_norm, HAS_RESIDUAL=True,
            STORE_RESIDUAL=True, HAS_BIAS=self.bias is not None, PDL=pdl, num_warps=8 if width > 2048 else 4,
            **launch_options(pdl),
        )  # fmt: skip

    def add_to(self, delta: Tensor, x: Tensor, following: Norm | None, out: Tensor, pdl: bool) -> None:
        """x += norm(delta); out = following(x), where there is one: of the same kind, with a bias or without alike."""
        width = x.shape[1]
        after = following or Norm(self.weight, self.bias, self.eps, self.is_layer_norm)
        norm_add_kernel[(x.shape[0],)](
            delta, self.weight, self.bias, x, after.weight, after.bias, out, delta.stride(0), x.stride(0),
            out.stride(0), self.eps,
            D=width, D_PAD=triton.next_power_of_2(width), IS_LAYER_NORM=self.is_layer_norm,
            HAS_BIAS=self.bias is not None, HAS_NEXT=following is not None, PDL=pdl,
            num_warps=8 if width > 2048 else 4, **launch_options(pdl),
        )  # fmt: skip


@dataclass(frozen=True)
class Scratch:
    """Buffers that all linears of a model share; a step's tokens are their first rows."""

    normed: Tensor
    """[T, hidden]."""
    wide: Tensor
    """[T, up rows]: the MLP before its activation."""
    partial: Tensor
    """float32 sums of a split skinny GEMM."""
    counters: Tensor
    """int32, zero between kernels."""

    def wide_rows(self, width: int) -> Tensor:
        """`wide` with rows of so many elements."""
        num_rows = self.wide.shape[0]
        return self.wide.view(-1)[: num_rows * width].view(num_rows, width)


class FusedLinear:
    """One weight matrix and its surroundings."""

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
    ) -> None:
        self.weight, self._bias, self._scratch = weight, bias, scratch
        self._transposed = weight.t()
        self._norm, self._activation, self._gated, self._adds = norm, activation, gated, adds_to_out
        self._pdl = pdl
        self._num_out = weight.shape[0] // 2 if gated else weight.shape[0]
        self._wide = None if activation is None else scratch.wide_rows(weight.shape[0])
        width = weight.shape[1]
        # What the small kernels fold in: RMSNorm, and silu of a gate; the rest takes the general way.
        folds_gate = can_fold_gate(activation, gated, bias)
        can_fold = (norm is None or not norm.is_layer_norm) and (activation is None or folds_gate)
        key = (self._num_out, width, gated)
        self._gemv = GEMV_TILES.get(key, _default_gemv(width)) if can_fold else None
        self._skinny = SKINNY_TILES.get(key, {}) if can_fold else {}
        self._tiled: TiledGemm | None = None
        self._tiled_tokens = TILED_TOKENS.get((self._num_out, width), 0) if folds_gate else 0
        if self._tiled_tokens:
            self._tiled = TiledGemm(weight, None, gated=True, adds_to_out=adds_to_out, pdl=pdl)

    def run(self, x: Tensor, out: Tensor) -> None:
        """Tokens of `x` [T, K] into `out` [T, N]."""
        num_tokens = x.shape[0]
        if num_tokens == 1 and self._gemv is not None:
            self._run_gemv(x, out, self._gemv)
        elif (tiles := self._skinny.get(padded_tokens(num_tokens))) is not None:
            self._run_skinny(x, out, tiles)
        elif self._tiled is not None and num_tokens <= self._tiled_tokens:
            self._tiled.run(self._normed(x), out, MANY)
        else:
            self._run_vendor(self._normed(x), out)

    def _normed(self, x: Tensor) -> Tensor:
        if self._norm is None:
            return x
        normed = self._scratch.normed[: x.shape[0]]
        self._norm.run(x, normed, self._pdl)
        return normed

    def _run_gemv(self, x: Tensor, out: Tensor, tiles: GemvTiles) -> None:
        pdl = self._pdl and tiles.pdl
        norm = self._norm
        gemv_kernel[(triton.cdiv(self._num_out, tiles.rows),)](
            x, self.weight, None if norm is None else norm.weight, self._bias, out if self._adds else None, out,
            0.0 if norm is None else norm.eps, 0.0, self._num_out,
            K=self.weight.shape[1], ROWS=tiles.rows, TILE_K=tiles.tile_k, NORM=norm is not None, GATED=self._gated,
            HAS_BIAS=self._bias is not None, HAS_RESIDUAL=self._adds, PDL=pdl, num_warps=tiles.num_warps,
            **launch_options(pdl),
        )  # fmt: skip

    def _run_skinny(self, x: Tensor, out: Tensor, tiles: SkinnyTiles) -> None:
        num_tokens, width = x.shape
        pdl = self._pdl
        x = self._normed(x)
        padded = padded_tokens(num_tokens)
        x_descriptor = weight_descriptor = None
        if self._pdl:
            # Rows beyond the tokens are filled with zeros by the copy engine.
            x_descriptor = TensorDescriptor(x, list(x.shape), list(x.stride()), [padded, tiles.tile_k])
            weight = self.weight
            weight_descriptor = TensorDescriptor(
                weight, list(weight.shape), list(weight.stride()), [tiles.tile_n, tiles.tile_k]
            )
        skinny_gemm_kernel[(triton.cdiv(self._num_out, tiles.tile_n), tiles.split_k)](
            x, x_descriptor, self.weight, weight_descriptor, self._bias, out, self._scratch.partial,
            self._scratch.counters, num_tokens, x.stride(0), out.stride(0),
            N=self._num_out, K=width, M_PAD=padded, TILE_N=tiles.tile_n, TILE_K=tiles.tile_k, SPLIT_K=tiles.split_k,
            GATED=self._gated, HAS_BIAS=self._bias is not None, HAS_RESIDUAL=self._adds, STAGES=tiles.stages,
            USE_TMA=self._pdl, PDL=pdl, num_warps=tiles.num_warps,
            **launch_options(pdl),
        )  # fmt: skip

    def _run_vendor(self, x: Tensor, out: Tensor) -> None:
        num_tokens = x.shape[0]
        if self._adds:
            out.addmm_(x, self._transposed)
            if self._bias is not None:
                out.add_(self._bias)
            return
        target = out if self._wide is None else self._wide[:num_tokens]
        if self._bias is None:
            torch.mm(x, self._transposed, out=target)
        else:
            torch.addmm(self._bias, x, self._transposed, out=target)
        if self._activation is not None:
            run_activation(target, out, self._activation, self._gated, self._pdl)


def can_fold_gate(activation: str | None, gated: bool, bias: Tensor | None) -> bool:
    """Whether the kernels that multiply know the activation as well: silu of a gate, without a bias."""
    return gated and activation == "silu" and bias is None


def run_activation(x: Tensor, out: Tensor, name: str, gated: bool, pdl: bool) -> None:
    """activation(x), times the second half of x if `gated`, into `out`."""
    num_tokens, width = out.shape
    activation_kernel[(num_tokens, triton.cdiv(width, ACTIVATION_TILE))](
        x, out, I=width, TILE=ACTIVATION_TILE, GATED=gated, KIND=ACTIVATION_NUMBERS[name], PDL=pdl, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip


def split_sizes() -> tuple[int, int]:
    """Elements that the partial sums and the counters of split skinny GEMMs need at most."""
    sums = counters = 0
    for (num_out, _, gated), by_tokens in SKINNY_TILES.items():
        for padded, tiles in by_tokens.items():
            counters = max(counters, triton.cdiv(num_out, tiles.tile_n))
            if tiles.split_k > 1:
                sums = max(sums, tiles.split_k * (2 if gated else 1) * padded * num_out)
    return max(sums, 1), max(counters, 1)


def padded_tokens(num_tokens: int) -> int:
    """Columns of the tensor core that so many tokens take."""
    return max(16, int(triton.next_power_of_2(num_tokens)))


def _default_gemv(width: int) -> GemvTiles:
    tile_k = min(2048, triton.next_power_of_2(width))
    return GemvTiles(max(1, 4096 // tile_k), tile_k, 4)
