# SPDX-License-Identifier: Apache-2.0
"""Compiles the mixture of experts for one architecture, without a GPU: `python triton_moe_compile.py 90 [brief]`.

Tile sizes are those that `choose_tiles` gives to two published shapes; every kernel must fit the multiprocessor's
shared memory and keep its values in registers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mii_zmq.kernels.triton import moe_gemm, moe_routing
from mii_zmq.worker.models.cuda_moe import CHOOSE_CELLS, FEW_CELLS, FEW_ROUTED, GROUP, MANY_ROUTED
from mii_zmq.worker.models.cuda_moe_tiles import MoeSizes, choose_tiles

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
PROCESSORS = {80: 108, 90: 132, 100: 148}
SHAPES = {"Mixtral-8x7B": MoeSizes(8, 8, 2, 4096, 14336), "Qwen3-30B-A3B": MoeSizes(128, 128, 8, 2048, 768)}
NUM_TOKENS = (1, 64, 4096)
HALF, FLOAT, INT = "*bf16", "*fp32", "*i32"
INTS = ("chosen_ptr", "place_ptr", "order_ptr", "item_ptr", "num_items_ptr", "count_ptr", "live_ptr")


def compile_kernel(kernel: Any, capability: int, num_warps: int, float_out: bool = False, **constants: Any) -> str:
    """Registers, stack bytes and shared memory of the kernel, checked."""
    types = {"route_weight_ptr": FLOAT}
    if float_out:
        types |= {"out_ptr": FLOAT, "y_ptr": FLOAT}
    if kernel in (moe_routing.route_few_kernel, moe_routing.choose_kernel):
        types["weight_ptr"] = FLOAT
    signature = {}
    for name in kernel.arg_names:
        if name in constants or name == "live_ptr":
            signature[name] = "constexpr"
        elif name == "weight_desc":
            tma = constants["USE_TMA"]
            signature[name] = f"tensordesc<bf16[{constants['TILE_N']},{constants['TILE_K']}]>" if tma else HALF
        elif name.endswith("_ptr"):
            signature[name] = types.get(name, INT if name in INTS else HALF)
        else:
            signature[name] = "i32"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    constants = {**constants, **({"live_ptr": None} if "live_ptr" in kernel.arg_names else {})}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    shared = compiled.metadata.shared
    assert shared <= SHARED_BYTES[capability], f"{kernel.__name__}: {shared} bytes of shared memory"
    return f"{resources(compiled.asm['cubin'])} shared {shared}"


def resources(cubin: bytes) -> str:
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not dump.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(dump), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout  # fmt: skip
    words = dict(word.split(":") for word in text.split() if word.count(":") == 1 and word[-1].isdigit())
    assert int(words["STACK"]) < 64, f"registers are spilled: {text}"
    return f"registers {words['REG']} stack {words['STACK']}"


def compile_shape(name: str, sizes: MoeSizes, capability: int) -> None:
    hopper = capability >= 90
    experts = {
        "NUM_EXPERTS": sizes.num_experts, "HELD": sizes.held, "TOP_K": sizes.top_k, "RENORMALISE": True,
        "HAS_LIVE": False, "PDL": hopper,
    }  # fmt: skip
    pad = max(16, triton.next_power_of_2(sizes.num_experts))
    for tile_t, tile_e, tile_k, stages in (FEW_ROUTED, MANY_ROUTED):
        print(name, "router", tile_t, compile_kernel(
            moe_routing.router_kernel, capability, 4, NUM_EXPERTS=sizes.num_experts, K=sizes.hidden, TILE_T=tile_t,
            TILE_E=tile_e, TILE_K=tile_k, STAGES=stages, PDL=hopper,
        ))  # fmt: skip
    for tokens in (1, FEW_CELLS // pad):
        print(name, "route few", tokens, compile_kernel(
            moe_routing.route_few_kernel, capability, min(8, max(1, tokens * pad // 256)), T_PAD=tokens, E_PAD=pad,
            TILE_M=16, **experts,
        ))  # fmt: skip
    print(name, "choose", compile_kernel(
        moe_routing.choose_kernel, capability, 4, TILE_T=CHOOSE_CELLS // pad, E_PAD=pad, **experts
    ))  # fmt: skip
    print(name, "items", compile_kernel(
        moe_routing.items_kernel, capability, 1, HELD=sizes.held, HELD_PAD=pad, TILE_M=128, PDL=hopper
    ))  # fmt: skip
    done = set()
    for num_tokens, deterministic in ((count, mode) for mode in (False, True) for count in NUM_TOKENS):
        tiles = choose_tiles(sizes, num_tokens, PROCESSORS[capability], deterministic)
        for gated, part in ((True, tiles.up), (False, tiles.down)):
            for tma in (False, True) if hopper and not deterministic else (False,):
                key = (tiles.tile_m, part, gated, tma)
                if key in done:
                    continue
                done.add(key)
                print(name, num_tokens, "up" if gated else "down", tiles.tile_m, part, tma, compile_kernel(
                    moe_gemm.expert_gemm_kernel, capability, part.num_warps, float_out=part.split_k > 1,
                    N=sizes.inner if gated else sizes.hidden, K=sizes.hidden if gated else sizes.inner,
                    TOP_K=sizes.top_k, TILE_M=tiles.tile_m, TILE_N=part.tile_n, TILE_K=part.tile_k,
                    SPLIT_K=part.split_k, GROUP=GROUP, GATED=gated, KIND=0, STAGES=part.stages, USE_TMA=tma, PDL=hopper,
                ), flush=True)  # fmt: skip
    print(name, "combine", compile_kernel(
        moe_gemm.combine_kernel, capability, 4, D=sizes.hidden, D_PAD=sizes.hidden, TILE=1024, TOP_K=sizes.top_k,
        SPLIT_K=2, HAS_SHARED=True, HAS_SWITCH=True, HAS_RESIDUAL=True, PDL=hopper,
    ))  # fmt: skip


def main(capability: int, is_brief: bool) -> None:
    for name, sizes in list(SHAPES.items())[: 1 if is_brief else None]:
        compile_shape(name, sizes, capability)
    for chunk, num_warps in ((1024, 4), (4096, 8)):
        print("sort", compile_kernel(
            moe_routing.sort_kernel, capability, num_warps, CHUNK=chunk, PDL=capability >= 90
        ))  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] == ["brief"])
    print("ok")
