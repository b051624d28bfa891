# SPDX-License-Identifier: Apache-2.0
"""A queue between threads whose reader can wait for file descriptors as well: the inbox of `pipeline()`'s engine."""

from __future__ import annotations

import contextlib
import os
import queue
import select
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class EngineInbox(Generic[T]):
    """Any thread puts, one reads."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._wake_fd)

    def put(self, item: T) -> None:
        self._queue.put(item)
        os.eventfd_write(self._wake_fd, 1)

    def get_nowait(self) -> T:
        """Raises queue.Empty."""
        return self._queue.get_nowait()

    def wait(self, timeout_s: float | None, descriptors: Sequence[tuple[int, int]] = ()) -> None:
        """Return when something was put since the last wait, a (file descriptor, `select.poll` events) is ready, or the
        time is up; None: never."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        for fd, events in descriptors:
            poll.register(fd, events)
        poll.poll(None if timeout_s is None else max(1, int(1000 * timeout_s)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
