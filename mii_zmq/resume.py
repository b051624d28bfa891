# SPDX-License-Identifier: Apache-2.0
"""What the reader of a request's output has, and how the output goes on behind it. Pure; used by broker and client.

A continuation needs nothing but the token ids that its reader has: the sender replays them, so that text, stop strings
and penalties continue from there (a worker's rows end where its certain text ends: equal ids mean equal text). The
record therefore keeps ids only, appended as bytes, 4 per token. Senders may come and go, and old ones may still be
heard: a row counts only if it begins exactly where the record ends. A row that begins before is dropped, even if it
reaches further, since its text cannot be cut between two tokens; what the reader then misses shows as a hole in the
rows of the same sender, and a hole is where a continuation begins.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Place(enum.Enum):
    """Where a row begins."""

    NEXT = "next"
    """Where the record ended; it has been added."""
    PAST = "past"
    """Before the end: the reader has it."""
    HOLE = "hole"
    """Behind the end: something between is missing."""


# Looked up once: this runs for every row.
NEXT, PAST, HOLE = Place


class Delivered:
    """The output of one request that its reader has."""

    __slots__ = ("_resumed", "finish_reason", "num_tokens", "token_ids")

    def __init__(self, raw: Sequence[bytes] = ()) -> None:
        """`raw`: the frames that a GENERATE message came with; the first one holds ids that the reader had before."""
        self._resumed = raw
        self.token_ids = bytearray()
        """Those added since (int32, little endian)."""
        self.num_tokens = len(raw[0]) // 4 if raw else 0
        """Those that the reader had before included."""
        self.finish_reason: str | None = None
        """Of the finishing row, once it was added: nothing follows it but FINAL."""

    def take(self, token_offset: int, token_ids: bytes, finish_reason: str | None) -> Place:
        """Add a row, if it is the next one."""
        if token_offset == self.num_tokens and self.finish_reason is None:
            self.token_ids += token_ids
            self.num_tokens = token_offset + len(token_ids) // 4
            self.finish_reason = finish_reason
            return NEXT
        return self.place_of(token_offset)

    def place_of(self, token_offset: int) -> Place:
        """Where a row would begin."""
        if token_offset > self.num_tokens:
            return HOLE
        return NEXT if token_offset == self.num_tokens and self.finish_reason is None else PAST

    def resume_frames(self) -> Sequence[bytes]:
        """The raw frames of a GENERATE message that continues behind what the reader has."""
        if not self.token_ids:
            return self._resumed
        head = self._resumed[0] if self._resumed else b""
        return (head + bytes(self.token_ids), *self._resumed[1:])
