# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts of the GPU decoder against the oracle, on tiny float32 tensors in Triton's interpreter.

A program of its own, because the interpreter is chosen when Triton is imported: `python triton_moe_cases.py CASE`, or
all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace

from tests.interpreter import INTERPRETED, adjust_interpreter

os.environ.update(INTERPRETED)

import torch
from torch import Tensor
from torch.nn import functional

from mii_zmq.kernels.layout import MoeShape
from mii_zmq.kernels.reference_moe import ReferenceMoe
from mii_zmq.worker.models import cuda_moe
from mii_zmq.worker.models.cuda_moe import CudaMoe, MoeScratch, moe_sizes
from mii_zmq.worker.models.cuda_moe_tiles import MoeTiles, ProductTiles
from mii_zmq.worker.models.model_weights import MoeWeights
from mii_zmq.worker.models.spec import MoeConfig

NAN = float("nan")
TILES = MoeTiles(16, ProductTiles(16, 16, 1, 1), ProductTiles(32, 16, 1, 1))
SPLIT = replace(TILES, down=ProductTiles(16, 16, 1, 1, split_k=2))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def random_experts(num_experts: int, hidden: int = 24, inner: int = 40) -> MoeWeights:
    router, up, down = (
        torch.randn(num_experts, hidden),
        torch.randn(num_experts, 2 * inner, hidden) / 4,
        torch.randn(num_experts, hidden, inner) / 4,
    )
    return MoeWeights(router, up, down, 0)


def config_of(weights: MoeWeights, top_k: int, renormalise: bool = True) -> MoeConfig:
    num_experts, inner = weights.router.shape[0], weights.down.shape[2]
    return MoeConfig(num_experts, top_k, inner, renormalise, 0, (True,))


def oracle(weights: MoeWeights, config: MoeConfig, x: Tensor, activation: str = "silu") -> Tensor:
    shape = MoeShape(config.top_k, config.renormalise, weights.first_expert)
    return ReferenceMoe(weights.router, weights.up, weights.down, activation, shape)(x)


class Rig:
    """A layer with poisoned buffers, and room for a few more tokens than it gets."""

    def __init__(
        self,
        weights: MoeWeights,
        config: MoeConfig,
        max_tokens: int,
        activation: str = "silu",
        adds_to_out: bool = False,
        tiles: MoeTiles | None = TILES,
        deterministic: bool = False,
    ) -> None:
        self.weights, self.config = weights, config
        cpu = torch.device("cpu")
        self.scratch = MoeScratch.create(moe_sizes(weights, config), max_tokens + 2, torch.float32, cpu)
        self.moe = CudaMoe(
            weights, config, activation, self.scratch, num_processors=1, adds_to_out=adds_to_out, tiles=tiles,
            deterministic=deterministic,
        )  # fmt: skip
        self.poison()

    def poison(self) -> None:
        scratch = self.scratch
        for tensor in (scratch.logits, scratch.weights, scratch.inner, scratch.results, scratch.partial):
            tensor.fill_(NAN)
        for tensor in (scratch.chosen, scratch.places, scratch.order, scratch.counts, scratch.items, scratch.num_items):
            tensor.fill_(-77)

    def run(self, x: Tensor, live: int | None = None) -> Tensor:
        out = torch.full_like(x, NAN)
        self.moe.run(x, out, None if live is None else torch.tensor([live], dtype=torch.int32))
        return out


