# SPDX-License-Identifier: Apache-2.0
"""Residual addition fused with RMSNorm or LayerNorm, in front of it or behind.

    s = x + residual;  y = s / sqrt(mean(s^2) + eps) * (w + offset)              RMSNorm (Zhang and Sennrich, 2019)
    s = x + residual;  y = (s - mean(s)) / sqrt(var(s) + eps) * w + b            LayerNorm
    s = residual + norm(x);  y = next_norm(s)                                    the norm behind a layer's half

One program per token; the row stays in registers, statistics are float32. `s` can overwrite the residual.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def add_norm_kernel(
    x_ptr,  # [T, D]
    residual_ptr,  # [T, D], read if HAS_RESIDUAL, written with s if STORE_RESIDUAL
    weight_ptr,  # [D]
    bias_ptr,  # [D], unused unless HAS_BIAS
    out_ptr,  # [T, D]
    x_stride,
    residual_stride,
    out_stride,
    eps,
    offset,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STORE_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, D_PAD)
    mask = offs < D
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    s = tl.load(x_ptr + token * x_stride + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual_ptr + token * residual_stride + offs, mask=mask, other=0.0).to(tl.float32)
    if STORE_RESIDUAL:
        # The sum is rounded to the residual's dtype first, as an unfused implementation would see it.
        s = s.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + token * residual_stride + offs, s, mask=mask)
        s = s.to(tl.float32)
    if IS_LAYER_NORM:
        mean = tl.sum(s, 0) / D
        s = tl.where(mask, s - mean, 0.0)
    scale = tl.rsqrt(tl.sum(s * s, 0) / D + eps)
    y = s * scale * weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_stride + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _normalise(
    s, weight_ptr, bias_ptr, offs, mask, eps, D: tl.constexpr, IS_LAYER_NORM: tl.constexpr, HAS_BIAS: tl.constexpr
):
    if IS_LAYER_NORM:
        mean = tl.sum(s, 0) / D
        s = tl.where(mask, s - mean, 0.0)
    scale = tl.rsqrt(tl.sum(s * s, 0) / D + eps)
    y = s * scale * tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def norm_add_kernel(
    x_ptr,  # [T, D]
    weight_ptr,  # [D]
    bias_ptr,  # [D], unused unless HAS_BIAS
    residual_ptr,  # [T, D]: norm(x) is added to it
    next_weight_ptr,  # [D], unused unless HAS_NEXT
    next_bias_ptr,
    out_ptr,  # [T, D]: the next norm of the sum, unused unless HAS_NEXT
    x_stride,
    residual_stride,
    out_stride,
    eps,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    IS_LAYER_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, D_PAD)
    mask = offs < D
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    dtype = residual_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * x_stride + offs, mask=mask, other=0.0).to(tl.float32)
    # Norm and sum are each rounded, as unfused code rounds them.
    y = _normalise(x, weight_ptr, bias_ptr, offs, mask, eps, D, IS_LAYER_NORM, HAS_BIAS).to(dtype).to(tl.float32)
    residual = residual_ptr + token * residual_stride + offs
    s = (y + tl.load(residual, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    tl.store(residual, s, mask=mask)
    if HAS_NEXT:
        y = _normalise(
            s.to(tl.float32), next_weight_ptr, next_bias_ptr, offs, mask, eps, D, IS_LAYER_NORM, HAS_BIAS
        )  # fmt: skip
        tl.store(out_ptr + token * out_stride + offs, y.to(out_ptr.dtype.element_ty), mask=mask)
