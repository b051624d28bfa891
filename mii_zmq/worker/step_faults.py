# SPDX-License-Identifier: Apache-2.0
"""What an exception in a step says about the device, and when numeric failures say something about it.

Pure. Exceptions are told by their names and words, because the libraries that raise them are not imported here.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from mii_zmq.errors import MiiError

NUMERIC_LIMIT = 5
NUMERIC_WINDOW_S = 60.0


class FaultKind(Enum):
    FATAL = "fatal"
    """Every later step would fail too, or be wrong: the process must end."""
    MEMORY = "memory"
    """The step did not fit; a smaller one may."""
    STEP = "step"
    """Anything else; perhaps one of the step's sequences is to blame."""


_MEMORY_TYPES = frozenset({"MemoryError", "OutOfMemoryError"})
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "cublas_status_alloc_failed")
_FATAL_TYPES = frozenset({"AcceleratorError", "DistBackendError", "CUDARuntimeError", "CUDADriverError"})
_FATAL_WORDS = (
    "cuda error", "cuda driver error", "triton error [cuda]", "device-side assert", "illegal memory access",
    "unspecified launch failure", "cublas_status_", "cudnn_status_", "nccl error",
)  # fmt: skip


def classify(error: BaseException) -> FaultKind:
    """What kind of fault a step's exception, or what caused it, is.

    An exception of our own is fatal: executors raise one only when their state no longer follows the plans, or when a
    rank is lost.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, MiiError):
            return FaultKind.FATAL
        names = {cls.__name__ for cls in type(link).__mro__}
        text = str(link).lower()
        if not names.isdisjoint(_MEMORY_TYPES) or any(words in text for words in _MEMORY_WORDS):
            return FaultKind.MEMORY
        if not names.isdisjoint(_FATAL_TYPES) or any(words in text for words in _FATAL_WORDS):
            return FaultKind.FATAL
        link = link.__cause__
    return FaultKind.STEP


class NumericStreak:
    """Requests that ended for want of finite logits, while no other one got as far as its first token."""

    def __init__(self, limit: int = NUMERIC_LIMIT, window_s: float = NUMERIC_WINDOW_S) -> None:
        self._times: deque[float] = deque(maxlen=limit)
        self._window_s = window_s

    def failed(self, now: float) -> None:
        self._times.append(now)

    def succeeded(self) -> None:
        self._times.clear()

    @property
    def is_unhealthy(self) -> bool:
        """So many in so short a time that the weights or the device are to blame, not the requests."""
        times = self._times
        return len(times) == times.maxlen and times[-1] - times[0] <= self._window_s
