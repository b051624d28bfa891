# SPDX-License-Identifier: Apache-2.0
"""One GGUF file: its metadata and tensors, checked against the file's length before anything is believed.

The header is parsed here because a count or length in it may be a lie; names of types, block sizes and dequantisation
come from the `gguf` library, which is imported when the first file is opened. Shapes are in the order of torch (GGUF
writes the fastest dimension first). Knows no model.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mii_zmq.errors import CheckpointError, ModelUnsupported

MAGIC = b"GGUF"
VERSIONS = (2, 3)
READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
MIN_FIELD_BYTES, MIN_TENSOR_BYTES, MIN_STRING_BYTES = 13, 24, 8
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor's values are."""

    kind: str
    """'F16', 'Q4_K' and so on."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    block_size: int
    """Elements of a row that are quantised together."""
    block_bytes: int


class GgufFile:
    """Metadata in `fields`, tensors in `tensors`; values are read from the mapped file when asked for.

    Raises:
        CheckpointError: not a GGUF file, or a damaged one, or the gguf package is missing.
        ModelUnsupported: a version that is not read.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise CheckpointError("reading GGUF files needs the gguf package: pip install 'mii_zmq[gguf]'") from None
        self._gguf = gguf
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        try:
            self.fields, self.tensors = self._parse()
        except (_Damaged, struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointError(f"{path} is no complete GGUF file: {error}; download it again") from None

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None), block: int = 0) -> Tensor:
        """A box of the matrix (or of row `block` of the stacked matrices) `name`, dequantised if need be.

        Raises:
            ModelUnsupported: a kind of quantisation that is not read.
        """
        tensor = self.tensors[name]
        if tensor.kind not in READABLE:
            raise ModelUnsupported(f"{self.path.name}: {name} {refusal(tensor.kind)}")
        *_, num_rows, width = (1, *tensor.shape)
        is_vector = len(tensor.shape) == 1
        if is_vector:
            rows, columns = slice(None), rows
        row_bytes = width // tensor.block_size * tensor.block_bytes
        begin, end, _ = rows.indices(num_rows)
        low, high, _ = columns.indices(width)
        if begin == end or low == high:
            return torch.empty(max(0, end - begin), max(0, high - low))
        offset = tensor.offset + (block * num_rows + begin) * row_bytes
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=(end - begin) * row_bytes, offset=offset)
        matrix = raw.view(end - begin, row_bytes)
        if tensor.kind in _DTYPES:
            values = matrix.view(_DTYPES[tensor.kind])[:, low:high]
        else:
            first, last = low // tensor.block_size, -(-high // tensor.block_size)
            blocks = matrix[:, first * tensor.block_bytes : last * tensor.block_bytes].contiguous().numpy()
            kind = self._gguf.GGMLQuantizationType[tensor.kind]
            values = torch.from_numpy(self._gguf.dequantize(blocks, kind))
            values = values[:, low - first * tensor.block_size : high - first * tensor.block_size]
        return values[0] if is_vector else values

    def _parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        cursor = _Cursor(self._data)
        if cursor.take(4) != MAGIC:
            raise _Damaged("it does not begin with GGUF")
        version = cursor.scalar("<I")
        if version not in VERSIONS:
            raise ModelUnsupported(f"{self.path} is a GGUF file of version {version}; versions 2 and 3 are read")
        num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
        cursor.expect(num_tensors * MIN_TENSOR_BYTES + num_fields * MIN_FIELD_BYTES)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = cursor.string()
            if name in fields:
                raise _Damaged(f"it holds the field {name!r} twice")
            fields[name] = cursor.value(cursor.scalar("<I"))
        tensors: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name = cursor.string()
            if name in tensors:
                raise _Damaged(f"it holds the tensor {name!r} twice")
            tensors[name] = self._tensor(cursor, name)
        return fields, self._placed(tensors, cursor.position, fields)

    def _tensor(self, cursor: _Cursor, name: str) -> GgufTensor:
        """One entry of the list; the offset still counts from the start of the data."""
        num_dims = cursor.scalar("<I")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise _Damaged(f"{name} has {num_dims} dimensions")
        shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))[::-1]
        number, offset = cursor.scalar("<I"), cursor.scalar("<Q")
        try:
            kind = self._gguf.GGMLQuantizationType(number)
            block_size, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelUnsupported(f"{self.path.name}: {name} {refusal(f'type {number}')}") from None
        if shape[-1] % block_size:
            raise _Damaged(f"{name} has rows of {shape[-1]} elements in blocks of {block_size}")
        num_bytes = math.prod(shape) // block_size * block_bytes
        return GgufTensor(kind.name, shape, offset, num_bytes, block_size, block_bytes)

    def _placed(self, tensors: dict[str, GgufTensor], end: int, fields: dict[str, Any]) -> dict[str, GgufTensor]:
        alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise _Damaged(f"its alignment is {alignment!r}")
        start = -(-end // alignment) * alignment
        for name, tensor in tensors.items():
            if start + tensor.offset + tensor.num_bytes > len(self._data):
                raise _Damaged(f"{name} ends behind the end of the file ({len(self._data)} bytes)")
        return {name: replace(tensor, offset=start + tensor.offset) for name, tensor in tensors.items()}


def refusal(kind: str) -> str:
    """Why a tensor of `kind` cannot be read; empty if it can."""
    return "" if kind in READABLE else f"is stored as {kind}; read are {', '.join(READABLE)}"


class _Damaged(Exception):
    """The file contradicts itself."""


class _Cursor:
    """Reads little-endian values, never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def expect(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self.position:
            raise _Damaged(f"a count or length at byte {self.position} reaches behind the end of the file")

    def take(self, num_bytes: int) -> bytes:
        self.expect(num_bytes)
        self.position += num_bytes
        return self._data[self.position - num_bytes : self.position]

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8")

    def value(self, kind: int, is_element: bool = False) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY or is_element:
            raise _Damaged(f"a field has the unknown type {kind}")
        element, count = self.scalar("<I"), self.scalar("<Q")
        if element in _SCALARS:
            layout = _SCALARS[element]
            self.expect(count * struct.calcsize(layout))
            return list(struct.unpack(f"<{count}{layout[1]}", self.take(count * struct.calcsize(layout))))
        self.expect(count * MIN_STRING_BYTES)
        return [self.value(element, is_element=True) for _ in range(count)]
