# SPDX-License-Identifier: Apache-2.0
"""Shared memory between an engine and its grammar process: one row per sequence for its mask, and a note.

Masks are too large to travel as messages: a step of hundreds of sequences would have to be read in as many pieces as
the socket's buffer has room for. The grammar process writes a row and then says so; it writes the row again only when
the engine has read it and asked for the next mask. The note says which sequence the process works on.
"""

from __future__ import annotations

import mmap
import os

NOBODY = 0
MAX_ROWS = 2**14
"""Only rows that were used take memory."""


class MaskTable:
    """One process's view."""

    def __init__(self, fd: int, vocab_size: int, max_rows: int = MAX_ROWS) -> None:
        """`fd`: from `make_memory`; may be closed afterwards."""
        self.num_bytes = 4 * -(-vocab_size // 32)
        """Of a mask."""
        self.max_rows = max_rows
        self._memory = mmap.mmap(fd, table_bytes(vocab_size, max_rows))

    def write(self, row: int, mask: bytes) -> None:
        offset = self._offset(row)
        self._memory[offset : offset + self.num_bytes] = mask

    def read(self, row: int) -> bytes:
        offset = self._offset(row)
        return self._memory[offset : offset + self.num_bytes]

    def note(self, seq_id: int) -> None:
        """Which sequence is worked on; NOBODY: none."""
        self._memory[:8] = seq_id.to_bytes(8, "little")

    @property
    def noted(self) -> int:
        return int.from_bytes(self._memory[:8], "little")

    def close(self) -> None:
        self._memory.close()

    def _offset(self, row: int) -> int:
        if not 0 <= row < self.max_rows:
            raise IndexError(f"row {row} of a table of {self.max_rows} masks")
        return mmap.PAGESIZE + row * self.num_bytes


def table_bytes(vocab_size: int, max_rows: int = MAX_ROWS) -> int:
    return mmap.PAGESIZE + max_rows * 4 * -(-vocab_size // 32)


def make_memory(vocab_size: int, max_rows: int = MAX_ROWS) -> int:
    """A file descriptor of memory for a table."""
    fd = os.memfd_create("mii_zmq-grammar", os.MFD_CLOEXEC)
    os.ftruncate(fd, table_bytes(vocab_size, max_rows))
    return fd
