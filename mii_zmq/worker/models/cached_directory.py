# SPDX-License-Identifier: Apache-2.0
"""Directories that are made once: whoever needs one waits while another process makes it, and never sees half of it."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str], None]


def made_once(directory: Path, make: Callable[[Path], None], say: Progress) -> Path:
    """`directory`, filled by `make` in a scratch directory first, if it is not there yet; one process at a time."""
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / f".{directory.name}.lock", say):
        if directory.is_dir():
            return directory
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
            target = Path(scratch) / "made"
            target.mkdir()
            make(target)
            target.rename(directory)
    return directory


@contextmanager
def _locked(path: Path, say: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that is preparing the model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
