# SPDX-License-Identifier: Apache-2.0
"""What the executor must know of a model, whichever modelling code runs it."""

from __future__ import annotations

from dataclasses import dataclass

from mii_zmq.worker.models.spec import ModelConfig


@dataclass(frozen=True)
class ModelFacts:
    """Numbers of the whole model, not of one rank's part."""

    family: str
    vocab_size: int
    num_layers: int
    """Layers that hold keys and values."""
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    dtype: str
    """The checkpoint's: 'float32', 'bfloat16' or 'float16'."""
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def of(config: ModelConfig) -> ModelFacts:
        """The facts of a checkpoint whose family has a spec."""
        return ModelFacts(
            family=config.spec.family,
            vocab_size=config.vocab_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            dtype=config.dtype,
            eos_token_ids=config.eos_token_ids,
        )
