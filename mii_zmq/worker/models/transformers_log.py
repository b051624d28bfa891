# SPDX-License-Identifier: Apache-2.0
"""Keeps what transformers says about models off the console, and turns its progress bars into ours."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as hf_logging

Progress = Callable[[str, float], None]

_lock = threading.RLock()
"""Over transformers' process-wide logging and progress settings."""


@contextmanager
def quiet(progress: Progress | None = None) -> Iterator[None]:
    """Silence log lines, warnings and progress bars in here; what a bar would show goes to `progress`.

    One thread at a time: another one waits.
    """
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level = hf_logging.get_verbosity()
        hf_logging.set_verbosity(hf_logging.CRITICAL)
        hook = hf_logging.set_tqdm_hook(lambda factory, args, options: _Bar(progress, *args, **options))
        try:
            yield
        finally:
            hf_logging.set_tqdm_hook(hook)
            hf_logging.set_verbosity(level)


class _Bar:
    """What transformers needs of a progress bar."""

    def __init__(self, progress: Progress | None, items: Any = (), **_: Any) -> None:
        self._progress, self._items = progress, items

    def __iter__(self) -> Iterator[Any]:
        for index, item in enumerate(self._items):
            yield item
            if self._progress is not None:
                self._progress("loading weights", (index + 1) / len(self._items))

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, count: int = 1) -> None:
        """Nothing to draw."""

    def close(self) -> None:
        """Nothing to draw."""
