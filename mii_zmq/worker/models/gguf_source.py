# SPDX-License-Identifier: Apache-2.0
"""Tensors of a GGUF file under the names, and in the layout, of the Hugging Face checkpoint it was made from.

Names come from the `gguf` library's own tables. What its converters change is undone here, tensor by tensor: Llama's
reordered rotary rows, Gemma's norms with the offset added, experts stacked into one tensor, squeezed vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mii_zmq.errors import CheckpointError
from mii_zmq.worker.models.gguf_file import GgufFile, refusal
from mii_zmq.worker.models.spec import ModelConfig, Role
from mii_zmq.worker.models.tensor_source import Index, Read, StoredTensor

DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Rotary factors; the imported config.json says them in its own way."""
_EXPERT_ROLES = (Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN)
_NORM_ROLES = (
    Role.EMBED_NORM, Role.FINAL_NORM, Role.ATTN_NORM, Role.ATTN_POST_NORM, Role.MLP_NORM, Role.MLP_POST_NORM,
    Role.Q_NORM, Role.K_NORM,
)  # fmt: skip


@dataclass(frozen=True)
class _Origin:
    """How a tensor of the checkpoint comes out of the file."""

    name: str
    """In the GGUF file."""
    shape: tuple[int, ...]
    role: Role | None = None
    expert: int | None = None


def find_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory without safetensors; None if there is none.

    Raises:
        CheckpointError: there are several, or the one that was imported has gone.
    """
    found = sorted(directory.glob("*.gguf"))
    if not found or any(directory.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"{directory} holds {len(found)} GGUF files; give the path of one (parts of a split model must be merged "
            "with llama-gguf-split --merge first)"
        )
    if not found[0].is_file():
        raise CheckpointError(f"{found[0].resolve()} has gone since it was imported; give the path of the GGUF file")
    return found[0]


class GgufSource:
    """A GGUF file whose model `config` describes.

    Raises:
        CheckpointError: the file is damaged, or of another architecture.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._path = path
        self._config = config
        self._file = GgufFile(path)
        self._architecture = str(self._file.fields.get("general.architecture"))
        self._origins = self._find_origins()

    def tensors(self) -> list[StoredTensor]:
        stored = []
        for name, origin in self._origins.items():
            tensor = self._file.tensors[origin.name]
            share = tensor.shape[0] if origin.expert is not None else 1
            stored.append(StoredTensor(name, self._path, origin.shape, tensor.num_bytes // share, refusal(tensor.kind)))
        return stored

    @contextmanager
    def open(self, file: Path) -> Iterator[Read]:
        yield self._read

    def _find_origins(self) -> dict[str, _Origin]:
        """Every tensor of the file under its new name; unknown ones keep theirs, for the loader to refuse."""
        known = self._known_names()
        origins: dict[str, _Origin] = {}

        def add(name: str, origin: _Origin) -> None:
            if name in origins:
                raise CheckpointError(f"{self._path} holds {origins[name].name} and {origin.name}, which are the same")
            origins[name] = origin

        for stored, tensor in self._file.tensors.items():
            if stored in DERIVED:
                continue
            base, dot, suffix = stored.rpartition(".")
            role, name = known.get(base, (None, base))
            shape = tensor.shape
            if role is Role.SHARED_SWITCH and len(shape) == 1:
                shape = (1, *shape)
            if role in _EXPERT_ROLES and len(shape) == 3:
                for expert in range(shape[0]):
                    add(f"{name.replace('{e}', str(expert))}.{suffix}", _Origin(stored, shape[1:], role, expert))
            else:
                add(name + dot + suffix, _Origin(stored, shape, role))
        return origins

    def _known_names(self) -> dict[str, tuple[Role, str]]:
        """GGUF name -> role and the checkpoint's name (with {e} for the expert), both without '.weight' or '.bias'."""
        import gguf

        spec, num_layers = self._config.spec, self._config.num_layers
        architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        if self._architecture not in architectures:
            raise CheckpointError(f"{self._path} has the architecture {self._architecture!r}, which gguf does not know")
        table = gguf.get_tensor_name_map(architectures[self._architecture], num_layers)
        known: dict[str, tuple[Role, str]] = {}
        for role, template in spec.names.items():
            prefix = "" if role is Role.HEAD else spec.prefixes[0]
            for layer in range(num_layers if "{i}" in template else 1):
                name = prefix + template.replace("{i}", str(layer))
                if (stored := table.get_name(name.replace(".{e}", ""))) is not None:
                    known[stored] = (role, name)
        return known

    def _read(self, name: str, index: Index) -> Tensor:
        origin = self._origins[name]
        rows, columns = (*index, slice(None), slice(None))[:2]
        if origin.role is Role.SHARED_SWITCH and len(self._file.tensors[origin.name].shape) == 1:
            return self._file.read(origin.name)[None]
        values = self._file.read(origin.name, rows, columns, origin.expert or 0)
        if origin.role in _NORM_ROLES and self._config.spec.norm_offset:
            # The converters add it; the loader does too.
            return values.float() - self._config.spec.norm_offset
        if self._architecture == "llama" and origin.role in (Role.Q, Role.K):
            return halves_from_pairs(values, self._config.head_dim)
        return values


def halves_from_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Undo GGUF's order of Llama's rows: it pairs (0, d/2), (1, d/2 + 1) ..., the checkpoint keeps the two halves."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
