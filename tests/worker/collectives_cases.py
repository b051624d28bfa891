# SPDX-License-Identifier: Apache-2.0
"""`python collectives_cases.py [CASE ...]`: exchanges between two ranks, each a process, held to float64. On two GPUs
over peer memory and NCCL, in CUDA graphs too; elsewhere over gloo, which tries the cases themselves."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mii_zmq.worker.models.cuda_layer import FusedCollectives
from tests.worker.rank_processes import Place, run_on_ranks

BF16 = torch.bfloat16
MAX_ERROR = 2.0**-8
"""Of an element in bfloat16, as a share of the sum of the parts' magnitudes: one rounding, and one more for NCCL."""
Reduce = Callable[[Tensor], None]


@dataclass(frozen=True)
class Finding:
    error: float
    """‖out - ref‖ / ‖ref‖."""
    is_right: bool
    """Every element is near, and all ranks have the same bits."""


def part_of(place: Place, rank: int, rows: int, width: int, seed: int = 0) -> Tensor:
    """What that rank contributes; every rank can make every part."""
    generator = torch.Generator(place.device).manual_seed(64 * seed + rank)
    return torch.randn(rows, width, device=place.device, generator=generator).to(BF16)


def exact_sum(place: Place, rows: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """In float64: the sum of all parts, and of their magnitudes."""
    total = torch.zeros(rows, width, dtype=torch.float64, device=place.device)
    size = torch.zeros_like(total)
    for rank in range(place.rank.world_size):
        part = part_of(place, rank, rows, width, seed).double()
        total += part
        size += part.abs_()
    return total, size


def fingerprint(x: Tensor) -> int:
    """Of the bits, in their order."""
    bits = x.contiguous().view(torch.int16).flatten().to(torch.int64)
    return int((bits * torch.arange(1, len(bits) + 1, device=x.device)).sum()) & (2**40 - 1)


def judge(place: Place, x: Tensor, seed: int = 0) -> Finding:
    total, size = exact_sum(place, x.shape[0], x.shape[1], seed)
    error = x.double() - total
    is_near = bool((error.abs() <= MAX_ERROR * size).all())
    relative = float(error.norm() / total.norm())
    return Finding(relative, place.all_hold(is_near) & place.is_same(fingerprint(x)))


def check_reduce(place: Place, reduce: Reduce, rows: int, width: int) -> Finding:
    x = part_of(place, place.rank.rank, rows, width)
    reduce(x)
    return judge(place, x)


def replay(place: Place, launch: Callable[[], object]) -> Callable[[], object]:
    """What does the same from a CUDA graph; it has run once when this returns. Without a GPU: itself."""
    if place.device.type == "cpu":
        launch()
        return launch
    from mii_zmq.worker.cuda_graphs import GraphCache

    stream = torch.cuda.Stream(place.device)
    graphs = GraphCache(stream)

    def run() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graphs.run("launch", launch)
        torch.cuda.current_stream().wait_stream(stream)

    run()
    return run


def sizes(place: Place) -> list[tuple[int, int]]:
    """Of all three ways on GPUs, and odd ones."""
    if place.device.type == "cpu":
        return [(1, 64), (7, 48), (40, 64)]
    return [(1, 4096), (3, 576), (5, 100), (31, 8192), (64, 4096), (65, 8192), (300, 4096), (511, 8192), (2048, 8192)]


def case_sums(place: Place) -> None:
    for rows, width in sizes(place):
        found = check_reduce(place, place.collectives.reduce, rows, width)
        assert found.is_right, f"{rows} x {width}: {found}"


def case_changing(place: Place) -> None:
    """Many exchanges of changing sizes and ways behind one another, with no waiting on the host in between."""
    draw = random.Random(1)
    order = [draw.choice(sizes(place)) for _ in range(200 if place.device.type == "cuda" else 20)]
    sums = []
    for seed, (rows, width) in enumerate(order):
        x = part_of(place, place.rank.rank, rows, width, seed)
        place.collectives.reduce(x)
        sums.append(x)
        if len(sums) == 20:
            for behind, y in enumerate(reversed(sums)):
                assert judge(place, y, seed - behind).is_right, f"exchange {seed - behind}: {tuple(y.shape)}"
            sums.clear()


def case_graphs(place: Place) -> None:
    """Exchanges of several sizes in one graph, replayed with new data, with eager exchanges in between."""
    mixed = sizes(place)
    own = place.rank.rank
    held = [torch.empty(shape, dtype=BF16, device=place.device) for shape in mixed]

    def refill(seed: int) -> None:
        for x, (rows, width) in zip(held, mixed, strict=True):
            x.copy_(part_of(place, own, rows, width, seed))

    def reduce_all() -> None:
        for x in held:
            place.collectives.reduce(x)

    refill(0)
    run = replay(place, reduce_all)
    for seed in range(1, 30 if place.device.type == "cuda" else 3):
        refill(seed)
        run()
        for x in held:
            assert judge(place, x, seed).is_right, f"replay {seed}: {tuple(x.shape)}"
        if seed % 3 == 0:
            case_sums(place)


def case_norm(place: Place) -> None:
    """The fused sum, addition and RMSNorm give the bits of a sum and an addition, and their norm."""
    fused: object = place.collectives
    if not isinstance(fused, FusedCollectives):
        assert place.device.type == "cpu", "the GPUs cannot reach each other's memory"
        return
    for rows, width in sizes(place):
        x = part_of(place, place.rank.rank, rows, width)
        base = part_of(place, 9, rows, width)
        residual, out, weight = base.clone(), torch.full_like(base, torch.nan), part_of(place, 10, 1, width)[0]
        did = fused.reduce_add_norm(x, residual, weight, out, 1e-5)
        assert place.is_same(int(did))
        if not did:
            continue
        summed = part_of(place, place.rank.rank, rows, width)
        place.collectives.reduce(summed)
        assert torch.equal(residual, base + summed), f"{rows} x {width}: the residual"
        s = residual.double()
        expected = s * torch.rsqrt((s * s).mean(1, keepdim=True) + 1e-5) * weight.double()
        assert float((out.double() - expected).norm() / expected.norm()) < 3e-3, f"{rows} x {width}: the norm"
        assert place.is_same(fingerprint(out))


def case_gather(place: Place) -> None:
    for widths in ([64, 48], [1, 3]):
        parts = [part_of(place, rank, 5, width) for rank, width in enumerate(widths)]
        assert torch.equal(place.collectives.gather(parts[place.rank.rank], widths), torch.cat(parts, dim=1))
    assert place.collectives.agree(7 + place.rank.rank) == 7


CASES: dict[str, Callable[[Place], None]] = {
    "sums": case_sums,
    "changing": case_changing,
    "graphs": case_graphs,
    "norm": case_norm,
    "gather": case_gather,
}


def run_cases(place: Place, names: list[str]) -> None:
    for name in names:
        CASES[name](place)
        if place.is_first:
            print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    run_on_ranks(run_cases, sys.argv[1:] or list(CASES))
