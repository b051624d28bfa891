# SPDX-License-Identifier: Apache-2.0
"""Cases of `bench_kernels`: linear layers with what stands around them, by the engine's own choice of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from kernel_case import (
    DEVICE,
    DTYPE,
    F32,
    F64,
    I32,
    IS_INTERPRETED,
    NAN,
    SHAPE,
    Build,
    Builds,
    Case,
    Check,
    error,
    num_sets,
    pick,
    poisoned,
    randn,
)
from torch import Tensor
from torch.nn import functional

from mii_zmq.worker.models.cuda_buffers import Card
from mii_zmq.worker.models.cuda_invariant_linear import InvariantLinear
from mii_zmq.worker.models.cuda_linear import (
    SKINNY_TILES,
    TILED_TOKENS,
    FusedLinear,
    Norm,
    Scratch,
    SkinnyTiles,
    padded_tokens,
    split_sizes,
)

EPS = 1e-5
CARD = Card(2, is_hopper=False) if IS_INTERPRETED else None


@dataclass(frozen=True)
class Matrix:
    """One of a layer's, or the head."""

    name: str
    num_out: int
    width: int
    has_norm: bool = False
    is_gated: bool = False
    adds: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_out * (2 if self.is_gated else 1)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.width * DTYPE.itemsize


MATRICES = (
    Matrix("qkv", SHAPE.qkv_heads * SHAPE.head_dim, SHAPE.hidden, has_norm=True),
    Matrix("out", SHAPE.hidden, SHAPE.heads * SHAPE.head_dim, adds=True),
    Matrix("gate+up", SHAPE.ffn, SHAPE.hidden, has_norm=True, is_gated=True),
    Matrix("down", SHAPE.hidden, SHAPE.ffn, adds=True),
    Matrix("head", SHAPE.vocab, SHAPE.hidden, has_norm=True),
)
if IS_INTERPRETED:
    for matrix, split_k in zip(MATRICES[:4], (1, 2, 1, 2), strict=True):
        SKINNY_TILES[matrix.num_out, matrix.width, matrix.is_gated] = {16: SkinnyTiles(16, 16, split_k, 1)}


def linear_cases() -> Builds:
    builds: list[Build] = []
    for matrix in MATRICES:
        builds += [partial(fused_case, matrix, tokens) for tokens in pick((1, 8, 32, 64, 128, 256), (1, 5, 20))]
    for matrix in MATRICES:
        # Prompts, where the ordinary mode uses cuBLAS.
        many = pick((2048,), ())
        builds += [partial(invariant_case, matrix, tokens) for tokens in (*pick((1, 64, 256), (3,)), *many)]
    for build in builds:
        name, (matrix, tokens) = build.func.__name__, build.args  # type: ignore[attr-defined]
        yield f"{name.removesuffix('_case')} {matrix.name} {tokens}", build


def fused_case(matrix: Matrix, tokens: int) -> Case:
    """The engine's choice; where it is not cuBLAS, that is timed beside it."""
    layers = [make_layer(FusedLinear, matrix, tokens) for _ in range(num_sets(matrix.num_bytes, 16))]
    path = chosen_path(matrix, tokens)
    rivals = []
    for layer in layers if path != "cuBLAS" else []:
        rivals.append(make_linear(FusedLinear, matrix, tokens, layer.weight, layer.norm))
        # Without these, a linear takes cuBLAS with separate kernels around it.
        rivals[-1]._gemv, rivals[-1]._skinny, rivals[-1]._tiled = None, {}, None
    return linear_case(path, matrix, tokens, layers, rivals)


def invariant_case(matrix: Matrix, tokens: int) -> Case:
    layers = [make_layer(InvariantLinear, matrix, tokens) for _ in range(num_sets(matrix.num_bytes, 16))]
    return linear_case("invariant_gemm", matrix, tokens, layers, [])


def chosen_path(matrix: Matrix, tokens: int) -> str:
    if tokens == 1:
        return "gemv"
    tiles = SKINNY_TILES.get((matrix.num_out, matrix.width, matrix.is_gated), {})
    if padded_tokens(tokens) in tiles:
        return "skinny_gemm"
    is_tiled = matrix.is_gated and tokens <= TILED_TOKENS.get((matrix.num_out, matrix.width), 0)
    return "invariant_gemm" if is_tiled else "cuBLAS"


@dataclass(frozen=True)
class Layer:
    """A linear and what it was made of."""

    weight: Tensor
    norm: Norm | None
    linear: FusedLinear | InvariantLinear


def make_layer(kind: type[FusedLinear] | type[InvariantLinear], matrix: Matrix, tokens: int) -> Layer:
    weight = randn(matrix.num_rows, matrix.width, scale=0.02)
    norm = Norm(randn(matrix.width), None, EPS, False) if matrix.has_norm else None
    return Layer(weight, norm, make_linear(kind, matrix, tokens, weight, norm))


def make_linear(kind: Any, matrix: Matrix, tokens: int, weight: Tensor, norm: Norm | None) -> Any:
    num_sums, num_counters = split_sizes()
    scratch = Scratch(
        normed=poisoned(tokens, matrix.width),
        wide=poisoned(tokens, matrix.num_rows),
        partial=poisoned(num_sums, dtype=F32),
        counters=torch.zeros(num_counters, dtype=I32, device=DEVICE),
    )
    card = CARD or Card.of(DEVICE)
    options = {"num_processors": card.num_processors} if kind is InvariantLinear else {}
    return kind(
        weight, None, scratch, norm=norm, activation="silu" if matrix.is_gated else None, gated=matrix.is_gated,
        adds_to_out=matrix.adds, pdl=card.is_hopper, **options,
    )  # fmt: skip


def runner(linears: list[Any], x: Tensor, out: Tensor) -> Callable[[int], None]:
    return lambda index: linears[index].run(x, out)


def linear_case(name: str, matrix: Matrix, tokens: int, layers: list[Layer], rivals: list[Any]) -> Case:
    x, out = randn(tokens, matrix.width), poisoned(tokens, matrix.num_out)
    if matrix.adds:
        out.normal_()
    launch = runner([layer.linear for layer in layers], x, out)

    def compute(dtype: torch.dtype, residual: Tensor) -> Tensor:
        y, norm = x.to(dtype), layers[0].norm
        if norm is not None:
            y = functional.rms_norm(y, y.shape[-1:], norm.weight.to(dtype), EPS)
        y = functional.linear(y, layers[0].weight.to(dtype))
        if matrix.is_gated:
            y = functional.silu(y[:, : matrix.num_out]) * y[:, matrix.num_out :]
        return y + residual.to(dtype) if matrix.adds else y

    def check() -> Check:
        residual = torch.randn_like(out)
        out.copy_(residual) if matrix.adds else out.fill_(NAN)
        launch(0)
        ref = compute(F64, residual)
        return Check(error(out, ref), error(compute(DTYPE, residual), ref))

    flops = 2 * tokens * matrix.num_rows * matrix.width
    shape = f"{matrix.name} {tokens} x {matrix.width} -> {matrix.num_rows}"
    return Case(
        name,
        shape,
        launch,
        len(layers),
        check,
        matrix.num_bytes,
        flops,
        rival=runner(rivals, x, out.clone()) if rivals else None,
    )
