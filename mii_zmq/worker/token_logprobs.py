# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen tokens, and of the most probable ones beside them, from raw logits.

Both executors use this: `measure` runs where the logits are and gives one packed array, so that one copy brings it to
the host; `unpack` makes of it what a `StepResult` carries. Rows are measured a few at a time, since a float32 copy of
a step's logits may be larger than what is left of the memory. Each row by itself: others change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from mii_zmq.worker.plan import SamplingSpec, TokenLogprobs

MAX_ELEMENTS = 2**23
"""Logits that are held in float32 at the same time."""
_FIXED = 2


class LogprobSlots:
    """Which slots' sequences want log-probabilities, and how many beside each token."""

    def __init__(self) -> None:
        self._widths: dict[int, int] = {}
        self._prompt_widths: dict[int, int] = {}

    def install(self, slot: int, spec: SamplingSpec) -> None:
        """Replace what the slot held."""
        self.release((slot,))
        if spec.num_logprobs is not None:
            self._widths[slot] = spec.num_logprobs
        if spec.num_prompt_logprobs:
            self._prompt_widths[slot] = spec.num_prompt_logprobs

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._widths.pop(slot, None)
            self._prompt_widths.pop(slot, None)

    def rows(self, slots: Sequence[int]) -> dict[int, int]:
        """Index among `slots` -> width, of those that want their drawn tokens measured."""
        if not self._widths:
            return {}
        return {row: self._widths[slot] for row, slot in enumerate(slots) if slot in self._widths}

    def prompt_width(self, slot: int) -> int:
        """Tokens beside each scored prompt token."""
        return self._prompt_widths.get(slot, 0)


def measure(logits: Tensor, token_ids: Tensor, width: int) -> Tensor:
    """How probable the tokens are.

    Args:
        logits: [R, V], any float dtype.
        token_ids: [R] integers.
        width: most probable tokens per row; no more than V are found.

    Returns:
        [R, 2 + 2 * width] int32: the bits of the token's log-probability, its rank, the ids of the most probable
        tokens (descending), the bits of their log-probabilities.
    """
    width = min(width, logits.shape[1])
    step = max(1, MAX_ELEMENTS // logits.shape[1])
    parts = [
        _measure(some.float(), ids.long(), width)
        for some, ids in zip(logits.split(step), token_ids.split(step), strict=True)
    ]
    return torch.cat(parts)


def _measure(logits: Tensor, token_ids: Tensor, width: int) -> Tensor:
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    rank = (logits > chosen).sum(-1, keepdim=True, dtype=torch.int32) + 1
    top = logits.topk(width, -1)
    return torch.cat(
        [_bits(chosen - total), rank, top.indices.to(torch.int32), _bits(top.values - total)],
        dim=1,
    )


def _bits(values: Tensor) -> Tensor:
    return values.float().contiguous().view(torch.int32)


def unpack(packed: np.ndarray, widths: Sequence[int]) -> list[TokenLogprobs]:
    """The rows of `measure`, of each as many tokens as `widths` says."""
    widest = (packed.shape[1] - _FIXED) // 2
    floats = packed.view(np.float32)
    logprobs, ranks = floats[:, 0].tolist(), packed[:, 1].tolist()
    top_ids = packed[:, _FIXED : _FIXED + widest].tolist()
    top_logprobs = floats[:, _FIXED + widest :].tolist()
    return [
        TokenLogprobs(logprobs[row], ranks[row], top_ids[row][:width], top_logprobs[row][:width])
        for row, width in enumerate(widths)
    ]
