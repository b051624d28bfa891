# SPDX-License-Identifier: Apache-2.0
"""`python all_reduce_cases.py CASE`, or all of them, in Triton's interpreter; `compile CAPABILITY` without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mii_zmq.kernels.triton import all_reduce
from mii_zmq.kernels.triton.all_reduce import ALL, COLLECT, FLAG_BYTES, PUBLISH, REDUCE
from tests.interpreter import adjust_interpreter

HALF_BYTES = 4096


@dataclass
class Peers:
    """All ranks' buffers in one process; `epoch` is what the ranks have reached."""

    world_size: int
    epoch: int = 0
    buffers: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = [torch.zeros(FLAG_BYTES + 2 * HALF_BYTES, dtype=torch.uint8) for _ in range(self.world_size)]
        self.addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers])
        self.epochs = [torch.tensor([self.epoch, 0], dtype=torch.int32) for _ in range(self.world_size)]

    def run(
        self, kernel: Any, grid: int, phases: tuple[int, ...], arguments: list[tuple[Any, ...]], **options: Any
    ) -> None:
        for phase in phases:
            for rank in range(self.world_size):
                x, *rest = arguments[rank]
                kernel[(grid,)](
                    x, self.addresses, self.epochs[rank], *rest, HALF_BYTES // x.element_size(), rank,
                    *options.get("tail", ()),
                    WORLD=self.world_size, FLAGS=FLAG_BYTES, PHASES=phase, SYNC=phase == ALL, PDL=False,
                    **options.get("constants", {}),
                )  # fmt: skip


def row_arguments(parts: list[Tensor], residuals: list[Tensor], weight: Tensor, outs: list[Tensor]) -> list[Any]:
    return [
        (x, residual, weight, out, x.stride(0), residual.stride(0), out.stride(0), len(x))
        for x, residual, out in zip(parts, residuals, outs, strict=True)
    ]


def one_shot(norm: bool, world_size: int = 3, epoch: int = 2) -> None:
    torch.manual_seed(0)
    peers, width = Peers(world_size, epoch), 24
    parts = [torch.randn(5, width) for _ in range(world_size)]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    base, weight = torch.randn(5, width), torch.randn(width)
    residuals, outs = [base.clone() for _ in parts], [torch.zeros(5, width) for _ in parts]
    phases = (ALL,) if world_size == 1 else (PUBLISH, REDUCE)
    peers.run(
        all_reduce.all_reduce_norm_kernel, 2, phases, row_arguments(parts, residuals, weight, outs),
        tail=(1e-5, 1.0), constants={"D": width, "D_PAD": 32, "NORM": norm},
    )  # fmt: skip
    if world_size == 1:
        assert peers.epochs[0].tolist() == [epoch + 2, 0]
    if not norm:
        assert all(torch.equal(x, total) for x in parts)
        return
    s = total + base
    expected = s * torch.rsqrt((s * s).mean(1, keepdim=True) + 1e-5) * (weight + 1.0)
    for residual, out in zip(residuals, outs, strict=True):
        assert torch.equal(residual, s)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(out, outs[0])


def two_shot() -> None:
    torch.manual_seed(0)
    peers = Peers(2)
    parts = [torch.randn(150) for _ in range(2)]
    total = parts[0] + parts[1]
    arguments = [(x, len(x)) for x in parts]
    peers.run(all_reduce.two_shot_all_reduce_kernel, 3, (PUBLISH, REDUCE, COLLECT), arguments, constants={"TILE": 16})
    assert all(torch.equal(x, total) for x in parts)


def compile_all(capability: int) -> None:
    common: dict[str, Any] = {"FLAGS": FLAG_BYTES, "PHASES": ALL, "SYNC": True, "PDL": capability >= 90}
    for world_size in (2, 8):
        for norm in (False, True):
            constants = {"WORLD": world_size, "D": 4096, "D_PAD": 4096, "NORM": norm, **common}
            compile_kernel(all_reduce.all_reduce_norm_kernel, capability, constants)
        compile_kernel(all_reduce.two_shot_all_reduce_kernel, capability, {"WORLD": world_size, "TILE": 2048, **common})


def compile_kernel(kernel: Any, capability: int, constants: dict[str, Any]) -> None:
    types = {"buffers_ptr": "*i64", "epoch_ptr": "*i32", "half_elements": "i64", "eps": "fp32", "offset": "fp32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith(("stride", "_elements"))
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    ptx = compiled.asm["ptx"]
    assert "sys.release" in ptx, "flags are raised for other devices"
    assert "sys.acquire" in ptx
    assert "ld.global.cg.v4" in ptx, "peers' memory is read 16 bytes at a time"


CASES: dict[str, Callable[[], None]] = {
    "one_shot": lambda: one_shot(norm=False),
    "norm": lambda: one_shot(norm=True),
    "two_shot": two_shot,
    "alone": lambda: one_shot(norm=False, world_size=1, epoch=4),
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        compile_all(int(sys.argv[2]))
    else:
        adjust_interpreter()
        for case in sys.argv[1:] or CASES:
            CASES[case]()
    print("ok")
