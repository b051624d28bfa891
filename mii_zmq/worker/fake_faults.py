# SPDX-License-Identifier: Apache-2.0
"""What a test makes the fake executor do wrong: by step number, by a step's size, or by a marker in a prompt.

A hook with a marker concerns every sequence whose prompt holds it, whenever a row of it is computed, cached prefixes or
not; with `after`, only once it has that many output tokens, resumed ones included.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum

EXIT_CODE = 86
"""Of a process that a request was made to end."""


class Hook(Enum):
    """What a marked sequence does to its step or its process."""

    RAISE = "raise"
    """The step raises, as for a bug that one request triggers."""
    LOSE = "lose"
    """The step and every later one raise, as for a lost device."""
    NAN = "nan"
    """The row writes numbers that are not finite, and has such logits."""
    HANG = "hang"
    """The step never ends."""
    EXIT = "exit"
    """The process ends at once."""


@dataclass(frozen=True, slots=True)
class Marker:
    token_ids: tuple[int, ...]
    after: int = 0


@dataclass(slots=True)
class Faults:
    """What goes wrong."""

    submit: dict[int, Exception] = field(default_factory=dict)
    """`submit` of that step raises once, and has applied nothing."""
    steps: dict[int, Exception] = field(default_factory=dict)
    """That step's `result` raises."""
    rows: dict[int, dict[int, str]] = field(default_factory=dict)
    """Slot -> reason, for rows of that step whose result is void."""
    markers: dict[Hook, Marker] = field(default_factory=dict)
    oom_above: int | None = None
    """Steps with more tokens do not fit into memory."""
    is_lost: bool = False
    hangs: bool = False

    def hooks_for(self, prompt_token_ids: list[int]) -> dict[Hook, int]:
        """The hooks of a sequence, and from how many output tokens on."""
        markers = self.markers.items()
        return {hook: marker.after for hook, marker in markers if _holds(prompt_token_ids, marker.token_ids)}

    def of_step(self, step: int, num_tokens: int, hooks: set[Hook]) -> Exception | None:
        """What the step raises; `hooks` are those of its rows."""
        if Hook.EXIT in hooks:
            os._exit(EXIT_CODE)
        self.hangs |= Hook.HANG in hooks
        self.is_lost |= Hook.LOSE in hooks
        if self.is_lost:
            return RuntimeError("CUDA error: device-side assert triggered (made up by a test)")
        if self.oom_above is not None and num_tokens > self.oom_above:
            return MemoryError(f"a step of {num_tokens} tokens is too large (made up by a test)")
        if Hook.RAISE in hooks:
            return RuntimeError("a marked request is in the batch (made up by a test)")
        return self.steps.pop(step, None)


def _holds(token_ids: list[int], wanted: tuple[int, ...]) -> bool:
    width = len(wanted)
    return any(tuple(token_ids[start : start + width]) == wanted for start in range(len(token_ids) - width + 1))