def case_routing() -> None:
    """Work items and places, by the program for few tokens and by the three for many."""
    found = []
    for few_cells in (cuda_moe.FEW_CELLS, 0):
        torch.manual_seed(1)
        weights, x = random_experts(11), torch.randn(37, 24)
        weights.router[4] = 0.0
        weights.up, weights.down, weights.first_expert = weights.up[2:9], weights.down[2:9], 2
        rig = Rig(weights, config_of(weights, 3), 37)
        usual, cuda_moe.FEW_CELLS = cuda_moe.FEW_CELLS, few_cells
        rig.run(x, live=33)
        cuda_moe.FEW_CELLS = usual
        scratch = rig.scratch
        values, experts = torch.softmax(x @ weights.router.t(), -1).topk(3, -1)
        close(scratch.weights[: 37 * 3].view(37, 3), values / values.sum(-1, keepdim=True))
        experts = experts - 2
        experts[(experts < 0) | (experts >= 7) | (torch.arange(37) >= 33).unsqueeze(1)] = 99
        places = scratch.places[: 37 * 3]
        assert torch.equal(places < 0, experts.view(-1) == 99)
        expected_order = experts.view(-1).argsort(stable=True)[: int((experts < 99).sum())]
        assert torch.equal(scratch.order[: len(expected_order)].long(), expected_order)
        assert torch.equal(places[expected_order].long(), torch.arange(len(expected_order)))
        items, begin = [], 0
        for expert, count in enumerate(torch.bincount(experts[experts < 99], minlength=7).tolist()):
            items += [[expert, begin + first, begin + count] for first in range(0, count, 16)]
            begin += count
        assert scratch.num_items.item() == len(items) <= rig.moe._sizes.max_items(37, 16)
        assert scratch.items[: len(items), :3].tolist() == items
        assert (scratch.items[len(items) :, :3] == -77).all()
        found.append([scratch.places.clone(), scratch.order.clone(), scratch.items.clone(), scratch.weights.clone()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def case_layer() -> None:
    shapes = ((1, 8, 2, 24, 40), (5, 7, 3, 24, 40), (40, 3, 1, 16, 32), (19, 20, 8, 20, 12), (6, 4, 4, 48, 16))
    for num_tokens, num_experts, top_k, hidden, inner in shapes:
        for tiles, renormalise in ((TILES, True), (SPLIT, False)):
            if num_tokens > 16 and tiles is SPLIT:
                continue
            weights, x = random_experts(num_experts, hidden, inner), torch.randn(num_tokens, hidden)
            config = config_of(weights, top_k, renormalise)
            close(Rig(weights, config, num_tokens, tiles=tiles).run(x), oracle(weights, config, x))


def case_activations() -> None:
    for activation in ("silu", "relu", "gelu", "gelu_tanh"):
        weights, x = random_experts(4), torch.randn(6, 24)
        config = config_of(weights, 2)
        found = Rig(weights, config, 6, activation).run(x)
        close(found, oracle(weights, config, x, activation))


def case_unbalanced() -> None:
    weights, x = random_experts(6), torch.randn(35, 24).abs()
    config = config_of(weights, 1)
    weights.router[3] = 5.0
    rig = Rig(weights, config, 35)
    close(rig.run(x), oracle(weights, config, x))
    assert rig.scratch.items[:3, 0].tolist() == [3, 3, 3]
    weights.router.zero_()
    config = config_of(weights, 4)
    close(Rig(weights, config, 35).run(x), oracle(weights, config, x))


def case_shards() -> None:
    weights, x = random_experts(7), torch.randn(9, 24)
    config = config_of(weights, 2)
    total = torch.zeros_like(x)
    for begin, end in ((0, 3), (3, 7), (7, 7)):
        part = MoeWeights(weights.router, weights.up[begin:end], weights.down[begin:end], begin)
        found = Rig(part, config, 9).run(x)
        close(found, oracle(part, config, x))
        total += found
    close(total, oracle(weights, config, x))


def case_shared() -> None:
    weights, x = random_experts(5), torch.randn(6, 24)
    config = config_of(weights, 2)
    routed, shared, stream = oracle(weights, config, x), torch.randn(6, 24), torch.randn(6, 24)
    for switch in (None, torch.randn(1, 24)):
        weights.shared_switch = switch
        scaled = shared if switch is None else torch.sigmoid(functional.linear(x, switch)) * shared
        for adds in (False, True):
            rig, out = Rig(weights, config, 6, adds_to_out=adds), stream.clone()
            rig.moe.run(x, out, None, shared)
            close(out, routed + scaled + stream if adds else routed + scaled)


def case_padding() -> None:
    """Tokens that do not count hit no expert, and one that is not finite spoils no other."""
    weights, x = random_experts(9), torch.randn(7, 24)
    config = config_of(weights, 2)
    expected = oracle(weights, config, x)
    x[2], x[5:] = NAN, NAN
    for few_cells in (cuda_moe.FEW_CELLS, 0):
        usual, cuda_moe.FEW_CELLS = cuda_moe.FEW_CELLS, few_cells
        rig = Rig(weights, config, 7)
        found = rig.run(x, live=5)
        cuda_moe.FEW_CELLS = usual
        assert found[2].isnan().all()
        close(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
        assert not found[5:].any(), "padding adds nothing"
        assert rig.scratch.items[: int(rig.scratch.num_items), 0].unique().numel() <= 10


def case_chosen_tiles() -> None:
    """The tile sizes that the GPU gets, though far too large for these shapes; and the deterministic ones."""
    for num_tokens, num_experts, top_k in ((1, 8, 2), (20, 3, 2), (150, 2, 1)):
        weights, x = random_experts(num_experts), torch.randn(num_tokens, 24)
        config = config_of(weights, top_k)
        for deterministic in (False, True):
            rig = Rig(weights, config, num_tokens, tiles=None, deterministic=deterministic)
            close(rig.run(x), oracle(weights, config, x))


CASES: dict[str, Callable[[], None]] = {
    name.removeprefix("case_"): value for name, value in globals().items() if name.startswith("case_")
}

if __name__ == "__main__":
    adjust_interpreter()
    for case in sys.argv[1:] or CASES:
        torch.manual_seed(0)
        CASES[case]()
        print(case, "ok")
