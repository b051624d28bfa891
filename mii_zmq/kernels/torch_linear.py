# SPDX-License-Identifier: Apache-2.0
"""Dense linear layers: torch's own product, or one over weights packed once for MKL.

MKL's packed float32 product avoids repacking the weight in every call; between 4 and 64 rows that makes it 1.3 to 3
times as fast as the plain one, elsewhere about equal. Which of the two a weight shape uses is measured at load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor], Tensor]

PACK_ROWS = 512
"""Row count that weights are packed for: this layout is near the best for every smaller count as well."""
PROBE_ROWS = (1, 8, 64)
PROBE_SECONDS = 0.2
CLEARLY_SLOWER = 1.15
"""Packing is given up for a shape only when it is slower than this on average; a small lead may be noise."""


class PlainLinear:
    """x [T, K] -> x @ weight.T + bias, [T, N]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """The same over a packed copy of a float32 weight; the weight itself is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACK_ROWS)
        # The op takes the original only for its shape, so a view of one element stands in for it.
        self._shape = weight.new_empty(1).expand(weight.shape)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkl._mkl_linear(x, self._packed, self._shape, self._bias, x.shape[0])


class LinearFactory:
    """Makes the linears of one model; remembers per weight shape which kind is fast and right on this machine."""

    def __init__(self) -> None:
        self._packs: dict[tuple[int, ...], bool] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        shape = tuple(weight.shape)
        if shape not in self._packs:
            self._packs[shape] = can_pack(weight) and _packing_pays(weight)
        return PackedLinear(weight, bias) if self._packs[shape] else PlainLinear(weight, bias)


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch can pack this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")
    )


def _packing_pays(weight: Tensor) -> bool:
    packed, plain = PackedLinear(weight, None), PlainLinear(weight, None)
    log_ratio = 0.0
    for rows in PROBE_ROWS:
        x = torch.full((rows, weight.shape[1]), 0.5).div_(torch.arange(1, rows + 1).unsqueeze(1))
        expected = plain(x)
        # The packed op is not documented, so its answer is checked before it is trusted.
        if not torch.allclose(packed(x), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            return False
        log_ratio += math.log(_seconds(packed, plain, x))
    return log_ratio / len(PROBE_ROWS) < math.log(CLEARLY_SLOWER)


def _seconds(packed: Linear, plain: Linear, x: Tensor) -> float:
    """Best time of `packed` over best time of `plain`, measured in turns."""
    best = {packed: math.inf, plain: math.inf}
    deadline = time.perf_counter() + PROBE_SECONDS / len(PROBE_ROWS)
    turns = 0
    while turns < 2 or (turns < 20 and time.perf_counter() < deadline):
        for linear in best:
            begin = time.perf_counter()
            linear(x)
            best[linear] = min(best[linear], time.perf_counter() - begin)
        turns += 1
    return best[packed] / best[plain]
