# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io

from mii_zmq.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_each_stage_is_one_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for fraction in (0.0, 0.3, 0.6):
        progress({"name": "worker 1", "progress": "loading weights", "fraction": fraction})
        progress({"name": "worker 2", "progress": "loading weights", "fraction": fraction})
    progress({"name": "worker 1", "progress": "reserving the KV pool"})
    progress({"progress": "no name"})
    progress({"ready": True})
    progress.close()
    assert stream.getvalue().splitlines() == [
        "worker 1: loading weights",
        "worker 2: loading weights",
        "worker 1: reserving the KV pool",
        "no name",
    ]


def test_on_a_terminal_there_is_one_bar_per_group() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress({"name": "worker 1", "progress": "loading weights", "fraction": 0.25})
    progress({"name": "worker 1", "progress": "loading weights", "fraction": 7})
    progress({"name": "worker 2", "progress": "starting", "fraction": None})
    progress.close()
    printed = stream.getvalue()
    assert "worker 1: loading weights" in printed
    assert "100%" in printed
    assert "worker 2: starting" in printed
