# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the GPU decoder against the oracle, on tiny float32 tensors in Triton's interpreter.

The whole decoder is compared in `tests/worker/models/cuda_decoder_cases.py`.

A program of its own, because the interpreter is chosen when Triton is imported: `python triton_cases.py CASE`, or
all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from tests.interpreter import INTERPRETED, adjust_interpreter

os.environ.update(INTERPRETED)

import numpy as np
import torch
import triton
from torch import Tensor

from mii_zmq.kernels import reference, torch_ops
from mii_zmq.kernels.layout import AttentionShape, CellMapping, KvLayer, RaggedLayout
from mii_zmq.kernels.triton.argmax import argmax_rows_kernel, argmax_tiles_kernel
from mii_zmq.kernels.triton.batch_inputs import ITEM_WORDS, batch_inputs_kernel
from mii_zmq.kernels.triton.chunk_attention import chunk_attention_kernel
from mii_zmq.kernels.triton.decode_attention import decode_attention_kernel
from mii_zmq.kernels.triton.elementwise import activation_kernel, embed_kernel, gather_rows_kernel, softcap_kernel
from mii_zmq.kernels.triton.gemv import gemv_kernel
from mii_zmq.kernels.triton.norm import add_norm_kernel, norm_add_kernel
from mii_zmq.kernels.triton.rope_kv import rope_kv_kernel
from mii_zmq.kernels.triton.rope_length import dynamic_tables_kernel, longrope_rows_kernel
from mii_zmq.kernels.triton.skinny_gemm import skinny_gemm_kernel
from mii_zmq.kernels.triton.updates import apply_updates_kernel, copy_blocks_kernel
from mii_zmq.worker.cuda_batch import PackedLayout, StepPacker
from mii_zmq.worker.models.rotary import length_frequencies
from mii_zmq.worker.models.spec import RopeConfig
from mii_zmq.worker.plan import NewSequence, SamplingSpec, StepPlan, StepRow

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 16
LOG2_E = 1.4426950408889634


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


