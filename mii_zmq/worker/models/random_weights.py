# SPDX-License-Identifier: Apache-2.0
"""Models of published shapes with random weights, made on the device: for measurements, never for text.

Each tensor has its own seed, so that ranks agree on what all of them hold whole and each makes only its own part of
the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mii_zmq.errors import ConfigError
from mii_zmq.worker.models.archs_llama import LLAMA, MIXTRAL, QWEN3, QWEN3_MOE
from mii_zmq.worker.models.model_weights import Affine, DecoderWeights, LayerWeights, MoeWeights
from mii_zmq.worker.models.shard import Shard, Span
from mii_zmq.worker.models.spec import MlpKind, ModelConfig, MoeConfig, PositionKind, Role, RopeConfig
from mii_zmq.worker.parallel import RankInfo

STD = 0.02

_8B = ModelConfig(
    spec=LLAMA,
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    activation="silu",
    max_position_embeddings=16384,
    tie_word_embeddings=False,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    windows=(None,) * 32,
    ropes=(RopeConfig(500000.0, 128),) * 32,
    dtype="bfloat16",
    eos_token_ids=(),
    scale=128**-0.5,
)


def _with_layers(config: ModelConfig, num_layers: int) -> ModelConfig:
    return replace(
        config, num_layers=num_layers, windows=config.windows[:1] * num_layers, ropes=config.ropes[:1] * num_layers
    )


_06B = replace(
    _with_layers(_8B, 28),
    spec=QWEN3,
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    norm_eps=1e-6,
    tie_word_embeddings=True,
    ropes=(RopeConfig(1000000.0, 128),) * 28,
)
SHAPES = {
    "0.6B": _06B,
    "8B": _8B,
    "70B": replace(_with_layers(_8B, 80), hidden_size=8192, intermediate_size=28672, num_heads=64),
    "8x7B-16": replace(
        _with_layers(_8B, 16),
        spec=MIXTRAL,
        vocab_size=32000,
        ropes=(RopeConfig(1000000.0, 128),) * 16,
        moe=MoeConfig(8, 2, 14336, renormalise=True, shared_intermediate_size=0, layers=(True,) * 16),
    ),
    "30B-A3B": replace(
        _with_layers(_06B, 48),
        spec=QWEN3_MOE,
        hidden_size=2048,
        intermediate_size=6144,
        num_heads=32,
        num_kv_heads=4,
        tie_word_embeddings=False,
        moe=MoeConfig(128, 8, 768, renormalise=True, shared_intermediate_size=0, layers=(True,) * 48),
    ),
    "tiny": replace(
        _with_layers(_8B, 2),
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        ropes=(RopeConfig(500000.0, 64),) * 2,
        scale=64**-0.5,
    ),
}
"""8x7B-16 is Mixtral 8x7B cut to 16 layers, 70B is Llama 3's, 30B-A3B is Qwen3's."""


def shape_config(name: str) -> ModelConfig:
    """The config of a named shape.

    Raises:
        ConfigError: there is no such shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"no shape is called {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name]


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0, shard: Shard | None = None
) -> DecoderWeights:
    """Normal matrices and biases, norms of one."""
    shard = shard or Shard.of(config, RankInfo())
    maker = _Maker(config, shard, dtype, device, seed)
    spec = config.spec
    width = config.embed_dim or config.hidden_size
    weights = DecoderWeights(
        embed=maker.whole(config.vocab_size, width),
        layers=[maker.layer(layer) for layer in range(config.num_layers)],
        final_norm=maker.norm(Role.FINAL_NORM, config.hidden_size),
        embed_norm=maker.norm(Role.EMBED_NORM, width),
    )
    if not config.tie_word_embeddings:
        weights.head = maker.affine(_length(shard.vocab), width, spec.head_bias)
    if spec.position is PositionKind.LEARNED:
        weights.positions = maker.whole(config.max_position_embeddings + spec.position_offset, config.hidden_size)
    if spec.has(Role.PROJECT_IN):
        weights.project_in = maker.whole(config.hidden_size, width)
        weights.project_out = maker.whole(width, config.hidden_size)
    return weights


