# SPDX-License-Identifier: Apache-2.0
"""What an architecture is, as data: `ArchSpec` says how a family differs, `ModelConfig` what one checkpoint has.

An `ArchSpec` holds choices, names of config keys and names of checkpoint tensors; it never holds numbers of a single
checkpoint. `ModelConfig` is filled by `hf_config` and holds no names. Neither knows files, kernels or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class NormKind(Enum):
    RMS = auto()
    LAYER = auto()


class PositionKind(Enum):
    ROPE = auto()
    """Rotary embedding over half-split heads."""
    LEARNED = auto()
    """A table of positions, added to the token embedding."""


class MlpKind(Enum):
    GATED = auto()
    """down(activation(gate(x)) * up(x))."""
    PLAIN = auto()
    """down(activation(up(x)))."""


class WindowKind(Enum):
    NONE = auto()
    ALL_LAYERS = auto()
    """`sliding_window`, where given, holds in every layer."""
    BY_LAYER = auto()
    """`use_sliding_window` turns it on; `layer_types` or `max_window_layers` say in which layers."""


class Role(Enum):
    """What a checkpoint tensor is to the decoder; templates of `ArchSpec.names` hold {i} for the layer."""

    EMBED = auto()
    POSITIONS = auto()
    FINAL_NORM = auto()
    HEAD = auto()
    ATTN_NORM = auto()
    Q = auto()
    K = auto()
    V = auto()
    O = auto()  # noqa: E741
    Q_NORM = auto()
    K_NORM = auto()
    MLP_NORM = auto()
    GATE = auto()
    UP = auto()
    DOWN = auto()


@dataclass(frozen=True)
class ArchSpec:
    """How one family of models is built and named."""

    family: str
    norm: NormKind
    position: PositionKind
    mlp: MlpKind
    names: Mapping[Role, str]
    """Tensor names without the prefix and without '.weight' or '.bias'."""
    prefixes: tuple[str, ...]
    """Alternatives in front of every name but the head's; the first that the checkpoint uses holds."""
    fields: Mapping[str, tuple[str, ...]]
    """Canonical field -> keys in config.json, the first that is present holds."""
    defaults: Mapping[str, Any]
    """Canonical field -> value where config.json leaves it out, as the published code has it."""
    window: WindowKind = WindowKind.NONE
    qkv_bias: bool | str = False
    """True, or the config key that says so."""
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    norm_bias: bool = False
    qk_norm: bool = False
    position_offset: int = 0
    """Rows of the learned position table in front of position 0."""
    required: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Config key -> (the one value that is supported, why another one is refused)."""
    harmless: frozenset[str] = frozenset()
    """Config keys of this family that do not change the text."""
    ignored_tensors: tuple[str, ...] = ()
    """Name endings of checkpoint tensors that are derived from the config."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies; `kind` is 'default', 'linear' or 'llama3'."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """One checkpoint's numbers under canonical names."""

    spec: ArchSpec
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    """Per layer: keys that a query sees, itself included; None: all."""
    rope: RopeConfig | None
    dtype: str
    """The checkpoint's: 'float32', 'bfloat16' or 'float16'."""
    eos_token_ids: tuple[int, ...]
