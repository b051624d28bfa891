# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of families that run on transformers' modelling code, and a driver for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import AutoConfig, AutoModelForCausalLM

from mii_zmq import kernels
from mii_zmq.worker.batch import SlotState, build_batch
from mii_zmq.worker.kv_pool import BlockShape, KvPool
from mii_zmq.worker.models.fallback import FallbackModel, load_fallback
from mii_zmq.worker.models.model_facts import ModelFacts
from mii_zmq.worker.plan import NewSequence, SamplingSpec, StepPlan, StepRow

VOCAB = 131
CPU = torch.device("cpu")
NUM_BLOCKS = 64
BASE: dict[str, Any] = {
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
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "starcoder2": {"sliding_window": 13},
    "stablelm": {"qk_layernorm": True, "use_qkv_bias": True},
    "olmo2": {},
    "cohere": {"use_qk_norm": True, "tie_word_embeddings": True},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "nemotron": {"head_dim": 8},
    "smollm3": {
        "use_sliding_window": True,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "no_rope_layers": [1, 0, 1],
    },
}


def make_config(family: str, **fields: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{**BASE, **FAMILIES.get(family, {}), **fields})


def save_random(config: PreTrainedConfig, directory: Path, **save_options: Any) -> PreTrainedModel:
    """Save a model with every parameter random, norms and biases included; attends as transformers does by itself."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)
    model.save_pretrained(directory, **save_options)
    return model


def load(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[FallbackModel, ModelFacts]:
    return load_fallback(directory, dtype, CPU, kernels.for_device(CPU))


class FallbackDriver:
    """Runs a loaded fallback model on a pool full of NaN; owns the pool and the slots' state."""

    def __init__(
        self, model: FallbackModel, facts: ModelFacts, block_size: int = 8, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = model
        shape = BlockShape(facts.num_layers, facts.num_kv_heads, block_size, facts.head_dim, dtype)
        self.pool = KvPool(np, shape, NUM_BLOCKS)
        self.pool.slab.fill_(float("nan"))
        self.state = SlotState(8, facts.max_position_embeddings, block_size, CPU)
        self._free_blocks = list(range(NUM_BLOCKS))[::-2] + list(range(NUM_BLOCKS))[-2::-2]
        self._lengths: dict[int, int] = {}
        self._block_size = block_size

    @torch.inference_mode()
    def step(self, parts: list[tuple[int, list[int]]], *, sample: bool = True) -> torch.Tensor | None:
        """Compute (slot, its next tokens) in one batch; returns each part's last logits [len(parts), V]."""
        new, rows = [], []
        for slot, tokens in parts:
            start = self._lengths.get(slot, 0)
            end = start + len(tokens)
            needed = -(-end // self._block_size) - -(-start // self._block_size)
            blocks = [self._free_blocks.pop() for _ in range(needed)]
            if start == 0:
                new.append(NewSequence(slot, tokens, len(tokens), blocks, SamplingSpec()))
                blocks = []
            else:
                self.state.token_ids[slot, start:end] = torch.tensor(tokens, dtype=torch.int32)
            rows.append(StepRow(slot, start, len(tokens), sample, blocks))
            self._lengths[slot] = end
        plan = StepPlan(1, rows, new)
        self.state.apply(plan)
        self.pool.zero_blocks(self.state.begun_blocks(rows))
        batch = build_batch(plan, self.state)
        logits = self.model.forward(batch.forward, self.pool.layers)
        return None if logits is None else logits[batch.plan_order]
