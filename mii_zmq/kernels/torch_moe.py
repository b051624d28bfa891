# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts with plain torch ops: one product per expert that some token chose, over all its tokens at once.

Tokens are sorted by expert once; experts then work on consecutive rows of one buffer, and the way back is one gather
and one small product with the routing weights. Every hit expert's weights are read once where they lie: gathering
them for a batched product copies them first, which measured slower for all but toy sizes.

Routing follows the published models: logits in x's dtype, softmax over all experts in float32, then the `top_k`
largest. The weights stay float32, and so does the sum over a token's experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mii_zmq.kernels.layout import MoeShape
from mii_zmq.kernels.torch_ops import ACTIVATIONS, gated


def route(logits: Tensor, shape: MoeShape) -> tuple[Tensor, Tensor]:
    """Logits [T, experts] -> weights [T, top_k], in float32 at least, and numbers of the chosen experts."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights, experts = torch.topk(torch.softmax(logits, -1, dtype=wide), shape.top_k, -1)
    if shape.renormalise:
        weights.div_(weights.sum(-1, keepdim=True))
    return weights, experts


class TorchMoe:
    """The experts `first_expert`, `first_expert` + 1, ... of one layer."""

    def __init__(self, router: Tensor, up: Tensor, down: Tensor, activation: str, shape: MoeShape) -> None:
        """router [E, H], up [held, 2 I, H] (gate over up), down [held, H, I]."""
        self._router, self._shape = router, shape
        self._num_held, self._wide = up.shape[0], up.shape[1]
        self._up = [matrix.t() for matrix in up.unbind(0)]
        self._down = [matrix.t() for matrix in down.unbind(0)]
        self._activation = gated(ACTIVATIONS[activation])

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]: the sum over the experts that are held here."""
        num_tokens, hidden = x.shape
        top_k = self._shape.top_k
        weights, experts = route(functional.linear(x, self._router), self._shape)
        order, counts = self._sort(experts)
        hit = [expert for expert, count in enumerate(counts) if count]
        sizes = [counts[expert] for expert in hit]
        num_rows = sum(sizes)
        rows = x.index_select(0, order[:num_rows] // top_k)
        wide = x.new_empty(num_rows, self._wide)
        for expert, part, out in zip(hit, rows.split(sizes), wide.split(sizes), strict=True):
            torch.mm(part, self._up[expert], out=out)
        inner = self._activation(wide)
        results = x.new_empty(num_tokens * top_k, hidden)
        # Rows of experts that other ranks hold.
        results[num_rows:].zero_()
        for expert, part, out in zip(hit, inner.split(sizes), results[:num_rows].split(sizes), strict=True):
            torch.mm(part, self._down[expert], out=out)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0], device=order.device)
        chosen = results.index_select(0, places).view(num_tokens, top_k, hidden).to(weights.dtype)
        return torch.bmm(weights.unsqueeze(1), chosen).squeeze(1).to(x.dtype)

    def _sort(self, experts: Tensor) -> tuple[Tensor, list[int]]:
        """The (token, choice) pairs by expert, those held elsewhere last; how many each held expert has."""
        held = experts.view(-1) - self._shape.first_expert
        if self._num_held < self._router.shape[0]:
            held = torch.where((held >= 0) & (held < self._num_held), held, self._num_held)
        counts = torch.bincount(held, minlength=self._num_held + 1).tolist()
        return held.argsort(stable=True), counts[: self._num_held]
