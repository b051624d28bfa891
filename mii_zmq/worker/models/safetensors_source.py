# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files. A file is mapped while it is open, and only the pages of asked-for boxes are touched.

The library checks that the header is consistent: shapes against lengths, offsets without holes or overlaps, nothing
behind the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mii_zmq.errors import CheckpointError
from mii_zmq.worker.models.checkpoint_files import check_header, find_safetensors
from mii_zmq.worker.models.tensor_source import Read, StoredTensor

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of the dtypes that are read. Others hold quantized values, or masks that nothing reads."""


class SafetensorsSource:
    """The checkpoint in a directory; the constructor finds its files but opens none."""

    def __init__(self, directory: Path) -> None:
        self._files = find_safetensors(directory)

    def tensors(self) -> list[StoredTensor]:
        found: list[StoredTensor] = []
        for file in self._files:
            check_header(file)
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    view = tensors.get_slice(name)
                    shape, dtype = tuple(view.get_shape()), view.get_dtype()
                    is_float = dtype in _FLOATS
                    refusal = "" if is_float else f"has the dtype {dtype}; quantized checkpoints are not supported"
                    num_bytes = math.prod(shape) * _FLOATS.get(dtype, 1)
                    found.append(StoredTensor(name, file, shape, num_bytes, refusal))
        return found

    @contextmanager
    def open(self, file: Path) -> Iterator[Read]:
        with _opened(file) as tensors:
            yield lambda name, index: tensors.get_slice(name)[index]


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; download it again") from None
