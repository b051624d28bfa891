# SPDX-License-Identifier: Apache-2.0
"""Compiled grammars by their text, and those that were refused.

What a sequence follows takes memory whether it stands here or not, so it counts and stays; others stay as long as there
is room beside it, those that were used last at the longest. So what is kept is at most the limit, or what is in use,
which is bounded by the number of open sequences alone; and, in either case, the newest one that nobody uses.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mii_zmq.errors import MiiError

MAX_REFUSALS = 256
"""Grammars remembered for not being usable, so that asking again costs nothing."""
REFUSED_S = 60.0
"""For which a refusal is remembered: a compilation may have been late for the machine's sake."""

Key = tuple[str, str]
"""A grammar's kind and text."""


G = TypeVar("G")


@dataclass(slots=True)
class _Entry(Generic[G]):
    grammar: G
    num_bytes: int
    num_users: int = 0


class GrammarCache(Generic[G]):
    """Compiled grammars: those in use, and others up to a number of bytes in all."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._num_bytes = 0
        self._used: dict[Key, _Entry[G]] = {}
        self._idle: OrderedDict[Key, _Entry[G]] = OrderedDict()
        """Nobody's; those used last at the end."""
        self._refusals: OrderedDict[Key, tuple[MiiError, float]] = OrderedDict()
        """With the time until which they are remembered."""

    @property
    def num_bytes(self) -> int:
        """Of all grammars, in use or not."""
        return self._num_bytes

    def get(self, key: Key) -> G | MiiError | None:
        entry = self._used.get(key) or self._idle.get(key)
        if entry is not None:
            return entry.grammar
        error, until = self._refusals.get(key, (None, 0.0))
        return error if self._clock() < until else None

    def add(self, key: Key, grammar: G, num_bytes: int) -> None:
        """A grammar that is not here, and the memory that it takes. It stays at least until the next one comes."""
        entry = self._idle[key] = _Entry(grammar, num_bytes)
        self._num_bytes += entry.num_bytes
        self._trim()

    def use(self, key: Key) -> None:
        """One more sequence follows a grammar that is here."""
        entry = self._used.get(key)
        if entry is None:
            entry = self._used[key] = self._idle.pop(key)
        entry.num_users += 1

    def release(self, key: Key) -> None:
        """One sequence less does."""
        entry = self._used[key]
        entry.num_users -= 1
        if not entry.num_users:
            self._idle[key] = self._used.pop(key)
            self._trim()

    def refuse(self, key: Key, error: MiiError) -> None:
        self._refusals.pop(key, None)
        self._refusals[key] = (error, self._clock() + REFUSED_S)
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _trim(self) -> None:
        while self._num_bytes > self._max_bytes and len(self._idle) > 1:
            _, forgotten = self._idle.popitem(last=False)
            self._num_bytes -= forgotten.num_bytes
