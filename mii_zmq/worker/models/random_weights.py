# SPDX-License-Identifier: Apache-2.0
"""Models of published shapes with random weights, made on the device: for measurements, never for text."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mii_zmq.errors import ConfigError
from mii_zmq.worker.models.archs import ARCHITECTURES
from mii_zmq.worker.models.spec import MlpKind, ModelConfig, PositionKind, RopeConfig
from mii_zmq.worker.models.weights import Affine, DecoderWeights, LayerWeights

STD = 0.02

_8B = ModelConfig(
    spec=ARCHITECTURES["LlamaForCausalLM"],
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
    rope=RopeConfig(500000.0),
    dtype="bfloat16",
    eos_token_ids=(),
)
_06B = replace(
    _8B,
    spec=ARCHITECTURES["Qwen3ForCausalLM"],
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    norm_eps=1e-6,
    tie_word_embeddings=True,
    windows=(None,) * 28,
    rope=RopeConfig(1000000.0),
)
SHAPES = {
    "8B": _8B,
    "0.6B": _06B,
    "tiny": replace(
        _8B,
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        windows=(None, None),
    ),
}


def shape_config(name: str) -> ModelConfig:
    """The config of a named shape.

    Raises:
        ConfigError: there is no such shape.
    """
    if name not in SHAPES:
        raise ConfigError(f"no shape is called {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name]


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> DecoderWeights:
    """Normal matrices and norms of one."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_(0.0, STD, generator=generator)

    def affine(rows: int, columns: int, has_bias: bool) -> Affine:
        return Affine(matrix(rows, columns), matrix(rows) if has_bias else None)

    def norm() -> Affine:
        bias = torch.zeros(hidden, dtype=dtype, device=device) if config.spec.norm_bias else None
        return Affine(torch.ones(hidden, dtype=dtype, device=device), bias)

    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads, config.num_kv_heads
    up_rows = 2 * inner if config.spec.mlp is MlpKind.GATED else inner
    layers = [
        LayerWeights(
            attn_norm=norm(),
            qkv=affine((heads + 2 * kv_heads) * config.head_dim, hidden, config.qkv_bias),
            out=affine(hidden, heads * config.head_dim, config.out_bias),
            mlp_norm=norm(),
            up=affine(up_rows, hidden, config.mlp_bias),
            down=affine(hidden, inner, config.mlp_bias),
            qk_norm=(
                torch.ones(heads + kv_heads, config.head_dim, dtype=dtype, device=device)
                if config.spec.qk_norm
                else None
            ),
        )
        for _ in range(config.num_layers)
    ]
    weights = DecoderWeights(embed=matrix(config.vocab_size, hidden), final_norm=norm(), layers=layers)
    if not config.tie_word_embeddings:
        weights.head = matrix(config.vocab_size, hidden)
    if config.spec.position is PositionKind.LEARNED:
        weights.positions = matrix(config.max_position_embeddings + config.spec.position_offset, hidden)
    return weights
