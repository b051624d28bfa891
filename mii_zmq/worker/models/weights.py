# SPDX-License-Identifier: Apache-2.0
"""Safetensors checkpoint -> fused weights of one rank: strict, streamed, one tensor in memory at a time.

Every tensor that the architecture needs is filled exactly once; a missing, unknown, misshapen or doubled one is an
error, never a guess. Pickle files (.bin) are refused. q, k and v, and gate and up, are fused on the way in. Rotary
heads are stored with the two halves interleaved, so that the elements of a pair are adjacent (scores do not change
when q and k are permuted alike). Knows nothing of how the decoder computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.spec import MlpKind, ModelConfig, PositionKind, Role
from mii_zmq.worker.parallel import RankInfo

Progress = Callable[[str, float], None]
"""(what is being done, share of it that is done from 0 to 1)."""

MAX_HEADER_BYTES = 100 * 2**20
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass
class Affine:
    """A matrix or a norm's scale, and its bias."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass
class LayerWeights:
    attn_norm: Affine
    qkv: Affine
    out: Affine
    mlp_norm: Affine
    up: Affine
    """Gate over up, where the MLP is gated."""
    down: Affine
    qk_norm: Tensor | None = None
    """[Hq + Hk, D]: the scale of each q and k head."""


@dataclass
class DecoderWeights:
    embed: Tensor
    final_norm: Affine
    layers: list[LayerWeights]
    head: Tensor | None = None
    """None: tied to `embed`."""
    positions: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        affines = [self.final_norm]
        for layer in self.layers:
            affines += [layer.attn_norm, layer.qkv, layer.out, layer.mlp_norm, layer.up, layer.down]
        tensors = [self.embed, self.head, self.positions, *(layer.qk_norm for layer in self.layers)]
        tensors += [tensor for affine in affines for tensor in (affine.weight, affine.bias)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True)
class _Claim:
    """Where one checkpoint tensor goes, and which part of it."""

    destination: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    dim: int = 0
    span: tuple[int, int] | None = None
    """This rank's [start, stop) in `dim`; None: everything."""
    pair_dim: int = 0
    """Head width whose halves are interleaved; 0: keep the order."""
    repeat_heads: bool = False
    """One head's vector, repeated for every head of the destination."""

    def place(self, data: Tensor) -> None:
        if self.pair_dim:
            halves = data.unflatten(0, (-1, 2, self.pair_dim // 2))
            data = halves.transpose(1, 2).flatten(0, 2)
        self.destination.copy_(data if not self.repeat_heads else data.expand_as(self.destination))


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    rank: RankInfo | None = None,
    progress: Progress | None = None,
) -> DecoderWeights:
    """Read this rank's part of every tensor, converted to `dtype`.

    Raises:
        CheckpointError: a file or tensor is missing, malformed, unknown or has the wrong shape.
        ModelUnsupported: quantized tensors.
    """
    table = _ClaimTable(config, dtype, device, rank or RankInfo())
    files = find_files(directory)
    total = sum(path.stat().st_size for path in files)
    done = 0
    prefix: str | None = None
    claimed: set[str] = set()
    for path in files:
        check_header(path)
        try:
            with safe_open(path, framework="pt") as tensors:
                names = list(tensors.keys())
                for name in names:
                    prefix = table.find_prefix(name) if prefix is None else prefix
                for name in names:
                    key = table.resolve(name, prefix)
                    if key is None:
                        continue
                    if key in claimed:
                        raise CheckpointError(f"{path.name} holds {name}, which was already loaded")
                    claimed.add(key)
                    view = tensors.get_slice(name)
                    _check_tensor(path, name, view.get_dtype(), tuple(view.get_shape()), table.claims[key])
                    table.claims[key].place(_read(view, table.claims[key]))
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}; download it again") from None
        done += path.stat().st_size
        if progress is not None:
            progress("loading weights", done / total)
    missing = sorted(table.claims.keys() - claimed)
    if missing:
        raise CheckpointError(f"{directory} lacks {len(missing)} tensors, e.g. {', '.join(missing[:3])}")
    return table.weights


