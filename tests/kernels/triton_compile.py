# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel of the GPU decoder for one architecture, without a GPU: `triton_compile.py 90 [brief]`."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mii_zmq.kernels.triton import (
    argmax,
    batch_inputs,
    chunk_attention,
    decode_attention,
    elementwise,
    gemv,
    invariant_gemm,
    norm,
    rope_kv,
    rope_length,
    skinny_gemm,
    updates,
)
from mii_zmq.worker.models.cuda_attention import chunk_tiles, decode_tiles
from mii_zmq.worker.models.cuda_buffers import Card
from mii_zmq.worker.models.cuda_gemm import FEW, MANY

HALF, FLOAT, INT, LONG = "*bf16", "*fp32", "*i32", "*i64"
LONGS = ("block_stride", "layer_offset", "v_offset")
FLOATS = ("eps", "offset", "norm_offset", "scale_log2", "softcap")
POINTERS = {
    "partial_ptr": FLOAT, "partial_stat_ptr": FLOAT, "alibi_ptr": FLOAT, "cos_ptr": FLOAT, "sin_ptr": FLOAT,
    "value_ptr": FLOAT, "cell_ptr": LONG, "cells_ptr": LONG,
    "x_ptr": HALF, "q_ptr": HALF, "pool_ptr": HALF, "pool_desc": HALF, "out_ptr": HALF, "weight_ptr": HALF,
    "norm_ptr": HALF, "bias_ptr": HALF, "residual_ptr": HALF, "qkv_ptr": HALF, "q_norm_ptr": HALF, "k_norm_ptr": HALF,
    "embed_ptr": HALF, "table_ptr": HALF, "a_ptr": HALF, "b_ptr": HALF, "a_out_ptr": HALF, "b_out_ptr": HALF,
    "logits_ptr": HALF, "next_weight_ptr": HALF, "next_bias_ptr": HALF, "x_desc": HALF, "token_desc": HALF,
    "weight_desc": HALF,
}  # fmt: skip
BLOCKS = {
    "pool_desc": ("TILE_N", "HEAD_DIM"), "x_desc": ("M_PAD", "TILE_K"), "token_desc": ("TILE_M", "TILE_K"),
    "weight_desc": ("TILE_N", "TILE_K"),
}  # fmt: skip
"""Block shape of a tensor descriptor, by constants of its kernel."""


SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
HEADS = (
    (80, 1, {"HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_ALIBI": False}),
    (64, 71, {"HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_ALIBI": True}),
    (256, 2, {"HAS_WINDOW": True, "HAS_SOFTCAP": True, "HAS_ALIBI": False}),
)
"""Head size, query heads per key/value head, and what the scores go through: GPT-NeoX and Phi 2, Falcon 7B, Gemma 2."""


def compile_kernel(kernel: Any, capability: int, num_warps: int = 4, fused: bool = True, **constants: Any) -> Any:
    tma = constants.get("USE_TMA", False)
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif tma and name in BLOCKS:
            rows, columns = (constants[size] for size in BLOCKS[name])
            signature[name] = f"tensordesc<bf16[{rows},{columns}]>"
        elif name.endswith(("_ptr", "_desc")):
            signature[name] = POINTERS.get(name, INT)
        elif name in LONGS:
            signature[name] = "i64"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
        or (name in ("K", "N") and name not in constants)
        or (name.endswith(("stride", "offset")) and name not in FLOATS)
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    options = {"num_warps": num_warps, "enable_fp_fusion": fused}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_heads(capability: int) -> None:
    """Attention in the tile sizes of the engine fits the card."""
    card = Card(132, capability >= 90, SHARED_BYTES[capability])
    for head_dim, group, flags in HEADS:
        head_pad, group_pad = triton.next_power_of_2(head_dim), max(16, triton.next_power_of_2(group))
        sizes = {"HEAD_DIM": head_dim, "HEAD_PAD": head_pad, "BLOCK_SIZE": 64, "GROUP": group, **flags}
        chunk = chunk_tiles(head_dim, 64, card)
        kernels = [
            compile_kernel(
                chunk_attention.chunk_attention_kernel, capability, num_warps=chunk.num_warps, TILE_M=chunk.tokens,
                TILE_N=chunk.keys, STAGES=chunk.stages, USE_TMA=capability >= 90 and head_dim == 64, **sizes,
            )
        ]  # fmt: skip
        kernels += [
            compile_kernel(
                decode_attention.decode_attention_kernel, capability, num_warps=num_warps, NUM_KV_HEADS=2,
                GROUP_PAD=group_pad, TILE=64, STAGES=stages, PDL=capability >= 90, **sizes,
            )
            for stages, num_warps in set(decode_tiles(group_pad, head_pad))
        ]  # fmt: skip
        for kernel in kernels:
            assert kernel.metadata.shared <= card.shared_bytes, (head_dim, kernel.metadata.shared)


