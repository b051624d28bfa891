# SPDX-License-Identifier: Apache-2.0
"""Checks and times the mixture of experts on one NVIDIA GPU, against float64 and against the bytes of the experts hit.

    python scripts/bench_moe.py [--only SHAPE ...] [--tokens T ...] [--sweep SECONDS]

Per shape and number of tokens: random bfloat16 weights and tokens, poisoned buffers, error = ‖out - ref‖ / ‖ref‖ beside
that of torch's own bfloat16 products, then the time of a whole layer and of its four steps inside CUDA graphs that
rotate over layers larger than the L2 cache. `--sweep` tries other tile sizes for that many seconds per shape. Then:
deterministic mode gives each token the same bits in every batch and with both of its tile sizes, and a shard with a
shared expert in float16 is right. One JSON line per case; a case that raises is reported and the others go on. The exit
code is 1 if a check failed.

Under Triton's interpreter (TRITON_INTERPRET=1) everything is tiny and on the CPU, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from kernel_case import (
    DEVICE,
    DTYPE,
    F64,
    FLOP_LIMIT,
    HAS_PDL,
    IS_INTERPRETED,
    LIMITS,
    MAX_ERROR,
    MAX_ERROR_RATIO,
    NAN,
    error,
    time_launches,
)
from torch import Tensor
from torch.nn import functional
from triton.errors import TritonError

from mii_zmq.worker.models import cuda_moe_tiles
from mii_zmq.worker.models.cuda_moe import CudaMoe, MoeScratch, moe_sizes
from mii_zmq.worker.models.cuda_moe_tiles import MoeTiles
from mii_zmq.worker.models.model_weights import MoeWeights
from mii_zmq.worker.models.spec import MoeConfig

MAX_TOKENS = 40 if IS_INTERPRETED else 4096
NUM_TOKENS = [1, 33] if IS_INTERPRETED else [1, 4, 16, 64, 256, 4096]
CHECKED_TOKENS = 128
REPLAYS = 7
FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, TritonError)


@dataclass(frozen=True)
class Shape:
    hidden: int
    config: MoeConfig
    num_layers: int
    """Different ones, in turns."""


def shape(hidden: int, experts: int, top_k: int, inner: int, num_layers: int, renormalise: bool = True) -> Shape:
    if IS_INTERPRETED:
        hidden, experts, inner, num_layers = 48, min(experts, 12), 40, 1
    return Shape(hidden, MoeConfig(experts, top_k, inner, renormalise, 0, (True,)), num_layers)


SHAPES = {"mixtral-8x7b": shape(4096, 8, 2, 14336, 2), "qwen3-30b-a3b": shape(2048, 128, 8, 768, 4)}
SHARED = shape(2048, 60, 4, 1408, 1, renormalise=False)
"""Qwen1.5-MoE-A2.7B: nothing in it is a power of two."""


def random_layer(of: Shape, dtype: torch.dtype = DTYPE, held: tuple[int, int] | None = None) -> MoeWeights:
    config, hidden, inner = of.config, of.hidden, of.config.intermediate_size
    begin, end = held or (0, config.num_experts)

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=DEVICE).normal_(std=size[-1] ** -0.5)

    count = end - begin
    router, up, down = (
        normal(config.num_experts, hidden),
        normal(count, 2 * inner, hidden),
        normal(count, hidden, inner),
    )
    return MoeWeights(router, up, down, begin)


def tokens(count: int, hidden: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.empty(count, hidden, dtype=dtype, device=DEVICE).normal_()


class Rig:
    """Some layers with common buffers."""

    def __init__(self, of: Shape, layers: list[MoeWeights], **options: Any) -> None:
        self.shape, self.layers = of, layers
        self.sizes = moe_sizes(layers[0], of.config)
        self.scratch = MoeScratch.create(self.sizes, MAX_TOKENS, layers[0].up.dtype, DEVICE)
        self.use(**options)

    def use(self, **options: Any) -> None:
        processors = 1 if IS_INTERPRETED else torch.cuda.get_device_properties(DEVICE).multi_processor_count
        common = {"num_processors": processors, "pdl": HAS_PDL, **options}
        self.moes = [CudaMoe(layer, self.shape.config, "silu", self.scratch, **common) for layer in self.layers]

    def poison(self) -> None:
        scratch = self.scratch
        for tensor in (scratch.logits, scratch.weights, scratch.inner, scratch.results, scratch.partial):
            tensor.fill_(NAN)
        for tensor in (scratch.chosen, scratch.places, scratch.order, scratch.counts, scratch.items, scratch.num_items):
            tensor.fill_(-77)

    def run(self, x: Tensor, stream: Tensor, index: int = 0, **more: Any) -> Tensor:
        self.poison()
        out = stream.clone()
        self.moes[index].run(x, out, **more)
        return out

    def hits(self, x: Tensor) -> float:
        """Experts hit per layer."""
        counts = []
        for index in range(len(self.moes)):
            self.run(x, x, index)
            items = self.scratch.items[: int(self.scratch.num_items), 0]
            counts.append(items.unique().numel())
        return sum(counts) / len(counts)


def route(logits: Tensor, config: MoeConfig) -> tuple[Tensor, Tensor]:
    """Of the logits that the kernel computed, so that a near tie is decided alike."""
    weights, experts = torch.softmax(logits.double(), -1).sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, : config.top_k], experts[:, : config.top_k]
    return (weights / weights.sum(-1, keepdim=True) if config.renormalise else weights), experts


def expected(layer: MoeWeights, x: Tensor, weights: Tensor, experts: Tensor, dtype: torch.dtype) -> Tensor:
    """The held experts' sum with torch, products in `dtype`, rounded where the published models round."""
    out = torch.zeros(x.shape, dtype=dtype, device=DEVICE)
    for index in range(layer.up.shape[0]):
        rows, choices = torch.where(experts == index + layer.first_expert)
        if not len(rows):
            continue
        gate, up = functional.linear(x[rows].to(dtype), layer.up[index].to(dtype)).chunk(2, -1)
        result = functional.linear(functional.silu(gate) * up, layer.down[index].to(dtype))
        out.index_add_(0, rows, result * weights[rows, choices, None].to(dtype))
    return out


