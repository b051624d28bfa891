# SPDX-License-Identifier: Apache-2.0
"""The oracle of the mixture of experts: one token and one expert at a time, in any float dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from mii_zmq.kernels.layout import MoeShape
from mii_zmq.kernels.torch_ops import ACTIVATIONS


class ReferenceMoe:
    """sum over the top_k experts e of p[e] * down[e] (activation(gate[e] x) * (up[e] x)), p = softmax(router x).

    Among experts of equal weight the first are chosen.
    """

    def __init__(self, router: Tensor, up: Tensor, down: Tensor, activation: str, shape: MoeShape) -> None:
        self._router, self._up, self._down, self._shape = router, up, down, shape
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]: the sum over the experts that are held here."""
        out = torch.zeros_like(x)
        for token in range(x.shape[0]):
            weights = torch.softmax(self._router @ x[token], 0)
            values = weights.tolist()
            chosen = sorted(range(len(values)), key=lambda expert: -values[expert])[: self._shape.top_k]
            total = weights[chosen].sum() if self._shape.renormalise else 1.0
            for expert in chosen:
                held = expert - self._shape.first_expert
                if 0 <= held < self._up.shape[0]:
                    out[token] += weights[expert] / total * self._expert(held, x[token])
        return out

    def _expert(self, held: int, x: Tensor) -> Tensor:
        gate, up = (self._up[held] @ x).chunk(2)
        return self._down[held] @ (self._activation(gate) * up)
