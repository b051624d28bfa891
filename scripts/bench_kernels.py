# SPDX-License-Identifier: Apache-2.0
"""Checks and times every Triton kernel on one NVIDIA GPU, against an oracle and against what the card can give.

    python scripts/bench_kernels.py [--only NAME ...] [--replays N]

Each case draws fresh random inputs, poisons its outputs, compares with a float32 or float64 oracle (error =
‖out - ref‖ / ‖ref‖, beside the error of torch's own bfloat16 computation; for exact results the share of wrong
values), then times launches inside a CUDA graph that rotates over input sets larger than the L2 cache. One JSON line
per case: microseconds per launch, TB/s or TFLOP/s of the work that has to be done, and its share of the limit. The
last line sums up; the exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
import triton
from bench_sampling import sampling_cases
from kernel_case import (
    BF16,
    BLOCK,
    DEVICE,
    F32,
    F64,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    I32,
    KV_HEADS,
    NAN,
    VOCAB,
    Case,
    error,
    ints,
    randn,
    run_case,
    sets_for,
)
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from mii_zmq.kernels.triton.batch_inputs import HEADER, ITEM_WORDS, batch_inputs_kernel
from mii_zmq.kernels.triton.chunk_attention import chunk_attention_kernel
from mii_zmq.kernels.triton.decode_attention import decode_attention_kernel
from mii_zmq.kernels.triton.elementwise import ACTIVATION_NUMBERS, activation_kernel
from mii_zmq.kernels.triton.gemv import gemv_kernel
from mii_zmq.kernels.triton.norm import add_norm_kernel
from mii_zmq.kernels.triton.rope_kv import rope_kv_kernel


def paged_pool(batch: int, length: int, copies: int) -> tuple[Tensor, Tensor]:
    """Random K and V [blocks, 1, 2, KV_HEADS, BLOCK, HEAD_DIM] and block tables [copies, batch, blocks per row]."""
    width = triton.cdiv(length, BLOCK)
    count = copies * batch * width
    pool = torch.empty(count, 1, 2, KV_HEADS, BLOCK, HEAD_DIM, dtype=BF16, device=DEVICE).normal_()
    return pool, torch.randperm(count, device=DEVICE).int().view(copies, batch, width)


def read_pool(pool: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """K and V [KV_HEADS, length, HEAD_DIM] of the row whose blocks are `table`."""
    keys_values = pool[:, 0][table.long()]
    keys, values = keys_values.permute(1, 2, 0, 3, 4).reshape(2, KV_HEADS, -1, HEAD_DIM)[:, :, :length]
    return keys, values


def decode_cases() -> Iterator[Case]:
    for batch, length in ((1, 640), (16, 576), (64, 576), (256, 576), (64, 4096), (1, 8192)):
        yield decode_case(batch, length)


def decode_case(batch: int, length: int) -> Case:
    amount = 2 * batch * length * KV_HEADS * HEAD_DIM * 2
    copies = sets_for(amount, 32)
    pool, tables = paged_pool(batch, length, copies)
    query, out = randn(batch, HEADS * HEAD_DIM), torch.empty(batch, HEADS * HEAD_DIM, dtype=BF16, device=DEVICE)
    extra = 4 * torch.cuda.get_device_properties(DEVICE).multi_processor_count // KV_HEADS
    items = batch + extra
    packed = pack_rows([(slot, length - 1, 1) for slot in range(batch)], batch)
    records = torch.empty(items, ITEM_WORDS, dtype=I32, device=DEVICE)
    scratch = [torch.empty(batch, dtype=dtype, device=DEVICE) for dtype in (I32, I32, torch.int64)]
    launch_batch_inputs(
        packed, torch.zeros(batch, length, dtype=I32, device=DEVICE), tables[0], scratch, records, batch
    )
    group = HEADS // KV_HEADS
    partial = torch.empty(items * KV_HEADS * 16 * HEAD_DIM, dtype=F32, device=DEVICE)
    stats = torch.empty(items * KV_HEADS * 16 * 2, dtype=F32, device=DEVICE)
    counters = torch.zeros(batch * KV_HEADS, dtype=I32, device=DEVICE)
    stride = pool.stride()

    def launch(index: int) -> None:
        table = tables[index]
        decode_attention_kernel[(KV_HEADS, items)](
            query, pool, out, partial, stats, counters, table, records, None, query.stride(0), out.stride(0),
            table.stride(0), stride[0], 0, stride[2], HEAD_DIM**-0.5 * 1.4426950408889634, 1.0, 0,
            NUM_KV_HEADS=KV_HEADS, GROUP=group, GROUP_PAD=16, HEAD_DIM=HEAD_DIM, HEAD_PAD=HEAD_DIM, BLOCK_SIZE=BLOCK,
            TILE=64, HAS_WINDOW=False, HAS_SOFTCAP=False, HAS_ALIBI=False, STAGES=3,
            PDL=False, num_warps=4,
        )  # fmt: skip

    def check() -> tuple[float, float]:
        out.fill_(NAN)
        launch(0)
        rows = range(0, batch, max(1, batch // 8))
        refs, owns = [], []
        for row in rows:
            keys, values = read_pool(pool, tables[0, row], length)
            heads = query[row].view(KV_HEADS, group, HEAD_DIM)
            refs.append(functional.scaled_dot_product_attention(heads.double(), keys.double(), values.double()))
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                owns.append(functional.scaled_dot_product_attention(heads[None], keys[None], values[None]))
        ref = torch.stack(refs).view(len(rows), -1)
        return error(out[list(rows)], ref), error(torch.stack(owns).view(len(rows), -1), ref)

    return Case("decode_attention", f"{batch} x {length}", "read", amount, launch, copies, check)


def chunk_cases() -> Iterator[Case]:
    for length in (512, 2048, 8192):
        yield chunk_case(length)


def chunk_case(length: int, tile: int = 64) -> Case:
    pool, tables = paged_pool(1, length, 1)
    query, out = randn(length, HEADS * HEAD_DIM), torch.empty(length, HEADS * HEAD_DIM, dtype=BF16, device=DEVICE)
    tiles = triton.cdiv(length, tile)
    tile_rows, tile_starts = ints([0] * tiles), ints([tile * index for index in reversed(range(tiles))])
    slots, starts, begins, count = ints([0]), ints([0]), ints([0, length]), ints([tiles])
    stride, flat = pool.stride(), pool.view(-1, HEAD_DIM)
    use_tma = torch.cuda.get_device_capability()[0] >= 9
    descriptor = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [64, HEAD_DIM]) if use_tma else pool

    def launch(_: int) -> None:
        chunk_attention_kernel[(HEADS, tiles)](
            query, pool, descriptor, out, tables[0], slots, starts, begins, count, tile_rows, tile_starts, None,
            query.stride(0), out.stride(0), tables.stride(1), stride[0], 0, stride[2],
            HEAD_DIM**-0.5 * 1.4426950408889634, 1.0, 0,
            GROUP=HEADS // KV_HEADS, HEAD_DIM=HEAD_DIM, HEAD_PAD=HEAD_DIM, BLOCK_SIZE=BLOCK, TILE_M=tile, TILE_N=64,
            HAS_WINDOW=False, HAS_SOFTCAP=False, HAS_ALIBI=False, USE_TMA=use_tma, STAGES=3, num_warps=4,
        )  # fmt: skip

    def check() -> tuple[float, float]:
        out.fill_(NAN)
        launch(0)
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in read_pool(pool, tables[0, 0], length))
        heads = query.view(length, HEADS, HEAD_DIM).transpose(0, 1)
        rows = torch.cat([ints([0, length - 1], torch.int64), torch.randint(0, length, (126,), device=DEVICE)])
        visible = torch.arange(length, device=DEVICE) <= rows[:, None]
        ref = functional.scaled_dot_product_attention(heads[:, rows].double(), keys.double(), values.double(), visible)
        own = functional.scaled_dot_product_attention(heads[None], keys[None], values[None], is_causal=True)[0][:, rows]
        assert not out.isnan().any()
        return error(out.view(length, HEADS, HEAD_DIM)[rows].transpose(0, 1), ref), error(own, ref)

    return Case("chunk_attention", f"{length}", "flop", 2 * length**2 * HEADS * HEAD_DIM, launch, 1, check)


def gemv_cases() -> Iterator[Case]:
    for name, rows, columns, has_norm, is_gated, has_residual, tile in (
        ("qkv", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, True, False, False, 1024),
        ("o", HIDDEN, HEADS * HEAD_DIM, False, False, True, 2048),
        ("gate+up", FFN, HIDDEN, True, True, False, 1024),
        ("down", HIDDEN, FFN, False, False, True, 2048),
        ("head", VOCAB, HIDDEN, False, False, False, 2048),
    ):
        yield gemv_case(name, rows, columns, has_norm, is_gated, has_residual, tile)


def gemv_case(
    name: str, rows: int, columns: int, has_norm: bool, is_gated: bool, has_residual: bool, tile: int
) -> Case:
    height = rows * (2 if is_gated else 1)
    sets = sets_for(height * columns * 2, 16)
    weights = randn(sets, height, columns, scale=0.02)
    x, scale, residual = randn(columns), randn(columns), randn(rows)
    out = torch.empty(rows, dtype=BF16, device=DEVICE)

    def launch(index: int) -> None:
        gemv_kernel[(rows,)](
            x, weights[index], scale if has_norm else None, None, residual if has_residual else None, out, 1e-5, 0.0,
            rows, K=columns, ROWS=1, TILE_K=tile, NORM=has_norm, GATED=is_gated, HAS_BIAS=False,
            HAS_RESIDUAL=has_residual, PDL=False, num_warps=4,
        )  # fmt: skip

    def compute(dtype: torch.dtype) -> Tensor:
        y = x.to(dtype)
        if has_norm:
            y = (y.to(F64) * torch.rsqrt(x.double().square().mean() + 1e-5)).to(dtype) * scale.to(dtype)
        y = functional.linear(y, weights[0].to(dtype))
        if is_gated:
            y = functional.silu(y[:rows]) * y[rows:]
        return y + residual.to(dtype) if has_residual else y

    def check() -> tuple[float, float]:
        out.fill_(NAN)
        launch(0)
        ref = compute(F64)
        return error(out, ref), error(compute(BF16), ref)

    return Case("gemv", f"{name} {height} x {columns}", "read", height * columns * 2, launch, sets, check)


def norm_cases() -> Iterator[Case]:
    for tokens in (1, 64, 2048):
        yield norm_case(tokens)


def norm_case(tokens: int) -> Case:
    amount = 4 * tokens * HIDDEN * 2
    sets = sets_for(amount)
    x, residual = randn(sets, tokens, HIDDEN), randn(sets, tokens, HIDDEN)
    scale, out = randn(HIDDEN), torch.empty(tokens, HIDDEN, dtype=BF16, device=DEVICE)

    def launch(index: int) -> None:
        add_norm_kernel[(tokens,)](
            x[index], residual[index], scale, None, out, HIDDEN, HIDDEN, HIDDEN, 1e-5, 0.0,
            D=HIDDEN, D_PAD=HIDDEN, IS_LAYER_NORM=False, HAS_RESIDUAL=True, STORE_RESIDUAL=True, HAS_BIAS=False,
            PDL=False, num_warps=8,
        )  # fmt: skip

    def check() -> tuple[float, float]:
        total = x[0].double() + residual[0].double()
        ref = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * scale.double()
        own = functional.rms_norm(x[0] + residual[0], [HIDDEN], scale, 1e-5)
        out.fill_(NAN)
        launch(0)
        return max(error(out, ref), error(residual[0], total)), error(own, ref)

    return Case("add_norm", f"{tokens} x {HIDDEN}", "copy", amount, launch, sets, check)


def rope_cases() -> Iterator[Case]:
    for tokens in (1, 64, 2048):
        yield rope_case(tokens)


def rope_case(tokens: int) -> Case:
    heads = HEADS + 2 * KV_HEADS
    amount = 2 * tokens * heads * HEAD_DIM * 2
    sets = sets_for(amount, 32)
    qkv = randn(sets, tokens, heads * HEAD_DIM)
    blocks = triton.cdiv(tokens, BLOCK) + 1
    pool = torch.empty(sets, blocks, 1, 2, KV_HEADS, BLOCK, HEAD_DIM, dtype=BF16, device=DEVICE)
    cells, positions = torch.randperm(blocks * BLOCK, device=DEVICE)[:tokens], torch.randint(0, 8192, (tokens,)).int()
    angles = torch.outer(torch.arange(8192).double(), 500000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM))
    positions, cos, sin = positions.to(DEVICE), angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)
    stride = pool[0].stride()

    def launch(index: int) -> None:
        rope_kv_kernel[(tokens, triton.cdiv(heads, 16))](
            qkv[index], pool[index], cos, sin, positions, cells, None, None, heads * HEAD_DIM, stride[0], 0, stride[2],
            1e-6, NUM_HEADS=HEADS, NUM_KV_HEADS=KV_HEADS, HEADS_PER_PROGRAM=16, HEAD_DIM=HEAD_DIM, HEAD_PAD=HEAD_DIM,
            BLOCK_SIZE=BLOCK, HAS_ROPE=True, HAS_QK_NORM=False, PDL=False, num_warps=4,
        )  # fmt: skip

    def check() -> tuple[float, float]:
        source = qkv[0].view(tokens, heads, HEAD_DIM).double()
        pairs = torch.view_as_complex(source[:, : HEADS + KV_HEADS].unflatten(-1, (-1, 2)))
        turns = torch.polar(torch.ones_like(angles), angles).to(DEVICE)[positions.long()][:, None]
        ref = source.clone()
        ref[:, : HEADS + KV_HEADS] = torch.view_as_real(pairs * turns).flatten(-2)
        pool[0].fill_(NAN)
        launch(0)
        stored = pool[0, cells // BLOCK, 0, :, :, cells % BLOCK]
        out = torch.cat([qkv[0].view(tokens, heads, HEAD_DIM)[:, :HEADS], stored[:, 0], stored[:, 1]], 1)
        return error(out, ref), error(ref.to(BF16), ref)

    return Case("rope_kv", f"{tokens} x {heads} heads", "copy", amount, launch, sets, check)


def pack_rows(rows: list[tuple[int, int, int]], num_decodes: int) -> Tensor:
    """The step's buffer, for rows of (slot, start, tokens)."""
    begins = [0]
    for _, _, count in rows:
        begins.append(begins[-1] + count)
    size = triton.next_power_of_2(len(rows))
    padding = [0] * (size - len(rows))
    header = [len(rows), num_decodes, begins[-1]] + [0] * (HEADER - 3)
    return ints(header + [row[0] for row in rows] + padding + [row[1] for row in rows] + padding + begins + padding)