def check(rig: Rig, x: Tensor, index: int = 0) -> dict[str, Any]:
    """Errors of the layer's sum on top of a residual stream of zeros, and of torch's own products."""
    count, config, layer = x.shape[0], rig.shape.config, rig.layers[index]
    out = rig.run(x, torch.zeros_like(x), index)
    again = rig.run(x, torch.zeros_like(x), index)
    rows = torch.randperm(count, device=DEVICE)[:CHECKED_TOKENS]
    logits = rig.scratch.logits[:count][rows]
    logits_error = error(logits, functional.linear(x[rows].double(), layer.router.double()))
    weights, experts = route(logits, config)
    ref = expected(layer, x[rows], weights, experts, F64)
    own = error(expected(layer, x[rows], weights, experts, x.dtype), ref)
    wrong = error(out[rows], ref)
    allowed = MAX_ERROR if IS_INTERPRETED else min(MAX_ERROR, MAX_ERROR_RATIO * own)
    passed = wrong <= allowed and logits_error < 4e-3 and torch.equal(out, again)
    return {
        "error": float(f"{wrong:.3g}"), "torch_error": float(f"{own:.3g}"),
        "logits_error": float(f"{logits_error:.3g}"), "same_again": torch.equal(out, again), "passed": passed,
    }  # fmt: skip


def microseconds(rig: Rig, launch: Callable[[int], None]) -> float:
    launch(0)  # compiles it
    return NAN if IS_INTERPRETED else round(time_launches([launch], len(rig.layers), REPLAYS)[0], 2)


