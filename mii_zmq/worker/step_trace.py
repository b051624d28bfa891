# SPDX-License-Identifier: Apache-2.0
"""A file with one JSON line per event in the life of a step: plan, submit, read, sent.

Times are CLOCK_MONOTONIC seconds, one clock for all processes of a machine, so a line can be compared with what a
client measured. Written unbuffered: the file is complete whatever ends the process.
"""

from __future__ import annotations

import time
from pathlib import Path

from mii_zmq.errors import ConfigError


class StepTrace:
    """Takes the engine core's trace entries and the channel's sends."""

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 (lives as long as the process)
        except OSError as error:
            raise ConfigError(f"step_trace: cannot write {path}: {error.strerror}") from None

    def append(self, entry: tuple[str, int]) -> None:
        """An event of the core and its step."""
        event, step = entry
        self._file.write(b'{"event": "%s", "step": %d, "at": %.6f}\n' % (event.encode(), step, time.monotonic()))

    def sent(self, step: int, num_rows: int, at: float) -> None:
        """The rows that became known with `step` were handed to the socket at `at`."""
        self._file.write(b'{"event": "sent", "step": %d, "rows": %d, "at": %.6f}\n' % (step, num_rows, at))

    def close(self) -> None:
        self._file.close()
