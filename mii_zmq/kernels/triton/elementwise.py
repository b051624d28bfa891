# SPDX-License-Identifier: Apache-2.0
"""Small kernels around the big ones: token embedding, activations, gathered rows, soft-capped logits."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ACTIVATION_NUMBERS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}


@triton.jit
def embed_kernel(
    id_ptr,  # [T] int32
    position_ptr,  # [T] int32
    embed_ptr,  # [V, D]
    table_ptr,  # [P, D] learned positions, unused unless HAS_POSITIONS
    out_ptr,  # [T, D]
    position_offset,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    SCALE: tl.constexpr,  # of the embedding
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, D_PAD)
    mask = offs < D
    row = tl.load(id_ptr + token).to(tl.int64)
    x = tl.load(embed_ptr + row * D + offs, mask=mask, other=0.0)
    if SCALE != 1.0:
        x = (x.to(tl.float32) * SCALE).to(out_ptr.dtype.element_ty)
    if HAS_POSITIONS:
        position = tl.load(position_ptr + token).to(tl.int64) + position_offset
        x += tl.load(table_ptr + position * D + offs, mask=mask, other=0.0)
    tl.store(out_ptr + token * D + offs, x, mask=mask)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """`KIND` is one of ACTIVATION_NUMBERS."""
    if KIND == 0:
        y = x * tl.sigmoid(x)
    elif KIND == 1:
        y = tl.maximum(x, 0.0)
    elif KIND == 2:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def activation_kernel(
    x_ptr,  # [T, 2 I] gate beside up, or [T, I]
    out_ptr,  # [T, I]
    I: tl.constexpr,  # noqa: E741
    TILE: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offs < I
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = x_ptr + token * (2 * I if GATED else I) + offs
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    y = activate(x, KIND)
    if GATED:
        y *= tl.load(source + I, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * I + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gather_rows_kernel(
    count_ptr,  # [1] int32: rows wanted
    index_ptr,  # [R] int32: their tokens
    a_ptr,  # [T, A]
    b_ptr,  # [T, B]
    a_out_ptr,  # [R, A]
    b_out_ptr,  # [R, B]
    A: tl.constexpr,
    B: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.load(index_ptr + row, mask=row < tl.load(count_ptr), other=0).to(tl.int64)
    row = row.to(tl.int64)
    offs = tl.arange(0, PAD)
    tl.store(a_out_ptr + row * A + offs, tl.load(a_ptr + token * A + offs, mask=offs < A), mask=offs < A)
    tl.store(b_out_ptr + row * B + offs, tl.load(b_ptr + token * B + offs, mask=offs < B), mask=offs < B)


@triton.jit
def softcap_kernel(
    x_ptr,  # [R, V] rows of stride, changed in place
    stride,
    softcap,
    V: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """softcap * tanh(x / softcap)"""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = offs < V
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    cell = x_ptr + row * stride + offs
    x = tl.load(cell, mask=mask, other=0.0).to(tl.float32)
    y = softcap * (2.0 / (1.0 + tl.exp2(-2.885390081777927 / softcap * x)) - 1.0)
    tl.store(cell, y.to(x_ptr.dtype.element_ty), mask=mask)