def measure(rig: Rig, x: Tensor, hits: float) -> dict[str, Any]:
    """Time of a layer, and what it makes of the card: bytes of the experts hit, or operations."""
    config, hidden = rig.shape.config, rig.shape.hidden
    stream = torch.zeros_like(x)
    taken = microseconds(rig, lambda index: rig.moes[index].run(x, stream))
    matrix = 3 * hidden * config.intermediate_size
    num_bytes, work = hits * matrix * 2, 2.0 * x.shape[0] * config.top_k * matrix
    floor = max(num_bytes / LIMITS["read"], work / FLOP_LIMIT) / 1e6
    return {
        "us": taken, "MB": round(num_bytes / 1e6, 1), "TB/s": round(num_bytes / taken / 1e6, 3),
        "TFLOP/s": round(work / taken / 1e6, 1), "floor_us": round(floor, 1), "over_floor": round(taken / floor, 3),
    }  # fmt: skip


def phases(rig: Rig, x: Tensor) -> dict[str, float]:
    """Time of each step of a layer, repeated by itself on the layer's last work."""
    stream, tiles = torch.zeros_like(x), rig.moes[0].tiles(x.shape[0])
    rig.run(x, stream)
    steps: dict[str, Callable[[int], None]] = {
        "combine_us": lambda index: rig.moes[index].combine(x, stream, None, tiles),
        "down_us": lambda index: rig.moes[index].down(x.shape[0], tiles),
        "up_us": lambda index: rig.moes[index].up(x, tiles),
        "route_us": lambda index: rig.moes[index].route(x, None, tiles),
    }
    return {name: microseconds(rig, step) for name, step in steps.items()}


def report(name: str, count: int, work: Callable[[], dict[str, Any]], **facts: Any) -> dict[str, Any] | None:
    """Run and print; a failure is printed and leaves nothing."""
    record: dict[str, Any] = {"case": name, "tokens": count, **facts}
    try:
        found = work()
    except FAILURES as failure:
        traceback.print_exception(failure)
        print(json.dumps({**record, "passed": False, "raised": repr(failure)[:300]}), flush=True)
        return None
    print(json.dumps({**record, **found}), flush=True)
    return found


def variants(tiles: MoeTiles) -> Iterator[MoeTiles]:
    """Neighbours of the chosen tiles, one change at a time; both products change alike where they can."""

    def both(**changes: Any) -> MoeTiles:
        return replace(tiles, up=replace(tiles.up, **changes), down=replace(tiles.down, **changes))

    yield both(tma=True)
    for stages in (-1, 1):
        yield replace(tiles, up=replace(tiles.up, stages=tiles.up.stages + stages))
        yield replace(tiles, down=replace(tiles.down, stages=tiles.down.stages + stages))
    for factor in (0.5, 2):
        yield replace(tiles, up=replace(tiles.up, tile_n=int(tiles.up.tile_n * factor)))
        yield replace(tiles, down=replace(tiles.down, tile_n=int(tiles.down.tile_n * factor)))
        yield replace(tiles, up=replace(tiles.up, tile_k=int(tiles.up.tile_k * factor)))
        yield replace(tiles, down=replace(tiles.down, tile_k=int(tiles.down.tile_k * factor)))
        yield replace(tiles, tile_m=int(tiles.tile_m * factor))
    yield both(num_warps=8 if tiles.up.num_warps == 4 else 4)


