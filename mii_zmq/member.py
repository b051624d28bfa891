# SPDX-License-Identifier: Apache-2.0
"""The place of one child of the supervisor: how to start it, and how its successive processes have fared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mii_zmq.process import Child

MAX_FAILED_STARTS = 5
"""Deaths in a row, none of them after it was ready, that a child is allowed; one more and it is given up."""


@dataclass(slots=True, eq=False)
class Member:
    """The place of one child; successive processes fill it."""

    name: str
    module: str
    arguments: Callable[[], list[str]]
    """Made anew at every start: endpoints are known by then."""
    delay_s: float
    """Before the first restart; doubles with every further death that is not preceded by a stable time."""
    max_delay_s: float
    start_timeout_s: float
    child: Child | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What the child announced when it became ready."""
    is_ready: bool = False
    max_failed_starts: int = MAX_FAILED_STARTS
    failed_starts: int = 0
    deaths: int = 0
    started_at: float = 0.0
    ready_at: float = 0.0
    restart_at: float | None = None
    last_error: str | None = None
    is_leaving: bool = False
    """It has been told to end, to be started again at once."""
    left_at: float = 0.0
    incarnation: int = 0
    """Of places whose next process starts before the last one has left: both have to be told apart."""

    @property
    def is_given_up(self) -> bool:
        return self.child is None and self.restart_at is None
