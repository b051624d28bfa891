# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import queue
import select
import threading
import time

import pytest

from mii_zmq.worker.engine_inbox import EngineInbox


def test_items_come_in_order_and_none_is_no_wait():
    inbox: EngineInbox[int] = EngineInbox()
    for number in range(3):
        inbox.put(number)
    inbox.wait(None)
    assert [inbox.get_nowait() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(queue.Empty):
        inbox.get_nowait()


def test_a_wait_ends_with_an_item_of_another_thread():
    inbox: EngineInbox[str] = EngineInbox()
    threading.Timer(0.02, inbox.put, ("late",)).start()
    inbox.wait(None)
    assert inbox.get_nowait() == "late"


def test_a_wait_ends_with_a_descriptor_or_with_its_time():
    inbox: EngineInbox[str] = EngineInbox()
    read_fd, write_fd = os.pipe()
    try:
        started = time.monotonic()
        inbox.wait(0.02, [(read_fd, select.POLLIN)])
        assert time.monotonic() - started >= 0.015
        os.write(write_fd, b"x")
        inbox.wait(None, [(read_fd, select.POLLIN)])
    finally:
        os.close(read_fd)
        os.close(write_fd)
