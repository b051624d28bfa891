# SPDX-License-Identifier: Apache-2.0
"""All-reduce over peer memory: every rank reads the others' buffers itself, in rank order, so all get the same bits.

    one-shot   y = sum_r x_r                        every rank reads all of every rank; fewest steps, for small tensors
    two-shot   rank k sums its share of the parts, then everyone collects the shares; least traffic, for larger ones

A rank's symmetric buffer, mapped by every peer, is [flags | half 0 | half 1]. A program writes its part of x into its
own half, tells its counterparts on the other ranks, waits for theirs and reads. Which half that is alternates with the
call (`epoch`), so that nothing has to be waited for after reading: who writes a half again has seen, through the call
in between, that every peer had begun that call and so ended the one before. The epoch lives in device memory, because a
captured graph replays the same arguments, and its last program raises it by two. Flags hold the epoch last reached, per
program and rank; comparisons are differences, so that wrapping does no harm.

The grid must fit on the device at once and be the same on all ranks, as must the order of calls. `PHASES` and `SYNC`
exist for running the phases of several ranks one after the other in one process: 1 publish, 2 reduce, 4 collect.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PUBLISH, REDUCE, COLLECT, ALL = 1, 2, 4, 7
FLAG_BYTES = 64 * 1024
"""Of int32 flags at the beginning of a buffer: [MAX_PROGRAMS, world size]."""
MAX_PROGRAMS = 1024


@triton.jit
def _meet(buffers_ptr, epoch, rank, WORLD: tl.constexpr):
    """Tell this program's counterparts that `epoch` is reached and wait for theirs; what they wrote is seen then."""
    pid = tl.program_id(0)
    # The stores of all threads of this program come before the flag.
    tl.debug_barrier()
    for peer in tl.static_range(WORLD):
        flags = tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + pid * WORLD + rank, epoch, sem="release", scope="sys")
    own = tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(WORLD):
        reached = tl.atomic_add(own + pid * WORLD + peer, 0, sem="acquire", scope="sys")
        while reached - epoch < 0:
            reached = tl.atomic_add(own + pid * WORLD + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def _leave(epoch_ptr, epoch):
    """The last program to leave raises the epoch; until then all of this call have read the old one."""
    programs = tl.num_programs(0)
    if tl.atomic_add(epoch_ptr + 1, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(epoch_ptr + 1, 0)
        tl.store(epoch_ptr, epoch + 2)


@triton.jit
def _half(buffers_ptr, peer, epoch, half_elements, FLAGS: tl.constexpr, dtype: tl.constexpr):
    data = (tl.load(buffers_ptr + peer) + FLAGS).to(tl.pointer_type(dtype))
    return data + ((epoch >> 1) & 1) * half_elements


@triton.jit
def all_reduce_norm_kernel(
    x_ptr,  # [T, D], the partial sums; overwritten with their sum unless NORM
    buffers_ptr,  # [WORLD] int64, addresses of the ranks' symmetric buffers
    epoch_ptr,  # [2] int32: epoch, programs of this call that have left
    residual_ptr,  # [T, D] if NORM: read, written with s
    weight_ptr,  # [D] if NORM
    out_ptr,  # [T, D] if NORM: s / sqrt(mean(s^2) + eps) * (weight + offset), s = residual + sum
    x_stride,
    residual_stride,
    out_stride,
    num_tokens,
    half_elements,
    rank,
    eps,
    offset,
    WORLD: tl.constexpr,
    FLAGS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    NORM: tl.constexpr,
    PHASES: tl.constexpr,
    SYNC: tl.constexpr,
    PDL: tl.constexpr,
):
    """One-shot; a program takes every num_programs-th token. `s` is rounded to the residual's dtype, as unfused."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    offs = tl.arange(0, D_PAD)
    mask = offs < D
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    epoch = tl.load(epoch_ptr)
    first = tl.program_id(0).to(tl.int64)
    if PHASES & 1:
        own = _half(buffers_ptr, rank, epoch, half_elements, FLAGS, dtype)
        for token in range(first, num_tokens, tl.num_programs(0)):
            x = tl.load(x_ptr + token * x_stride + offs, mask=mask)
            tl.store(tl.multiple_of(own + token * D + offs, 16), x, mask=mask)
    if SYNC:
        _meet(buffers_ptr, epoch + 1, rank, WORLD)
    if PHASES & 2:
        for token in range(first, num_tokens, tl.num_programs(0)):
            s = tl.zeros([D_PAD], tl.float32)
            for peer in tl.static_range(WORLD):
                half = _half(buffers_ptr, peer, epoch, half_elements, FLAGS, dtype)
                # Past the first-level cache, which may hold what an earlier call left there.
                part = tl.load(tl.multiple_of(half + token * D + offs, 16), mask=mask, other=0.0, cache_modifier=".cg")
                s += part.to(tl.float32)
            if NORM:
                residual = residual_ptr + token * residual_stride + offs
                # The sum is rounded first, so that the result is that of the unfused operations.
                s = s.to(dtype).to(tl.float32) + tl.load(residual, mask=mask, other=0.0).to(tl.float32)
                s = s.to(residual_ptr.dtype.element_ty)
                tl.store(residual, s, mask=mask)
                s = s.to(tl.float32)
                scale = tl.rsqrt(tl.sum(s * s, 0) / D + eps)
                y = s * scale * (tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32) + offset)
                out = out_ptr + token * out_stride + offs
                tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)
            else:
                tl.store(x_ptr + token * x_stride + offs, s.to(dtype), mask=mask)
    if SYNC:
        _leave(epoch_ptr, epoch)


@triton.jit
def two_shot_all_reduce_kernel(
    x_ptr,  # [N] contiguous: overwritten with the sum
    buffers_ptr,  # [WORLD] int64
    epoch_ptr,  # [2] int32
    num_elements,
    half_elements,
    rank,
    WORLD: tl.constexpr,
    FLAGS: tl.constexpr,
    TILE: tl.constexpr,
    PHASES: tl.constexpr,
    SYNC: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes every num_programs-th run of WORLD tiles; tile k of a run is summed by rank k, in its own buffer:
    nobody else reads that tile of that buffer before it is the sum."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    offs = tl.arange(0, TILE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    epoch = tl.load(epoch_ptr)
    first = tl.program_id(0).to(tl.int64)
    num_runs = tl.cdiv(num_elements, WORLD * TILE)
    own = _half(buffers_ptr, rank, epoch, half_elements, FLAGS, dtype)
    if PHASES & 1:
        for run in range(first, num_runs, tl.num_programs(0)):
            for tile in tl.static_range(WORLD):
                at = (run * WORLD + tile) * TILE + offs
                tl.store(
                    tl.multiple_of(own + at, 16), tl.load(x_ptr + at, mask=at < num_elements), mask=at < num_elements
                )
    if SYNC:
        _meet(buffers_ptr, epoch + 1, rank, WORLD)
    if PHASES & 2:
        for run in range(first, num_runs, tl.num_programs(0)):
            at = (run * WORLD + rank) * TILE + offs
            s = tl.zeros([TILE], tl.float32)
            for peer in tl.static_range(WORLD):
                half = _half(buffers_ptr, peer, epoch, half_elements, FLAGS, dtype)
                s += tl.load(tl.multiple_of(half + at, 16), mask=at < num_elements, other=0.0, cache_modifier=".cg").to(
                    tl.float32
                )
            tl.store(tl.multiple_of(own + at, 16), s.to(dtype), mask=at < num_elements)
    if SYNC:
        _meet(buffers_ptr, epoch + 2, rank, WORLD)
    if PHASES & 4:
        for run in range(first, num_runs, tl.num_programs(0)):
            for tile in tl.static_range(WORLD):
                at = (run * WORLD + tile) * TILE + offs
                half = _half(buffers_ptr, tile, epoch, half_elements, FLAGS, dtype)
                s = tl.load(tl.multiple_of(half + at, 16), mask=at < num_elements, cache_modifier=".cg")
                tl.store(x_ptr + at, s, mask=at < num_elements)
    if SYNC:
        _leave(epoch_ptr, epoch)
