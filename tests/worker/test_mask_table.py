# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest

from mii_zmq.worker.mask_table import NOBODY, MaskTable, make_memory


def test_both_processes_see_rows_and_note():
    fd = make_memory(257, max_rows=4)
    ours, theirs = MaskTable(fd, 257, max_rows=4), MaskTable(fd, 257, max_rows=4)
    os.close(fd)
    assert ours.num_bytes == 36
    for row in range(4):
        theirs.write(row, bytes([row + 1]) * 36)
    assert [ours.read(row) for row in range(4)] == [bytes([row + 1]) * 36 for row in range(4)]
    assert ours.noted == NOBODY
    theirs.note(2**40 + 1)
    assert ours.noted == 2**40 + 1
    for row in (-1, 4):
        with pytest.raises(IndexError):
            theirs.write(row, bytes(36))
    ours.close()
    theirs.close()
