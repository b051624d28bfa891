# SPDX-License-Identifier: Apache-2.0
"""A Ctrl-C that comes when the code under test has got far enough, not after a time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 60.0


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """The block gets a KeyboardInterrupt once `condition` (called in a thread) holds, and must let it through."""
    has_ended, was_interrupted = threading.Event(), False

    def interrupt() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not has_ended.wait(0.01):
            if condition() or time.monotonic() > deadline:
                os.kill(os.getpid(), signal.SIGINT)
                return

    # A shell that runs the tests in the background has SIGINT ignored, and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        yield
    except KeyboardInterrupt:
        was_interrupted = True
    finally:
        has_ended.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert was_interrupted
