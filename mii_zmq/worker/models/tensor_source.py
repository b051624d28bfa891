# SPDX-License-Identifier: Apache-2.0
"""What the loader needs of a checkpoint's files: which tensors there are, and boxes out of them, one at a time.

Names are those of the Hugging Face checkpoint whatever the format. A source never holds more than one file open and
never reads what nobody asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

Index = tuple[slice, ...]
"""A box of a tensor, one entry per leading dimension; steps of one."""
Read = Callable[[str, Index], Tensor]
"""(name, box) -> its values on the CPU in a floating dtype, valid until the file is closed."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    name: str
    file: Path
    shape: tuple[int, ...]
    num_bytes: int
    """In the file."""
    refusal: str = ""
    """Why its values cannot be read, where that is so."""


class TensorSource(Protocol):
    """A checkpoint's tensors, file after file."""

    def tensors(self) -> list[StoredTensor]:
        """All of them, file by file; the same name twice if two files hold it.

        Raises:
            CheckpointError: a file is missing or damaged.
        """

    def open(self, file: Path) -> AbstractContextManager[Read]:
        """Reads from one file; raises CheckpointError: it is damaged."""
