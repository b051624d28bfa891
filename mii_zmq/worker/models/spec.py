# SPDX-License-Identifier: Apache-2.0
"""What an architecture is, as data: `ArchSpec` says how a family differs, `ModelConfig` what one checkpoint has.

An `ArchSpec` holds choices, names of config keys and names of checkpoint tensors; it never holds numbers of a single
checkpoint. `ModelConfig` is filled by `hf_config` and holds no names. Neither knows files, kernels or devices. Which
norms, biases and projections a family has follows from the roles that its `names` list; the enums say how they are
connected.
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
    """Rotary embedding of the first `rotary_dim` elements of each q and k head."""
    LEARNED = auto()
    """A table of positions, added to the token embedding."""
    ALIBI = auto()
    """A bias on the scores, linear in the distance (Press et al. 2021)."""


class ResidualKind(Enum):
    """How a layer's attention A, MLP M and norms are connected; a norm whose role has no name is left out.

    `n1`, `p1` are ATTN_NORM and ATTN_POST_NORM, `n2`, `p2` MLP_NORM and MLP_POST_NORM.
    """

    SEQUENTIAL = auto()
    """x += p1(A(n1(x))); x += p2(M(n2(x)))."""
    PARALLEL = auto()
    """x += A(n1(x)) + M(n2(x)); without n2, M reads n1(x) too."""
    POST_NORM = auto()
    """x = p1(x + A(x)); x = p2(x + M(x))."""


class QkvKind(Enum):
    """How a checkpoint stores the three projections."""

    SEPARATE = auto()
    STACKED = auto()
    """One tensor: all of q, then all of k, then all of v."""
    GROUPED = auto()
    """One tensor: per key/value head its q heads, its k head, its v head."""


class MlpKind(Enum):
    GATED = auto()
    """down(activation(gate(x)) * up(x))."""
    PLAIN = auto()
    """down(activation(up(x)))."""


class WindowKind(Enum):
    NONE = auto()
    ALL_LAYERS = auto()
    """`sliding_window`, where given, holds in every layer."""
    BY_SWITCH = auto()
    """`use_sliding_window` turns it on; `layer_types` or `max_window_layers` say in which layers."""
    BY_TYPE = auto()
    """`layer_types`, or a pattern key of the family, says in which layers `sliding_window` holds."""


class Role(Enum):
    """What a checkpoint tensor is to the decoder; templates of `ArchSpec.names` hold {i} for the layer and {e} for the
    expert."""

    EMBED = auto()
    EMBED_NORM = auto()
    PROJECT_IN = auto()
    PROJECT_OUT = auto()
    POSITIONS = auto()
    FINAL_NORM = auto()
    HEAD = auto()
    ATTN_NORM = auto()
    ATTN_POST_NORM = auto()
    QKV = auto()
    Q = auto()
    K = auto()
    V = auto()
    O = auto()  # noqa: E741
    Q_NORM = auto()
    K_NORM = auto()
    MLP_NORM = auto()
    MLP_POST_NORM = auto()
    GATE_UP = auto()
    """Gate over up in one tensor."""
    GATE = auto()
    UP = auto()
    DOWN = auto()
    ROUTER = auto()
    EXPERT_GATE = auto()
    EXPERT_UP = auto()
    EXPERT_DOWN = auto()
    SHARED_GATE = auto()
    SHARED_UP = auto()
    SHARED_DOWN = auto()
    SHARED_SWITCH = auto()
    """[1, hidden]: the sigmoid of its product scales the shared expert."""


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
    residual: ResidualKind = ResidualKind.SEQUENTIAL
    qkv: QkvKind = QkvKind.SEPARATE
    window: WindowKind = WindowKind.NONE
    qkv_bias: bool | str = False
    """True, or the config key that says so."""
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    norm_bias: bool = False
    norm_offset: float = 0.0
    """Added to the scale of every RMSNorm (Gemma stores scale - 1)."""
    is_transposed: bool = False
    """Layer matrices are stored [in, out]."""
    is_interleaved: bool = False
    """The checkpoint's rotary pairs are adjacent elements (GPT-J), not the two halves of a head."""
    scales_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden size), rounded to the dtype."""
    position_offset: int = 0
    """Rows of the learned position table in front of position 0."""
    required: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Config key -> (the one value that is supported, or a frozenset of them; why another one is refused)."""
    harmless: frozenset[str] = frozenset()
    """Config keys of this family that do not change the text."""
    ignored_tensors: tuple[str, ...] = ()
    """Name endings of checkpoint tensors that are derived from the config."""
    ignored_prefixes: tuple[str, ...] = ()
    """Name beginnings of checkpoint tensors that text does not need (the image tower of a multi-modal model)."""
    published: str = ""
    """Models that are of this family, for people to read."""

    def has(self, role: Role) -> bool:
        return role in self.names


@dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies; `kind` is 'default', 'linear', 'dynamic', 'llama3', 'yarn' or 'longrope'."""

    theta: float
    rotary_dim: int
    """Elements of a head that are rotated."""
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Of yarn's ramp: its ends are whole numbers."""
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it (yarn, longrope), already computed from the config."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def border(self) -> int | None:
        """Sequence length above which the frequencies change with the length (dynamic, longrope)."""
        return self.original_max_position_embeddings if self.kind in ("dynamic", "longrope") else None


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: softmax over the router's logits, the `top_k` largest experts, weighted sum."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    """The chosen weights are divided by their sum."""
    shared_intermediate_size: int
    """0: no shared expert."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others have the dense MLP."""


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
    ropes: tuple[RopeConfig | None, ...]
    """Per layer; None: the layer's heads are not rotated."""
    dtype: str
    """The checkpoint's: 'float32', 'bfloat16' or 'float16'."""
    eos_token_ids: tuple[int, ...]
    scale: float
    """Of the attention scores."""
    alibi_scale: float = 1.0
    """Of the ALiBi slopes (Falcon's published code scales the bias like the scores)."""
    attn_softcap: float = 0.0
    """softcap * tanh(score / softcap); 0: none."""
    logit_softcap: float = 0.0
    embed_dim: int = 0
    """Width of the embeddings where they are projected (OPT-350m); 0: the hidden size."""
    moe: MoeConfig | None = None

    @property
    def state_size(self) -> int:
        """Width of the final hidden states, which the head reads."""
        return self.embed_dim or self.hidden_size

    @property
    def has_alibi(self) -> bool:
        return self.spec.position is PositionKind.ALIBI

    @property
    def rope_border(self) -> int | None:
        """The first length border of any layer's rotary embedding."""
        borders = [rope.border for rope in self.ropes if rope is not None and rope.border is not None]
        return min(borders, default=None)

    @property
    def recomputes_at_border(self) -> bool:
        """Whether a sequence that grows past the border is rotated differently at all of its positions."""
        return any(rope is not None and rope.kind == "longrope" for rope in self.ropes)