@dataclass
class _Maker:
    config: ModelConfig
    shard: Shard
    dtype: torch.dtype
    device: torch.device
    seed: int
    num_made: int = 0

    def whole(self, *shape: int) -> Tensor:
        """The same values on every rank."""
        return self._normal(shape, 0)

    def part(self, *shape: int) -> Tensor:
        """This rank's own values."""
        return self._normal(shape, self.shard.rank.rank)

    def affine(self, rows: int, columns: int, has_bias: bool) -> Affine:
        return Affine(self.part(rows, columns), self.part(rows) if has_bias else None)

    def partial(self, rows: int, columns: int, has_bias: bool) -> Affine:
        """A matrix whose products are summed over the ranks, so that one of them adds the bias."""
        matrix = self.affine(rows, columns, has_bias)
        if self.shard.rank.rank:
            matrix.bias = None
        return matrix

    def norm(self, role: Role, width: int) -> Affine | None:
        if not self.config.spec.has(role):
            return None
        # A family that adds an offset to its scales keeps the sum in float32.
        dtype = torch.float32 if self.config.spec.norm_offset else self.dtype
        bias = torch.zeros(width, dtype=dtype, device=self.device) if self.config.spec.norm_bias else None
        return Affine(torch.ones(width, dtype=dtype, device=self.device), bias)

    def layer(self, layer: int) -> LayerWeights:
        config, shard, hidden = self.config, self.shard, self.config.hidden_size
        heads = shard.num_heads + shard.num_kv_heads
        weights = LayerWeights(
            qkv=self.affine((heads + shard.num_kv_heads) * config.head_dim, hidden, config.qkv_bias),
            out=self.partial(hidden, shard.num_heads * config.head_dim, config.out_bias),
            attn_norm=self.norm(Role.ATTN_NORM, hidden),
            attn_post_norm=self.norm(Role.ATTN_POST_NORM, hidden),
            mlp_norm=self.norm(Role.MLP_NORM, hidden),
            mlp_post_norm=self.norm(Role.MLP_POST_NORM, hidden),
        )
        if config.moe is not None and config.moe.layers[layer]:
            weights.moe = self._experts(config.moe)
        else:
            rows = shard.num_channels * (2 if config.spec.mlp is MlpKind.GATED else 1)
            weights.up = self.affine(rows, hidden, config.mlp_bias)
            weights.down = self.partial(hidden, shard.num_channels, config.mlp_bias)
        if config.spec.has(Role.Q_NORM):
            dtype = torch.float32 if config.spec.norm_offset else self.dtype
            weights.qk_norm = torch.ones(heads, config.head_dim, dtype=dtype, device=self.device)
        return weights

    def _experts(self, moe: MoeConfig) -> MoeWeights:
        hidden, held = self.config.hidden_size, _length(self.shard.experts)
        weights = MoeWeights(
            router=self.whole(moe.num_experts, hidden),
            up=self.part(held, 2 * moe.intermediate_size, hidden),
            down=self.part(held, hidden, moe.intermediate_size),
            first_expert=self.shard.experts[0],
        )
        if moe.shared_intermediate_size:
            channels = _length(self.shard.shared_channels)
            weights.shared_up = self.part(2 * channels, hidden)
            weights.shared_down = self.part(hidden, channels)
        if self.config.spec.has(Role.SHARED_SWITCH):
            weights.shared_switch = self.whole(1, hidden)
        return weights

    def _normal(self, shape: tuple[int, ...], rank: int) -> Tensor:
        self.num_made += 1
        generator = torch.Generator(self.device).manual_seed((self.seed * 1000 + rank) * 2**20 + self.num_made)
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, STD, generator=generator)


def _length(span: Span) -> int:
    return span[1] - span[0]