def launch_batch_inputs(
    packed: Tensor, history: Tensor, table: Tensor, outputs: list[Tensor], items: Tensor, max_rows: int
) -> None:
    tokens, num_items, tile = outputs[0].shape[0], items.shape[0], 64
    max_rows = triton.next_power_of_2(max_rows)
    programs = 4 * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    batch_inputs_kernel[(triton.cdiv(max(tokens, num_items), tile),)](
        packed, history, table, *outputs, items, history.stride(0), table.stride(0), tokens, num_items, programs,
        KV_HEADS, MAX_ROWS=max_rows, SEARCH_STEPS=max_rows.bit_length(), BLOCK_SIZE=BLOCK, TILE=tile,
    )  # fmt: skip


def batch_inputs_cases() -> Iterator[Case]:
    for decodes, chunk in ((1, 0), (64, 0), (63, 1985)):
        yield batch_inputs_case(decodes, chunk)


def batch_inputs_case(decodes: int, chunk: int) -> Case:
    lengths = torch.randint(1, 4000, (decodes,)).tolist()
    rows = [(slot, length, 1) for slot, length in enumerate(lengths)] + ([(decodes, 0, chunk)] if chunk else [])
    tokens, num_rows = decodes + chunk, len(rows)
    history = torch.randint(0, VOCAB, (num_rows, 4096), dtype=I32, device=DEVICE)
    table = torch.randperm(num_rows * 64, device=DEVICE).int().view(num_rows, 64)
    packed = pack_rows(rows, decodes)
    outputs = [torch.empty(tokens, dtype=dtype, device=DEVICE) for dtype in (I32, I32, torch.int64)]
    items = torch.empty(decodes + 66, ITEM_WORDS, dtype=I32, device=DEVICE)

    def launch(_: int) -> None:
        launch_batch_inputs(packed, history, table, outputs, items, num_rows)

    def check() -> tuple[float, None]:
        for tensor in (*outputs, items):
            tensor.fill_(-9)
        launch(0)
        position = torch.cat([torch.arange(start, start + count) for _, start, count in rows]).to(DEVICE)
        slot = torch.cat([torch.full((count,), slot) for slot, _, count in rows]).to(DEVICE)
        cell = table[slot, position // BLOCK].long() * BLOCK + position % BLOCK
        wrong = sum(
            int((got != want).sum())
            for got, want in zip(outputs, (history[slot, position], position, cell), strict=True)
        )
        work = items[items[:, 0] >= 0]
        covered = torch.bincount(work[:, 0].long(), minlength=decodes)
        wrong += int((covered != work.new_zeros(decodes).scatter_(0, work[:, 0].long(), work[:, 2])).sum())
        wrong += int((work[:, 3] != ints(lengths)[work[:, 0].long()] + 1).sum())
        return wrong / tokens, None

    return Case("batch_inputs", f"{decodes} decodes + {chunk}", "copy", tokens * 24, launch, 1, check)


def activation_cases() -> Iterator[Case]:
    for kind, tokens in (("silu", 1), ("silu", 64), ("silu", 2048), ("gelu", 64), ("gelu_tanh", 64), ("relu", 64)):
        yield activation_case(kind, tokens)


def activation_case(kind: str, tokens: int) -> Case:
    amount = 3 * tokens * FFN * 2
    sets = sets_for(amount)
    x, out = randn(sets, tokens, 2 * FFN), torch.empty(tokens, FFN, dtype=BF16, device=DEVICE)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
        "relu": torch.relu,
    }

    def launch(index: int) -> None:
        activation_kernel[(tokens, triton.cdiv(FFN, 1024))](
            x[index], out, I=FFN, TILE=1024, GATED=True, KIND=ACTIVATION_NUMBERS[kind], PDL=False, num_warps=4
        )

    def check() -> tuple[float, float]:
        out.fill_(NAN)
        launch(0)
        gate, up = x[0].chunk(2, -1)
        ref = functions[kind](gate.double()) * up.double()
        return error(out, ref), error(functions[kind](gate) * up, ref)

    return Case("activation", f"{kind} {tokens} x {FFN}", "copy", amount, launch, sets, check)


OPS: dict[str, Callable[[], Iterator[Case]]] = {
    "decode_attention": decode_cases,
    "chunk_attention": chunk_cases,
    "gemv": gemv_cases,
    "add_norm": norm_cases,
    "rope_kv": rope_cases,
    "batch_inputs": batch_inputs_cases,
    "activation": activation_cases,
    "sampling": sampling_cases,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(OPS), default=list(OPS), help="kernels (default: all)")
    parser.add_argument("--replays", type=int, default=9, help="timed replays per case")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kernels needs an NVIDIA GPU, and torch finds none here", file=sys.stderr)
        return 2
    failed: list[str] = []
    for name in args.only:
        try:
            for case in OPS[name]():
                if not run_case(case, args.replays):
                    failed.append(f"{case.name} {case.shape}")
                torch.cuda.empty_cache()
        except (RuntimeError, TypeError, AssertionError, triton.CompilationError) as failure:
            # One kernel that does not compile or run must not hide the others' figures.
            traceback.print_exception(failure)
            failed.append(f"{name} (raised)")
    summary = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({**summary, "failed": failed}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
