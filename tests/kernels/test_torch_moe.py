# SPDX-License-Identifier: Apache-2.0
"""The vectorised mixture of experts against the oracle, on odd shapes and unbalanced choices."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mii_zmq.kernels.layout import MoeShape
from mii_zmq.kernels.reference_moe import ReferenceMoe
from mii_zmq.kernels.torch_moe import TorchMoe, route


@dataclass
class Experts:
    router: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def random(cls, num_experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.float64) -> Experts:
        random = torch.Generator().manual_seed(num_experts * hidden + inner)
        shapes = ((num_experts, hidden), (num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
        return cls(*(torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) / 4 for shape in shapes))

    def to(self, dtype: torch.dtype) -> Experts:
        return Experts(self.router.to(dtype), self.up.to(dtype), self.down.to(dtype))

    def fast(self, top_k: int, renormalise: bool = True, activation: str = "silu") -> TorchMoe:
        return TorchMoe(self.router, self.up, self.down, activation, MoeShape(top_k, renormalise, 0))

    def oracle(self, top_k: int, renormalise: bool = True, activation: str = "silu") -> ReferenceMoe:
        return ReferenceMoe(self.router, self.up, self.down, activation, MoeShape(top_k, renormalise, 0))


def tokens(count: int, hidden: int) -> Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden", "inner"),
    [(1, 8, 2, 12, 7), (5, 7, 3, 5, 9), (33, 6, 1, 16, 8), (4, 60, 4, 8, 3), (9, 5, 5, 6, 2), (1, 1, 1, 3, 1)],
)
@pytest.mark.parametrize("renormalise", [False, True])
def test_equals_the_oracle(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int, renormalise: bool
) -> None:
    experts, x = Experts.random(num_experts, hidden, inner), tokens(num_tokens, hidden)
    expected = experts.oracle(top_k, renormalise)(x)
    torch.testing.assert_close(experts.fast(top_k, renormalise)(x), expected)
    found = experts.to(torch.float32).fast(top_k, renormalise)(x.float())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu", "gelu_tanh"])
def test_activations(activation: str) -> None:
    experts, x = Experts.random(4, 6, 5), tokens(7, 6)
    torch.testing.assert_close(
        experts.fast(2, activation=activation)(x), experts.oracle(2, activation=activation)(x)
    )  # fmt: skip


def test_a_step_without_tokens() -> None:
    assert Experts.random(4, 6, 5).fast(2)(tokens(0, 6)).shape == (0, 6)


def test_one_expert_hit_by_all_and_the_others_by_none() -> None:
    experts, x = Experts.random(8, 12, 6), tokens(20, 12).abs()
    experts.router[3] = 5.0
    found = experts.fast(1)(x)
    torch.testing.assert_close(found, experts.oracle(1)(x))
    gate, up = functional.linear(x, experts.up[3]).chunk(2, -1)
    torch.testing.assert_close(found, functional.linear(functional.silu(gate) * up, experts.down[3]))


def test_experts_of_equal_weight() -> None:
    """Which of them are taken is left open, so they compute the same; nobody is taken twice."""
    experts, x = Experts.random(6, 8, 4), tokens(10, 8)
    experts.router[:], experts.up[:], experts.down[:] = experts.router[0], experts.up[0], experts.down[0]
    for renormalise in (False, True):
        torch.testing.assert_close(experts.fast(4, renormalise)(x), experts.oracle(4, renormalise)(x))
    _, chosen = route(functional.linear(x, experts.router), MoeShape(4, True, 0))
    assert all(len(set(row)) == 4 for row in chosen.tolist())


@pytest.mark.parametrize("spans", [[(0, 3), (3, 5), (5, 7)], [(0, 7), (7, 7)], [(0, 1), (1, 7)]])
def test_the_ranks_results_add_up(spans: list[tuple[int, int]]) -> None:
    experts, x = Experts.random(7, 8, 4), tokens(11, 8)
    total = torch.zeros_like(x)
    for begin, end in spans:
        part = (experts.router, experts.up[begin:end], experts.down[begin:end], "silu", MoeShape(2, True, begin))
        found = TorchMoe(*part)(x)
        torch.testing.assert_close(found, ReferenceMoe(*part)(x))
        total += found
    torch.testing.assert_close(total, experts.fast(2)(x))


def test_a_token_whose_experts_are_elsewhere_gets_zeros() -> None:
    experts, x = Experts.random(4, 8, 4), tokens(3, 8).abs()
    experts.router[:2] = 9.0
    held_elsewhere = TorchMoe(experts.router, experts.up[2:], experts.down[2:], "silu", MoeShape(2, True, 2))
    assert not held_elsewhere(x).any()


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    experts, x = Experts.random(5, 8, 4), tokens(6, 8)
    expected = experts.fast(2)(x)
    x[2] = float("nan")
    found = experts.fast(2)(x)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(found[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_rounding(dtype: torch.dtype) -> None:
    experts, x = Experts.random(8, 32, 24, dtype), tokens(12, 32).to(dtype)
    experts.router.zero_()
    # Clear choices, which rounding does not change.
    experts.router[torch.arange(8), torch.arange(8)] = 4.0
    wide = experts.to(torch.float64)
    found, expected = experts.fast(2)(x), wide.oracle(2)(x.double())
    assert found.dtype is dtype
    assert (found.double() - expected).norm() / expected.norm() < 2 * torch.finfo(dtype).eps


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_published_model(dtype: torch.dtype) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=24, num_experts=12, num_experts_per_tok=3, norm_topk_prob=True
    )
    config._experts_implementation = "eager"
    experts, x = Experts.random(12, 32, 24, dtype), tokens(9, 32).to(dtype)
    block = Qwen3MoeSparseMoeBlock(config).to(dtype)
    weights = {
        "gate.weight": experts.router, "experts.gate_up_proj": experts.up, "experts.down_proj": experts.down,
    }  # fmt: skip
    block.load_state_dict(weights)
    with torch.no_grad():
        expected = block(x.unsqueeze(0)).squeeze(0)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(experts.fast(3)(x), expected, rtol=tolerance, atol=tolerance)
