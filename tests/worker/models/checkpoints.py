# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of every family, made with transformers, and the models that they were saved from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

VOCAB = 131
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama_bias_llama3": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
    "llama_linear_rope": LlamaConfig(
        **COMMON, head_dim=16, rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    ),
    "mistral": MistralConfig(**COMMON, sliding_window=13),
    "mistral_no_window": MistralConfig(**COMMON, sliding_window=None),
    "qwen2": Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=17, max_window_layers=1),
    "qwen2_no_window": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True),
    "opt": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        ffn_dim=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=48,
        init_std=0.2,
    ),
}


def make_checkpoint(name: str, directory: Path, **save_options: object) -> PreTrainedModel:
    """Save the named model into `directory`; every parameter is random, norms and biases included."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                mean = 0.0 if parameter_name.endswith("bias") else 1.0
                parameter.normal_(mean, 0.3)
    model.save_pretrained(directory, **save_options)
    return model


def max_relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())
