# SPDX-License-Identifier: Apache-2.0
"""What compiled grammars take of the grammar process's memory."""

from __future__ import annotations

import ctypes
from typing import Protocol

TRIM_BYTES = 2**24
"""Of grammars read between two trims: these take ten times as much while they are read, and leave holes behind. A trim
takes a millisecond for some MiB that it gives back, a hundredth of what reading them took."""


class Grammar(Protocol):
    """A compiled one."""

    @property
    def memory_size_bytes(self) -> int: ...


def bytes_of(grammar: Grammar, text: str) -> int:
    """What a grammar takes that was read from `text`, the library's JSON form.

    The library's own figure leaves out the automata: large schemas take up to 25 times as much. By the allocator's
    count (`mallinfo2`), for vocabularies of 257 and of 49,152 tokens and eight kinds of schemas, patterns and choices,
    a grammar takes at most 1.3 times the larger one of that figure and its text's length, and mostly more than half.
    """
    return max(grammar.memory_size_bytes, len(text))


class MemoryTrimmer:
    """Gives memory back to the system that the allocator keeps, when there is likely much of it."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        """glibc's; others do so by themselves, or cannot."""

    def note(self, text: str) -> None:
        """A grammar was read from this; others may have been forgotten for it."""
        self._num_bytes += len(text)
        if self._num_bytes >= TRIM_BYTES:
            self._num_bytes = 0
            if self._trim is not None:
                self._trim(0)
