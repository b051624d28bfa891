# SPDX-License-Identifier: Apache-2.0
"""The kernels of the deterministic mode in Triton's interpreter: right, and a row's bits its own.

A program of its own, because the interpreter is chosen when Triton is imported: `python triton_invariance.py CASE`, or
all of them.
The interpreter cannot show how a GPU's instructions round: `scripts/verify_engine.py --deterministic` does, on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

# First: it chooses the interpreter.
from triton_cases import BLOCK, DIM, HEADS, KV_HEADS, LOG2_E, Batch, close  # isort: skip

import torch
from torch import Tensor

from mii_zmq.kernels.triton.chunk_attention import chunk_attention_kernel
from mii_zmq.worker.models.cuda_gemm import FEW, MANY, GemmTiles, TiledGemm
from mii_zmq.worker.models.cuda_invariant_linear import InvariantLinear
from mii_zmq.worker.models.cuda_linear import TILED_TOKENS, FusedLinear, Norm, Scratch
from tests.interpreter import adjust_interpreter


def case_gemm() -> None:
    small = (GemmTiles(16, 16, 16, 1, 4), GemmTiles(32, 32, 16, 1, 4))
    none = Scratch(*(torch.empty(0),) * 4)
    for num_out, width in ((48, 64), (37, 50), (1, 16)):
        x, weight, bias = torch.randn(70, width), torch.randn(num_out, width), torch.randn(num_out)
        residual = torch.randn(70, num_out)
        linear = InvariantLinear(weight, bias, none, adds_to_out=True, num_processors=1)
        whole = residual.clone()
        linear.multiply(x, whole, small[0])
        close(whole, x @ weight.t() + bias + residual)
        for tiles in small:
            for rows in ([69], [3, 2, 66], list(range(17, 51))):
                out = residual[rows]
                linear.multiply(x[rows], out, tiles)
                assert torch.equal(out, whole[rows]), (num_out, width, tiles, rows)


def case_gated_gemm() -> None:
    """Silu of a gate folded in: the same bits for a row in whatever tile, and by the ordinary mode's choice."""
    small = (GemmTiles(16, 16, 16, 1, 4), GemmTiles(32, 32, 16, 1, 4))
    for num_out, width in ((48, 64), (37, 50)):
        x, weight = torch.randn(70, width), torch.randn(2 * num_out, width) * width**-0.5
        gemm = TiledGemm(weight, None, gated=True, adds_to_out=False, pdl=False)
        whole = torch.full((70, num_out), float("nan"))
        gemm.run(x, whole, small[0])
        gate, up = (x @ weight.t()).chunk(2, dim=1)
        close(whole, torch.nn.functional.silu(gate) * up)
        for tiles in small:
            for rows in ([69], list(range(17, 51))):
                out = torch.full((len(rows), num_out), float("nan"))
                gemm.run(x[rows], out, tiles)
                assert torch.equal(out, whole[rows]), (num_out, width, tiles, rows)
        TILED_TOKENS[num_out, width] = 40
        scratch = Scratch(torch.empty(70, width), torch.empty(70, 2 * num_out), torch.empty(0), torch.empty(0))
        linear = FusedLinear(weight, None, scratch, activation="silu", gated=True)
        for rows in (40, 41):
            out = torch.full((rows, num_out), float("nan"))
            scratch.wide.fill_(float("nan"))
            linear.run(x[:rows], out)
            close(out, whole[:rows])
            assert bool(scratch.wide.isnan().all()) is (rows == 40), "beyond the limit cuBLAS leaves its result there"


def case_linear() -> None:
    """With everything around it, in the tile sizes of the engine."""
    width, num_out = 48, 40
    weights = torch.randn(2 * num_out, width)
    scratch = Scratch(torch.empty(150, width), torch.empty(150, 2 * num_out), torch.empty(0), torch.empty(0))
    norm = Norm(torch.rand(width), None, 1e-5, False)
    linear = InvariantLinear(
        weights, None, scratch, norm=norm, activation="silu", gated=True, num_processors=2
    )  # fmt: skip
    x = torch.randn(150, width)
    assert (linear.tiles(64), linear.tiles(65)) == (FEW, MANY)
    out = torch.full((150, num_out), float("nan"))
    linear.run(x, out)
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * norm.weight
    gate, up = (normed @ weights.t()).chunk(2, dim=1)
    close(out, torch.nn.functional.silu(gate) * up)
    few = torch.full((3, num_out), float("nan"))
    linear.run(x[100:103], few)
    close(few, out[100:103])


def _attend(batch: Batch, q: Tensor, start: int, window: int | None) -> Tensor:
    """The only row's queries, beginning at position `start`."""
    layout, packed, count = batch.layout, batch.packed, len(q)
    tiles = range(0, count, 16)
    packed[4] = len(tiles)
    packed[layout.row_starts] = start
    packed[layout.query_starts + 1] = count
    packed[layout.tile_rows :][: len(tiles)] = 0
    packed[layout.tile_starts :][: len(tiles)] = torch.tensor(list(tiles), dtype=torch.int32)
    out = torch.full((count, HEADS * DIM), float("nan"))
    chunk_attention_kernel[(HEADS, len(tiles))](
        q, batch.slab, None, out, batch.tables, packed[layout.row_slots :], packed[layout.row_starts :],
        packed[layout.query_starts :], packed[4:], packed[layout.tile_rows :], packed[layout.tile_starts :], None,
        q.stride(0), out.stride(0), 8, batch.slab.stride(0), batch.offset, batch.slab.stride(2),
        DIM**-0.5 * LOG2_E, 0.0, window or 0,
        GROUP=HEADS // KV_HEADS, HEAD_DIM=DIM, HEAD_PAD=DIM, BLOCK_SIZE=BLOCK, TILE_M=16, TILE_N=16,
        HAS_WINDOW=window is not None, HAS_SOFTCAP=False, HAS_ALIBI=False, USE_TMA=False, STAGES=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def case_attention() -> None:
    """Whole prompts, chunks that begin anywhere, and single tokens."""
    size = 61
    for window in (None, 9, 20):
        batch = Batch([(0, size)])
        q = torch.randn(size, (HEADS + 2 * KV_HEADS) * DIM)
        whole = _attend(batch, q, 0, window)
        close(whole, batch.expected_attention(torch.cat([q, q[:3]]), window))
        for first, count in [*((position, 1) for position in range(0, size, 5)), (5, 20), (16, 32), (33, 28)]:
            part = _attend(batch, q[first : first + count], first, window)
            assert torch.equal(part, whole[first : first + count]), (window, first, count)


CASES: dict[str, Callable[[], None]] = {
    name.removeprefix("case_"): value for name, value in globals().items() if name.startswith("case_")
}

if __name__ == "__main__":
    adjust_interpreter()
    for case in sys.argv[1:] or CASES:
        torch.manual_seed(0)
        CASES[case]()
        print(case, "ok")
