# SPDX-License-Identifier: Apache-2.0
"""How many tokens a step may have: the limit, or less for a while after one did not fit into memory. Pure."""

from __future__ import annotations

GOOD_STEPS = 50
"""That many good steps raise a lowered budget by a quarter; twice as many after every further one that did not fit."""
MAX_GOOD_STEPS = 3200


class StepBudget:
    """Halved by `shrink`, raised again by `note_good_step`."""

    def __init__(self, limit: int) -> None:
        self.tokens = limit
        self._limit = limit
        self._num_good = 0
        self._patience = GOOD_STEPS // 2

    def shrink(self, num_tokens: int) -> bool:
        """A step of so many tokens did not fit. False: it cannot be made smaller."""
        self._num_good = 0
        self._patience = min(2 * self._patience, MAX_GOOD_STEPS)
        if num_tokens <= 1:
            self.tokens = 1
            return False
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)
        return True

    def note_good_step(self) -> bool:
        """A step went well. True: the budget was raised."""
        if self.tokens == self._limit:
            return False
        self._num_good += 1
        if self._num_good < self._patience:
            return False
        self._num_good = 0
        self.tokens = min(self._limit, self.tokens + max(1, self.tokens // 4))
        if self.tokens == self._limit:
            self._patience = GOOD_STEPS // 2
        return True