def find_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in a fixed order."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error!r}") from None
        paths = [directory / Path(name).name for name in names]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{directory} lacks {path.name}, which its index names; download it again")
        return paths
    paths = sorted(directory.glob("*.safetensors"))
    if directory / "model.safetensors" in paths:
        return [directory / "model.safetensors"]
    if len(paths) == 1:
        return paths
    if paths:
        raise CheckpointError(f"{directory} holds {len(paths)} safetensors files but no model.safetensors.index.json")
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise CheckpointError(
            f"{directory} holds pickled weights only (.bin or .pt), which can run code when loaded and are refused; "
            "convert them on a machine you can spare: AutoModelForCausalLM.from_pretrained(DIR)"
            ".save_pretrained(NEW_DIR)"
        )
    raise CheckpointError(f"{directory} holds no .safetensors file")


def check_header(path: Path) -> None:
    """Refuse a file whose length or header length cannot be right, before anything is mapped."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
    header = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= header <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path} is not a complete safetensors file ({size} bytes); download it again")


def _check_tensor(path: Path, name: str, dtype: str, shape: tuple[int, ...], claim: _Claim) -> None:
    if dtype not in _FLOAT_DTYPES:
        raise ModelUnsupported(f"{path.name}: {name} has the dtype {dtype}; quantized checkpoints are not supported")
    if shape != claim.shape:
        raise CheckpointError(
            f"{path.name}: {name} has the shape {list(shape)}, but config.json implies {list(claim.shape)}"
        )


def _read(view: object, claim: _Claim) -> Tensor:
    if claim.span is None:
        return view[:]  # type: ignore[index]
    part = slice(*claim.span)
    return view[part] if claim.dim == 0 else view[:, part]  # type: ignore[index]


@dataclass
class _ClaimTable:
    """Allocates the weights and says for every tensor name where it belongs."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    rank: RankInfo
    claims: dict[str, _Claim] = field(init=False, default_factory=dict)
    """By name without the prefix."""
    weights: DecoderWeights = field(init=False)

    def __post_init__(self) -> None:
        config, names = self.config, self.config.spec.names
        embed = self._matrix(Role.EMBED, config.vocab_size, config.hidden_size)
        self.weights = DecoderWeights(
            embed=embed.weight,
            final_norm=self._norm(names[Role.FINAL_NORM]),
            layers=[self._layer(layer) for layer in range(config.num_layers)],
        )
        if not config.tie_word_embeddings:
            self.weights.head = self._matrix(Role.HEAD, config.vocab_size, config.hidden_size).weight
        if config.spec.position is PositionKind.LEARNED:
            rows = config.max_position_embeddings + config.spec.position_offset
            self.weights.positions = self._matrix(Role.POSITIONS, rows, config.hidden_size).weight

    def find_prefix(self, name: str) -> str | None:
        """The prefix alternative that makes `name` one of ours."""
        for prefix in self.config.spec.prefixes:
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and key in self.claims and not self._is_head(key):
                return prefix
        return None

    def resolve(self, name: str, prefix: str | None) -> str | None:
        """The claim that `name` fills; None for a tensor that is derived from others."""
        if name.endswith(self.config.spec.ignored_tensors or ("\0",)):
            return None
        if self._is_head(name):
            # A tied head is sometimes stored a second time; the embedding is what the model uses.
            return None if self.config.tie_word_embeddings else name
        key = name.removeprefix(prefix or "")
        if prefix is None or not name.startswith(prefix) or key not in self.claims:
            raise CheckpointError(
                f"the checkpoint holds {name}, which the {self.config.spec.family} family with this config.json does "
                "not have; it would be left out silently"
            )
        return key

    def _is_head(self, name: str) -> bool:
        return name == f"{self.config.spec.names[Role.HEAD]}.weight"

    def _layer(self, layer: int) -> LayerWeights:
        config, spec = self.config, self.config.spec
        names = {role: name.replace("{i}", str(layer)) for role, name in spec.names.items()}
        weights = LayerWeights(
            attn_norm=self._norm(names[Role.ATTN_NORM]),
            qkv=self._qkv(names),
            out=self._split_columns(
                names[Role.O], config.hidden_size, config.num_heads * config.head_dim, config.out_bias
            ),
            mlp_norm=self._norm(names[Role.MLP_NORM]),
            up=self._up(names),
            down=self._split_columns(names[Role.DOWN], config.hidden_size, config.intermediate_size, config.mlp_bias),
        )
        if spec.qk_norm:
            num_heads = self.rank.share(config.num_heads, "heads")
            num_kv_heads = self.rank.share(config.num_kv_heads, "key/value heads")
            weights.qk_norm = self._empty(num_heads + num_kv_heads, config.head_dim)
            heads = ((Role.Q_NORM, weights.qk_norm[:num_heads]), (Role.K_NORM, weights.qk_norm[num_heads:]))
            for role, destination in heads:
                self.claims[f"{names[role]}.weight"] = _Claim(
                    destination, (config.head_dim,), pair_dim=self._pair_dim, repeat_heads=True
                )
        return weights

    @property
    def _pair_dim(self) -> int:
        return self.config.head_dim if self.config.spec.position is PositionKind.ROPE else 0

    def _qkv(self, names: dict[Role, str]) -> Affine:
        config = self.config
        parts = [
            (names[Role.Q], config.num_heads, self._pair_dim),
            (names[Role.K], config.num_kv_heads, self._pair_dim),
            (names[Role.V], config.num_kv_heads, 0),
        ]
        return self._split_rows(
            [(name, heads * config.head_dim, heads, pair_dim) for name, heads, pair_dim in parts],
            config.hidden_size,
            config.qkv_bias,
        )

    def _up(self, names: dict[Role, str]) -> Affine:
        config = self.config
        roles = (Role.GATE, Role.UP) if config.spec.mlp is MlpKind.GATED else (Role.UP,)
        parts = [(names[role], config.intermediate_size, config.intermediate_size, 0) for role in roles]
        return self._split_rows(parts, config.hidden_size, config.mlp_bias)

    def _split_rows(self, parts: list[tuple[str, int, int, int]], columns: int, has_bias: bool) -> Affine:
        """Matrices (name, rows, units that a rank may not cut, pair_dim) stacked; each rank holds some rows."""
        rows = [self.rank.share(units, "heads or channels") * (size // units) for _, size, units, _ in parts]
        fused = Affine(self._empty(sum(rows), columns), self._empty(sum(rows)) if has_bias else None)
        begin = 0
        for (name, size, _, pair_dim), count in zip(parts, rows, strict=True):
            span = self.rank.span(size, "rows")
            self.claims[f"{name}.weight"] = _Claim(
                fused.weight[begin : begin + count], (size, columns), 0, span, pair_dim
            )
            if fused.bias is not None:
                self.claims[f"{name}.bias"] = _Claim(fused.bias[begin : begin + count], (size,), 0, span, pair_dim)
            begin += count
        return fused

    def _split_columns(self, name: str, rows: int, columns: int, has_bias: bool) -> Affine:
        """A matrix of which each rank holds some columns; the partial products are summed, so one rank adds bias."""
        start, stop = self.rank.span(columns, "columns")
        matrix = Affine(self._empty(rows, stop - start), self._empty(rows) if has_bias else None)
        self.claims[f"{name}.weight"] = _Claim(matrix.weight, (rows, columns), 1, (start, stop))
        if matrix.bias is not None:
            self.claims[f"{name}.bias"] = _Claim(matrix.bias, (rows,))
            if self.rank.rank:
                matrix.bias = None
        return matrix

    def _matrix(self, role: Role, rows: int, columns: int) -> Affine:
        matrix = Affine(self._empty(rows, columns))
        self.claims[f"{self.config.spec.names[role]}.weight"] = _Claim(matrix.weight, (rows, columns))
        return matrix

    def _norm(self, name: str) -> Affine:
        width = self.config.hidden_size
        norm = Affine(self._empty(width), self._empty(width) if self.config.spec.norm_bias else None)
        self.claims[f"{name}.weight"] = _Claim(norm.weight, (width,))
        if norm.bias is not None:
            self.claims[f"{name}.bias"] = _Claim(norm.bias, (width,))
        return norm

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)
