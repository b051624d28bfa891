# SPDX-License-Identifier: Apache-2.0
"""When two greedy texts count as equal: up to the first difference, where the reference's two best logits must lie
within a tolerance; then the reference is forced along and comparison goes on behind it. At most 3 such positions in
1,000 are allowed over a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

MAX_TIES_PER_TOKEN = 3 / 1000


@dataclass
class EqualOutput:
    """Compares continuations with a transformers model and counts near ties."""

    model: Any
    tolerance: float = 1e-4
    num_tokens: int = 0
    ties: list[str] = field(default_factory=list)

    @torch.inference_mode()
    def compare(self, prompt: list[int], ours: list[int]) -> None:
        """Check `ours` (token ids behind `prompt`) against the model's own greedy choices.

        One forward pass over prompt + ours gives the reference's logits at every position, teacher-forced with our
        tokens: each of our tokens must be its best one, or within the tolerance of it.
        """
        logits = self.model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1]
        best, chosen = logits.max(-1).values, logits.gather(-1, torch.tensor(ours)[:, None])[:, 0]
        self.num_tokens += len(ours)
        for index in (best - chosen > 0).nonzero().flatten().tolist():
            gap = float(best[index] - chosen[index])
            assert gap <= self.tolerance, f"token {index}: ours lies {gap:.2e} below the reference's best logit"
            self.ties.append(f"token {index}: gap {gap:.1e}")

    def check(self) -> str:
        allowed = max(1, int(self.num_tokens * MAX_TIES_PER_TOKEN))
        assert len(self.ties) <= allowed, f"{len(self.ties)} near ties in {self.num_tokens} tokens: {self.ties}"
        return f"{self.num_tokens} tokens, {len(self.ties)} near ties"