def main(capability: int, is_brief: bool) -> None:
    if not is_brief:
        compile_heads(capability)
    hopper = capability >= 90
    heads: dict[str, Any] = {"HEAD_DIM": 128, "HEAD_PAD": 128, "BLOCK_SIZE": 64}
    flags = {"HAS_SOFTCAP": False, "HAS_ALIBI": False}
    linear: dict[str, Any] = {"HAS_BIAS": False, "PDL": hopper}
    argmax_sizes: dict[str, Any] = {"NUM_TILES": 32, "PDL": hopper}
    compile_kernel(batch_inputs.batch_inputs_kernel, capability, MAX_ROWS=256, SEARCH_STEPS=9, BLOCK_SIZE=64, TILE=64)
    for window in (False, True):
        compile_kernel(
            decode_attention.decode_attention_kernel, capability, NUM_KV_HEADS=8, GROUP=4, GROUP_PAD=16, TILE=64,
            HAS_WINDOW=window, STAGES=3, PDL=hopper, **heads, **flags,
        )  # fmt: skip
        compile_kernel(
            chunk_attention.chunk_attention_kernel, capability, GROUP=4, TILE_M=128, TILE_N=64, HAS_WINDOW=window,
            USE_TMA=hopper, STAGES=2, **heads, **flags,
        )  # fmt: skip
        chunk = compile_kernel(
            chunk_attention.chunk_attention_kernel, capability, fused=False, GROUP=4, TILE_M=128, TILE_N=64,
            HAS_WINDOW=window, USE_TMA=hopper, STAGES=2, **heads, **flags,
        )  # fmt: skip
        assert "fma.rn" not in chunk.asm["ptx"], "loops with and without a mask round alike"
    for tiles, gated in itertools.product((FEW, MANY), (False, True)):
        gemm = compile_kernel(
            invariant_gemm.invariant_gemm_kernel, capability, num_warps=tiles.num_warps, TILE_M=tiles.tile_m,
            TILE_N=tiles.tile_n, TILE_K=tiles.tile_k, GROUP=8, STAGES=tiles.stages_for(gated, hopper), GATED=gated,
            HAS_RESIDUAL=not gated, USE_TMA=hopper, **linear,
        )  # fmt: skip
        assert gemm.metadata.shared <= SHARED_BYTES[capability], (tiles, gated)
    for normed in (False, True):
        compile_kernel(
            rope_kv.rope_kv_kernel, capability, NUM_HEADS=32, NUM_KV_HEADS=8, HEADS_PER_PROGRAM=8, HAS_ROPE=True,
            HAS_QK_NORM=normed, ROTARY_DIM=32 if normed else 128, PDL=hopper, **heads,
        )  # fmt: skip
        compile_kernel(
            gemv.gemv_kernel, capability, K=4096, ROWS=1, TILE_K=2048, NORM=normed, GATED=normed,
            HAS_RESIDUAL=not normed, **linear,
        )  # fmt: skip
        compile_kernel(
            skinny_gemm.skinny_gemm_kernel, capability, N=4096, K=4096, M_PAD=64, TILE_N=64, TILE_K=64, SPLIT_K=2,
            GATED=normed, HAS_RESIDUAL=not normed, STAGES=4, USE_TMA=hopper, **linear,
        )  # fmt: skip
        compile_kernel(
            norm.add_norm_kernel, capability, num_warps=8, D=4096, D_PAD=4096, IS_LAYER_NORM=normed,
            HAS_RESIDUAL=False, STORE_RESIDUAL=False, HAS_BIAS=normed, PDL=hopper,
        )  # fmt: skip
        compile_kernel(
            norm.norm_add_kernel, capability, num_warps=8, D=4608, D_PAD=8192, IS_LAYER_NORM=normed, HAS_BIAS=normed,
            HAS_NEXT=not normed, PDL=hopper,
        )  # fmt: skip
    search = {"MAX_ROWS": 256, "SEARCH_STEPS": 9}
    compile_kernel(rope_length.longrope_rows_kernel, capability, TILE=64, **search)
    compile_kernel(
        rope_length.dynamic_tables_kernel, capability, THETA=10000.0, FACTOR=2.0, ATTENTION_FACTOR=1.0, PAIRS=48,
        PAD=64, TILE=16, **search,
    )  # fmt: skip
    compile_kernel(elementwise.embed_kernel, capability, D=4096, D_PAD=4096, HAS_POSITIONS=True, SCALE=64.0)
    compile_kernel(elementwise.softcap_kernel, capability, V=256000, TILE=4096, PDL=hopper)
    compile_kernel(elementwise.activation_kernel, capability, I=14336, TILE=2048, GATED=True, KIND=0, PDL=hopper)
    compile_kernel(elementwise.gather_rows_kernel, capability, A=4096, B=4096, PAD=4096, PDL=hopper)
    compile_kernel(argmax.argmax_tiles_kernel, capability, V=128256, TILE=4096, **argmax_sizes)
    compile_kernel(argmax.argmax_rows_kernel, capability, num_warps=1, PAD=32, RECORD=True, **argmax_sizes)
    compile_kernel(updates.apply_updates_kernel, capability, TILE=1024)
    compile_kernel(updates.copy_blocks_kernel, capability, num_warps=8, TILE=8192)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] == ["brief"])
    print("ok")
