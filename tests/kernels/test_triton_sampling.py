# SPDX-License-Identifier: Apache-2.0
"""The pieces of the sampling kernels: noise, sort keys, and that every kernel compiles for every supported GPU.

Triton's interpreter must be switched on before the kernels are imported, so the tests that need it run in a process
of their own, which `test_in_the_interpreter` starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.interpreter import INTERPRETED, adjust_interpreter

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mii_zmq.kernels.triton import penalties, sampling, topk_edge, topk_topp  # noqa: E402
from mii_zmq.worker.random_draw import gumbel, row_keys  # noqa: E402
from tests.kernels.test_triton_kernels import CAPABILITIES  # noqa: E402

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_INTERPRETED:
    adjust_interpreter()
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="test_in_the_interpreter runs it")
compiled = pytest.mark.skipif(IS_INTERPRETED, reason="needs the compiler")

GOLDEN_NOISE = [
    [-0.680758, 3.529359, -0.41687, -0.109353],
    [-0.52691, 0.755334, -0.530875, -0.290623],
    [4.719913, 0.974818, 0.220063, -0.064763],
    [0.031769, 1.553384, 2.24292, 2.435572],
]


@triton.jit
def noise_kernel(seed_ptr, position_ptr, token_id_ptr, key_ptr, noise_ptr, COUNT: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, COUNT)
    key = sampling.row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    tl.store(key_ptr + row, key.to(tl.int64))
    tl.store(noise_ptr + row * COUNT + offs, sampling.gumbel(key, tl.load(token_id_ptr + offs)))


@triton.jit
def sortable_kernel(x_ptr, key_ptr, back_ptr, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    keys = sampling.sortable(tl.load(x_ptr + offs))
    tl.store(key_ptr + offs, keys)
    tl.store(back_ptr + offs, sampling.from_sortable(keys))


def noise(seeds: list[int], positions: list[int], token_ids: Tensor) -> tuple[Tensor, Tensor]:
    keys = torch.empty(len(seeds), dtype=torch.int64)
    out = torch.full((len(seeds), len(token_ids)), float("nan"))
    noise_kernel[(len(seeds),)](
        torch.tensor(seeds), torch.tensor(positions, dtype=torch.int32), token_ids.int(), keys, out,
        COUNT=len(token_ids),
    )  # fmt: skip
    return keys, out


@pytest.mark.slow
@pytest.mark.timeout(300)
@compiled
def test_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, **INTERPRETED},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@interpreted
def test_noise_has_its_golden_values() -> None:
    _, out = noise([0, 0, 1, 2**63 - 1], [0, 1, 5, 131071], torch.tensor([0, 1, 49151, 151935]))
    torch.testing.assert_close(out, torch.tensor(GOLDEN_NOISE), rtol=0, atol=2e-6)


@interpreted
def test_keys_and_noise_equal_those_of_the_cpu() -> None:
    seeds, positions, token_ids = [0, 3, 2**62 + 11, 2**63 - 1], [1, 17, 100000, 2**31 - 1], torch.arange(8192)
    keys, out = noise(seeds, positions, token_ids)
    want = row_keys(torch.tensor(seeds), torch.tensor(positions))
    assert torch.equal(keys, want)
    torch.testing.assert_close(out, gumbel(want.unsqueeze(1), token_ids.unsqueeze(0)), rtol=3e-7, atol=3e-7)


@interpreted
def test_keys_sort_as_the_numbers_do() -> None:
    inf = float("inf")
    x = torch.tensor(
        [-inf, -3e38, -1.5, -1e-30, -0.0, 0.0, 1e-30, 2.0, 3e38, inf, float("nan"), -float("nan")] + [0] * 4
    )
    keys, back = torch.empty(16, dtype=torch.int32), torch.empty(16)
    sortable_kernel[(1,)](x.float(), keys, back, COUNT=16)
    numbers = keys[:10].tolist()
    assert numbers == sorted(numbers)
    assert numbers[4] == numbers[5]
    assert len(set(numbers)) == 9
    assert torch.equal(back[:10], x[:10].float())
    assert keys[0] == sampling.MINUS_INF_KEY.value
    assert keys[9] == sampling.INF_KEY.value
    assert keys[10] == keys[11] > keys[9]


SHAPE = {"WORDS": sampling.RECORD_WORDS}
TILES = {"NUM_TILES": 32, "PAD": 32}
SUMS = {"largest_ptr": "*fp32", "sum_ptr": "*fp32"}
KERNELS = {
    "drawn": (sampling.draw_tiles_kernel, {"FILTERED": True, "TILE": 2048, **SHAPE}, {}),
    "rows": (sampling.draw_rows_kernel, {"RECORD": True, **TILES}, {}),
    "exp_sum": (sampling.exp_sum_tiles_kernel, {"TILE": 2048}, SUMS),
    "log_prob": (sampling.log_prob_rows_kernel, TILES, SUMS),
    "row_max": (topk_topp.row_max_kernel, {"TILE": 4096, **SHAPE}, {}),
    "pivot_sums": (topk_topp.pivot_sums_kernel, {"PASS": 1, "TILE": 4096, **SHAPE, **TILES}, {}),
    "collect": (topk_topp.collect_kernel, {"CAPACITY": 16384, "TILE": 4096, **SHAPE, **TILES}, {}),
    "threshold": (
        topk_edge.threshold_kernel,
        {"CAPACITY": 16384, "CHUNK": 1024, "HELD": 4096, **SHAPE, **TILES},
        {},
    ),
    "clear": (penalties.clear_kernel, {"TILE": 2048, **SHAPE}, {}),
    "count": (penalties.count_kernel, {"TILE": 1024, **SHAPE}, {}),
    "edit": (penalties.edit_kernel, {"TILE": 2048, **SHAPE}, {}),
    "mask": (penalties.mask_kernel, {"TILE": 128, **SHAPE}, {}),
}
POINTERS = {
    "logits_ptr": "*bf16", "threshold_ptr": "*fp32", "pivot_ptr": "*fp32", "sum_ptr": "*fp64", "value_ptr": "*fp32",
    "edited_ptr": "*fp32", "out_ptr": "*fp32",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@compiled
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles(name: str, capability: int) -> None:
    kernel, constants, types = KERNELS[name]
    names = kernel.arg_names
    signature = {}
    for argument in names:
        integer = "*i32" if argument.endswith("_ptr") else "i32"
        signature[argument] = "constexpr" if argument in constants else {**POINTERS, **types}.get(argument, integer)
    aligned = {(index,): [["tt.divisibility", 16]] for index, argument in enumerate(names) if argument not in constants}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(argument),): value for argument, value in constants.items()},
        attrs=aligned,
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"]