class Batch:
    """Rows (start, num_tokens) over a shuffled pool whose unused cells are NaN, packed as the engine packs them."""

    def __init__(self, rows: list[tuple[int, int]], max_sequences: int = 6, target_programs: int = 8) -> None:
        self.rows = rows
        self.layout = PackedLayout(max_sequences, token_budget=64, tile_tokens=16)
        num_blocks = sum(-(-(start + count) // BLOCK) for start, count in rows)
        order = torch.randperm(num_blocks).tolist()
        tables = []
        for start, count in rows:
            tables.append([order.pop() for _ in range(-(-(start + count) // BLOCK))])
        self.slots = [max_sequences - 1 - index for index in range(len(rows))]
        self.token_ids = torch.zeros(max_sequences, 128, dtype=torch.int32)
        self.tables = torch.zeros(max_sequences, 8, dtype=torch.int32)
        self.packed = torch.zeros(self.layout.fixed_words + 1024, dtype=torch.int32)
        new = [
            NewSequence(slot, torch.randint(0, 99, (start + count,)).tolist(), 1, table, SamplingSpec())
            for slot, (start, count), table in zip(self.slots, rows, tables, strict=True)
        ]
        step_rows = [StepRow(slot, start, count, True) for slot, (start, count) in zip(self.slots, rows, strict=True)]
        plan = StepPlan(1, step_rows, new)
        packer = StepPacker(self.layout, 128, 8)
        fixed = self.layout.fixed_words
        self.step = packer.pack(plan, self.packed.numpy()[:fixed])
        self.packed[fixed : fixed + len(self.step.updates)] = torch.from_numpy(self.step.updates)
        apply_updates_kernel[(self.step.num_updates, 1)](
            self.packed[fixed:], self.token_ids, self.tables, TILE=256
        )  # fmt: skip
        self.new = new
        self.padded = self.step.num_tokens + 3
        self.num_items = max_sequences + target_programs // KV_HEADS
        self.input_ids = torch.full((self.padded,), -7, dtype=torch.int32)
        self.positions = self.input_ids.clone()
        self.cells = torch.full((self.padded,), -7, dtype=torch.int64)
        self.items = torch.full((self.num_items, ITEM_WORDS), -7, dtype=torch.int32)
        rows_pad = self.layout.max_rows
        batch_inputs_kernel[(triton.cdiv(max(self.padded, self.num_items), 16),)](
            self.packed, self.token_ids, self.tables, self.input_ids, self.positions, self.cells, self.items, 128, 8,
            self.padded, self.num_items, target_programs, KV_HEADS,
            MAX_ROWS=rows_pad, SEARCH_STEPS=rows_pad.bit_length(), BLOCK_SIZE=BLOCK, TILE=16,
        )  # fmt: skip
        self.sorted = sorted(range(len(rows)), key=lambda index: (rows[index][1] > 1, -rows[index][0]))
        # Two layers, the second is used: its offset is not zero.
        self.slab = torch.full((num_blocks, 2, 2, KV_HEADS, BLOCK, DIM), float("nan"))
        self.kv = KvLayer(self.slab[:, 1])
        self.offset = self.slab.stride(1)
        for (start, count), table in zip(rows, tables, strict=True):
            for position in range(start + count):
                self.kv.blocks[table[position // BLOCK], :, :, position % BLOCK] = torch.randn(2, KV_HEADS, DIM)

    def ragged(self) -> RaggedLayout:
        counts = [self.rows[index][1] for index in self.sorted]
        lengths = [sum(self.rows[index]) for index in self.sorted]
        tables = self.tables[[self.slots[index] for index in self.sorted]].numpy().astype(np.int64)
        return RaggedLayout(np.concatenate([[0], np.cumsum(counts)]), np.array(lengths), tables, BLOCK)

    def expected_attention(
        self, qkv: Tensor, window: int | None, softcap: float = 0.0, slopes: Tensor | None = None
    ) -> Tensor:
        shape = AttentionShape(
            HEADS, KV_HEADS, DIM, DIM**-0.5, 4 * KV_HEADS, torch.float32, torch.device("cpu"), softcap, slopes
        )
        attention = reference.ReferenceAttention(shape)
        count = self.step.num_tokens
        return attention(qkv[:count].view(count, -1, DIM), self.kv, attention.plan(self.ragged(), window))


ROWS = [(0, 5), (37, 1), (70, 1), (0, 1), (20, 19), (15, 1)]


def case_batch_inputs() -> None:
    batch = Batch(ROWS)
    count = batch.step.num_tokens
    expected_ids, expected_positions, expected_cells = [], [], []
    for index in batch.sorted:
        start, rows = ROWS[index]
        for position in range(start, start + rows):
            expected_ids.append(batch.new[index].token_ids[position])
            expected_positions.append(position)
            expected_cells.append(batch.new[index].block_ids[position // BLOCK] * BLOCK + position % BLOCK)
    assert batch.input_ids[:count].tolist() == expected_ids
    assert batch.positions[:count].tolist() == expected_positions
    assert batch.cells[:count].tolist() == expected_cells
    assert batch.cells[count:].tolist() == [-1] * 3
    items = batch.items[batch.items[:, 0] >= 0]
    for row, index in enumerate(batch.sorted[: batch.step.num_decodes]):
        mine = items[items[:, 0] == row]
        assert mine[:, 1].tolist() == list(range(len(mine))), "splits are numbered"
        assert set(mine[:, 2].tolist()) == {len(mine)}
        assert set(mine[:, 3].tolist()) == {ROWS[index][0] + 1}
        assert set(mine[:, 4].tolist()) == {batch.slots[index]}
    assert len(items) > batch.step.num_decodes, "the long rows are split"


BIASED = (0.7, torch.tensor([0.5, 0.25, 0.1, 0.01]))
"""Soft-cap and slopes."""


def case_decode_attention() -> None:
    for window, softcap, slopes in ((None, 0.0, None), (20, 0.0, None), (None, *BIASED)):
        batch = Batch(ROWS)
        rows = batch.step.num_decodes
        qkv = torch.randn(batch.padded, (HEADS + 2 * KV_HEADS) * DIM)
        out = torch.full((batch.padded, HEADS * DIM), float("nan"))
        partial = torch.full((batch.num_items * KV_HEADS * 16 * DIM,), float("nan"))
        stats = torch.full((batch.num_items * KV_HEADS * 16 * 2,), float("nan"))
        counters = torch.zeros(6 * KV_HEADS, dtype=torch.int32)
        decode_attention_kernel[(KV_HEADS, batch.num_items)](
            qkv, batch.slab, out, partial, stats, counters, batch.tables, batch.items, slopes, qkv.stride(0),
            out.stride(0), 8, batch.slab.stride(0), batch.offset, batch.slab.stride(2), DIM**-0.5 * LOG2_E, softcap,
            window or 0,
            NUM_KV_HEADS=KV_HEADS, GROUP=2, GROUP_PAD=16, HEAD_DIM=DIM, HEAD_PAD=DIM, BLOCK_SIZE=BLOCK, TILE=16,
            HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap > 0, HAS_ALIBI=slopes is not None, STAGES=2,
            PDL=False,
        )  # fmt: skip
        close(out[:rows], batch.expected_attention(qkv, window, softcap, slopes)[:rows])
        assert not counters.any(), "counters return to zero"
        assert out[rows:].isnan().all(), "rows without work are left alone"


def case_chunk_attention() -> None:
    for window, softcap, slopes in ((None, 0.0, None), (9, 0.0, None), (9, *BIASED)):
        batch = Batch(ROWS)
        layout, packed = batch.layout, batch.packed
        qkv = torch.randn(batch.padded, (HEADS + 2 * KV_HEADS) * DIM)
        out = torch.full((batch.padded, HEADS * DIM), float("nan"))
        chunk_attention_kernel[(HEADS, batch.step.num_tiles + 2)](
            qkv, batch.slab, None, out, batch.tables, packed[layout.row_slots :], packed[layout.row_starts :],
            packed[layout.query_starts :], packed[4:], packed[layout.tile_rows :], packed[layout.tile_starts :], slopes,
            qkv.stride(0), out.stride(0), 8, batch.slab.stride(0), batch.offset, batch.slab.stride(2),
            DIM**-0.5 * LOG2_E, softcap, window or 0,
            GROUP=2, HEAD_DIM=DIM, HEAD_PAD=DIM, BLOCK_SIZE=BLOCK, TILE_M=16, TILE_N=16, USE_TMA=False, STAGES=1,
            HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap > 0, HAS_ALIBI=slopes is not None,
        )  # fmt: skip
        begin, end = batch.step.num_decodes, batch.step.num_tokens
        close(out[begin:end], batch.expected_attention(qkv, window, softcap, slopes)[begin:end])
        assert out[end:].isnan().all()


def case_norm() -> None:
    x, delta = torch.randn(3, 20), torch.randn(3, 20)
    weight, bias = torch.rand(20), torch.rand(20)
    for layer_norm in (False, True):
        out, residual = torch.full_like(x, float("nan")), delta.clone()
        add_norm_kernel[(3,)](
            x, residual, weight, bias if layer_norm else None, out, 20, 20, 20, 1e-5, 0.0, D=20, D_PAD=32,
            IS_LAYER_NORM=layer_norm, HAS_RESIDUAL=True, STORE_RESIDUAL=True, HAS_BIAS=layer_norm, PDL=False,
        )  # fmt: skip
        norm = reference.LayerNorm(weight, bias, 1e-5, 20) if layer_norm else reference.RmsNorm(weight, 1e-5)
        close(out, norm(x + delta))
        close(residual, x + delta)


def case_norm_add() -> None:
    x, stream = torch.randn(3, 20), torch.randn(3, 20)
    (weight, bias), (next_weight, next_bias) = torch.rand(2, 20), torch.rand(2, 20)
    for layer_norm, has_next in ((False, True), (True, True), (False, False)):
        out, residual = torch.full_like(x, float("nan")), stream.clone()
        norm_add_kernel[(3,)](
            x, weight, bias, residual, next_weight, next_bias, out, 20, 20, 20, 1e-5, D=20, D_PAD=32,
            IS_LAYER_NORM=layer_norm, HAS_BIAS=layer_norm, HAS_NEXT=has_next, PDL=False,
        )  # fmt: skip
        if layer_norm:
            first, second = (
                reference.LayerNorm(*weights, 1e-5, 20) for weights in ((weight, bias), (next_weight, next_bias))
            )
        else:
            first, second = reference.RmsNorm(weight, 1e-5), reference.RmsNorm(next_weight, 1e-5)
        close(residual, stream + first(x))
        if has_next:
            close(out, second(stream + first(x)))
        else:
            assert out.isnan().all()


def case_rope_kv() -> None:
    for has_norm, rotary_dim in ((False, DIM), (True, DIM), (False, 0), (True, 6)):
        batch = Batch(ROWS)
        count = batch.step.num_tokens
        qkv = torch.randn(batch.padded, HEADS + 2 * KV_HEADS, DIM)
        expected = qkv.clone()
        weights = torch.rand(2, DIM)
        has_rope = rotary_dim > 0
        frequencies = torch.rand(rotary_dim // 2)
        angles = torch.outer(torch.arange(128).float(), frequencies)
        table = torch_ops.rotary_table(batch.positions, frequencies)
        rotated = HEADS + KV_HEADS
        if has_norm:
            expected[:, :HEADS] = reference.RmsNorm(weights[0], 1e-5)(expected[:, :HEADS])
            expected[:, HEADS:rotated] = reference.RmsNorm(weights[1], 1e-5)(expected[:, HEADS:rotated])
        if has_rope:
            reference.rotate(expected[:, :rotated], table)
        wanted = KvLayer(batch.slab.clone()[:, 1])
        mapping = CellMapping(batch.cells[:count] // BLOCK, batch.cells[:count] % BLOCK)
        reference.write_kv(expected[:count], wanted, mapping)
        cosines, sines = (angles.cos(), angles.sin()) if has_rope else (None, None)
        rope_kv_kernel[(batch.padded, 3)](
            qkv, batch.slab, cosines, sines, batch.positions, batch.cells, weights[0], weights[1], qkv.stride(0),
            batch.slab.stride(0), batch.offset, batch.slab.stride(2), 1e-5,
            NUM_HEADS=HEADS, NUM_KV_HEADS=KV_HEADS, HEADS_PER_PROGRAM=4, HEAD_DIM=DIM, HEAD_PAD=DIM, BLOCK_SIZE=BLOCK,
            ROTARY_DIM=rotary_dim, HAS_ROPE=has_rope, HAS_QK_NORM=has_norm, PDL=False,
        )  # fmt: skip
        close(qkv[:count, :HEADS], expected[:count, :HEADS])
        torch.testing.assert_close(batch.kv.blocks, wanted.blocks, rtol=2e-5, atol=2e-5, equal_nan=True)


def case_rope_length() -> None:
    """Sequences on both sides of a border of 24, by their fixed lengths and by their positions."""
    batch = Batch([(0, 5), (22, 3), (23, 1), (0, 4)])
    count, max_rows = batch.step.num_tokens, batch.layout.max_rows
    fixed = torch.tensor([0, 0, 30, 0, 0, 3], dtype=torch.int32)
    by_row = [
        (index, position) for index in batch.sorted for position in range(batch.rows[index][0], sum(batch.rows[index]))
    ]
    lengths = torch.tensor([max(int(fixed[batch.slots[index]]), position + 1) for index, position in by_row])
    assert (lengths > 24).sum() == 5
    search = {"MAX_ROWS": max_rows, "SEARCH_STEPS": max_rows.bit_length()}
    rows = torch.full((batch.padded,), -7, dtype=torch.int32)
    longrope_rows_kernel[(2,)](batch.packed, fixed, rows, batch.padded, 24, 1000, TILE=16, **search)
    positions = batch.positions[:count]
    assert rows[:count].tolist() == (positions + 1000 * (lengths > 24)).tolist()
    assert rows[count:].tolist() == [0] * 3
    rope = RopeConfig(10000.0, 12, "dynamic", 3.0, original_max_position_embeddings=24)
    cosines, sines = torch.full((2, batch.padded, 6), float("nan"))
    dynamic_tables_kernel[(2,)](
        batch.packed, fixed, cosines, sines, batch.padded, 24,
        THETA=10000.0, FACTOR=3.0, ATTENTION_FACTOR=0.5, PAIRS=6, PAD=8, TILE=16, **search,
    )  # fmt: skip
    angles = positions.unsqueeze(1) * length_frequencies(rope, lengths)
    close(cosines[:count], 0.5 * angles.cos())
    close(sines[:count], 0.5 * angles.sin())
    assert not sines[count:].any(), "padding is not rotated"


def _expected_linear(x: Tensor, weight: Tensor, norm: Tensor | None, gated: bool, residual: Tensor | None) -> Tensor:
    if norm is not None:
        x = reference.RmsNorm(norm, 1e-5)(x)
    y = x @ weight.t()
    if gated:
        y = torch.nn.functional.silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :]
    return y if residual is None else y + residual


def case_gemv() -> None:
    for width, tile in ((48, 64), (48, 32), (64, 16)):
        for normed, gated, adds in ((True, False, False), (True, True, False), (False, False, True)):
            num_out = 10
            x, weight = torch.randn(1, width), torch.randn(num_out * (2 if gated else 1), width)
            norm = torch.rand(width) if normed else None
            out = torch.randn(1, num_out)
            expected = _expected_linear(x, weight, norm, gated, out.clone() if adds else None)
            gemv_kernel[(3,)](
                x, weight, norm, None, out if adds else None, out, 1e-5, 0.0, num_out, K=width, ROWS=4, TILE_K=tile,
                NORM=normed, GATED=gated, HAS_BIAS=False, HAS_RESIDUAL=adds, PDL=False,
            )  # fmt: skip
            close(out, expected)


def case_skinny_gemm() -> None:
    width, num_out = 64, 48
    for split, gated, adds in ((1, False, False), (1, True, False), (2, False, True), (2, True, False)):
        x, weight = torch.randn(5, width), torch.randn(num_out * (2 if gated else 1), width)
        out = torch.randn(5, num_out)
        expected = _expected_linear(x, weight, None, gated, out.clone() if adds else None)
        partial = torch.full((2 * split * 16 * num_out,), float("nan"))
        counters = torch.zeros(3, dtype=torch.int32)
        skinny_gemm_kernel[(2, split)](
            x, None, weight, None, None, out, partial, counters, 5, width, num_out, N=num_out, K=width, M_PAD=16,
            TILE_N=32, TILE_K=16, SPLIT_K=split, GATED=gated, HAS_BIAS=False, HAS_RESIDUAL=adds, STAGES=1,
            USE_TMA=False, PDL=False,
        )  # fmt: skip
        close(out, expected)
        assert not counters.any()


def case_elementwise() -> None:
    ids, positions = torch.tensor([3, 0, 2], dtype=torch.int32), torch.tensor([1, 0, 4], dtype=torch.int32)
    embed, table, out = torch.randn(5, 12), torch.randn(9, 12), torch.empty(3, 12)
    for scale in (1.0, 2.5):
        embed_kernel[(3,)](ids, positions, embed, table, out, 2, D=12, D_PAD=16, HAS_POSITIONS=True, SCALE=scale)
        close(out, scale * embed[ids.long()] + table[positions.long() + 2])
    x = torch.randn(3, 40)
    for kind, name in enumerate(("silu", "relu", "gelu", "gelu_tanh")):
        for gated in (True, False):
            width = 20 if gated else 40
            out = torch.empty(3, width)
            activation_kernel[(3, 2)](x, out, I=width, TILE=32, GATED=gated, KIND=kind, PDL=False)
            activation = torch_ops.ACTIVATIONS[name]
            close(out, activation(x[:, :20]) * x[:, 20:] if gated else activation(x))
    a, b = torch.randn(6, 12), torch.randn(6, 20)
    a_out, b_out = torch.empty(3, 12), torch.empty(3, 20)
    count, index = torch.tensor([2], dtype=torch.int32), torch.tensor([4, 1, 99], dtype=torch.int32)
    gather_rows_kernel[(3,)](count, index, a, b, a_out, b_out, A=12, B=20, PAD=32, PDL=False)
    close(a_out[:2], a[[4, 1]])
    close(b_out[:2], b[[4, 1]])
    logits = 20 * torch.randn(3, 40)
    expected = 5 * torch.tanh(logits[:, :37] / 5)
    softcap_kernel[(3, 2)](logits, 40, 5.0, V=37, TILE=32, PDL=False)
    close(logits[:, :37], expected)


def case_argmax() -> None:
    logits = torch.randn(5, 50)
    logits[0, [7, 30]] = 9.0
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    values, ids = torch.empty(5 * 4), torch.empty(5 * 4, dtype=torch.int32)
    argmax_tiles_kernel[(5, 4)](logits, values, ids, 50, V=50, TILE=16, NUM_TILES=4, PDL=False)
    count = torch.tensor([5], dtype=torch.int32)
    slots, positions = torch.arange(4, -1, -1, dtype=torch.int32), torch.tensor([1, 2, 3, 4, 0], dtype=torch.int32)
    histories, drawn = torch.full((5, 6), -7, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
    finite = torch.empty(5, dtype=torch.int32)
    argmax_rows_kernel[(5,)](
        values, ids, count, slots, positions, histories, drawn, finite, 6, 50, NUM_TILES=4, PAD=4, RECORD=True,
        PDL=False,
    )  # fmt: skip
    assert finite.tolist() == [1, 0, 0, 0, 1]
    assert (drawn[0], drawn[4]) == (7, logits[4].argmax())
    assert histories[4, 1] == 7
    assert histories[0, 0] == drawn[4]


def case_copy_blocks() -> None:
    pool = torch.randn(3, 5, 24)
    expected = pool.clone()
    expected[:, [3, 4]] = pool[:, [0, 2]]
    pairs = torch.tensor([[0, 3], [2, 4]], dtype=torch.int32)
    copy_blocks_kernel[(2, 2, 3)](pairs, pool, 24, 5 * 24, TILE=16)
    close(pool, expected)


CASES: dict[str, Callable[[], None]] = {
    name.removeprefix("case_"): value for name, value in globals().items() if name.startswith("case_")
}

if __name__ == "__main__":
    adjust_interpreter()
    for case in sys.argv[1:] or CASES:
        torch.manual_seed(0)
        CASES[case]()
        print(case, "ok")