def sweep(name: str, rig: Rig, counts: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for count in counts:
        rig.use()
        x = tokens(count, rig.shape.hidden)
        hits, chosen = rig.hits(x), rig.moes[0].tiles(count)
        for tiles in variants(chosen):
            if time.monotonic() > deadline:
                return
            if tiles.tile_m < cuda_moe_tiles.NARROWEST:
                continue
            rig.use(tiles=tiles)
            if report(f"{name} sweep", count, lambda: check(rig, x), tiles=str(tiles)) is not None:  # noqa: B023
                report(f"{name} sweep", count, lambda: {**measure(rig, x, hits), **phases(rig, x)})  # noqa: B023


def bench_shape(name: str, of: Shape, counts: list[int], seconds: float) -> bool:
    rig = Rig(of, [random_layer(of) for _ in range(of.num_layers)])
    passed = True
    for count in counts:
        x = tokens(count, of.hidden)
        facts = {"tiles": str(rig.moes[0].tiles(count))}
        checked = report(name, count, lambda: check(rig, x), **facts)  # noqa: B023
        passed = passed and checked is not None and checked["passed"]
        if checked is None:
            continue
        hits = rig.hits(x)
        report(name, count, lambda: {"experts_hit": hits, **measure(rig, x, hits), **phases(rig, x)})  # noqa: B023
        # The same weights through the copy engine, whichever of the two is the default.
        tiles = rig.moes[0].tiles(count)
        use_tma = not tiles.up.tma
        other = replace(tiles, up=replace(tiles.up, tma=use_tma), down=replace(tiles.down, tma=use_tma))
        rig.use(tiles=other)
        checked = report(f"{name} tma {use_tma}", count, lambda: check(rig, x))  # noqa: B023
        if checked is not None:
            report(
                f"{name} tma {use_tma}", count, lambda: {**measure(rig, x, hits), **phases(rig, x)}  # noqa: B023
            )  # fmt: skip
        rig.use()
    if seconds:
        sweep(name, rig, [count for count in counts if count <= 256], seconds)
    rig.use(deterministic=True)
    found = report(f"{name} deterministic", MAX_TOKENS, lambda: check_deterministic(rig))
    return passed and found is not None and found["passed"]


def check_deterministic(rig: Rig) -> dict[str, Any]:
    """Tokens of a large step, again in smaller ones and alone."""
    x = tokens(MAX_TOKENS, rig.shape.hidden)
    stream = tokens(MAX_TOKENS, rig.shape.hidden)
    whole = rig.run(x, stream)
    same = {}
    for count in (1, 3, 16) if IS_INTERPRETED else (1, 3, 16, 64, 256, 1000):
        first = 7 * count % (MAX_TOKENS - count)
        rows = slice(first, first + count)
        same[count] = torch.equal(rig.run(x[rows].contiguous(), stream[rows].contiguous()), whole[rows])
    times = {}
    for count in (1, 64, MAX_TOKENS):
        times[f"us_{count}"] = measure(rig, x[:count], rig.hits(x[:count]))["us"]
    return {"same_bits": same, "passed": all(same.values()), **times}


def check_shared() -> dict[str, Any]:
    """A shard in float16, with padding, on top of a residual stream, beside a shared expert with a switch."""
    dtype, count, live = (DTYPE, 40, 31) if IS_INTERPRETED else (torch.float16, 70, 61)
    layer = random_layer(SHARED, dtype, (3, 9) if IS_INTERPRETED else (20, 41))
    switch_weight = layer.shared_switch = tokens(1, SHARED.hidden, dtype) / 64
    rig = Rig(SHARED, [layer])
    x, stream, shared = (tokens(count, SHARED.hidden, dtype) for _ in range(3))
    length = torch.tensor([live], dtype=torch.int32, device=DEVICE)
    found = rig.run(x, stream, live=length, shared=shared)
    weights, experts = route(rig.scratch.logits[:count], SHARED.config)
    experts[live:] = -1

    def ours(kind: torch.dtype) -> Tensor:
        switch = torch.sigmoid(functional.linear(x.to(kind), switch_weight.to(kind)))
        return stream.to(kind) + (expected(layer, x, weights, experts, kind) + switch * shared.to(kind))

    wrong, own = error(found, ours(F64)), error(ours(dtype), ours(F64))
    return {"error": wrong, "torch_error": own, "passed": wrong <= (MAX_ERROR if IS_INTERPRETED else 1.1 * own)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(SHAPES), default=list(SHAPES), help="shapes (default: all)")
    parser.add_argument("--tokens", nargs="*", type=int, default=NUM_TOKENS, help="tokens of a step")
    parser.add_argument("--sweep", type=float, default=0.0, help="seconds per shape to try other tile sizes")
    args = parser.parse_args()
    if not IS_INTERPRETED and not torch.cuda.is_available():
        print("bench_moe needs an NVIDIA GPU, and torch finds none here", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    passed = True
    shared = report("shared expert", 70, check_shared)
    passed = shared is not None and shared["passed"]
    for name in args.only:
        passed = bench_shape(name, SHAPES[name], args.tokens, args.sweep) and passed
        torch.cuda.empty_cache()
    device = "interpreter" if IS_INTERPRETED else torch.cuda.get_device_name()
    summary = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
    print(json.dumps({**summary, "passed": passed}), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
