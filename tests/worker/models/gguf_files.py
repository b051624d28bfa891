# SPDX-License-Identifier: Apache-2.0
"""Writes GGUF files as the format's own converter does: tiny models from their Hugging Face tensors and config."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġt"]
MERGES = ["h e", "Ġ t"]
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def interleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The format's order of Llama's rotary rows: pair i of a head is rows 2i and 2i + 1."""
    result = np.empty_like(rows)
    half = head_dim // 2
    for head in range(0, len(rows), head_dim):
        for pair in range(half):
            result[head + 2 * pair] = rows[head + pair]
            result[head + 2 * pair + 1] = rows[head + half + pair]
    return result


def gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """A model's tensors under the format's names, changed as the converter changes them."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = NAMES | (GEMMA_NAMES if architecture in ("gemma2", "gemma3") else {})
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        prefix = ""
        if match := re.match(r"model\.layers\.(\d+)\.", name):
            prefix, name = f"blk.{match[1]}.", name[match.end() :]
        if name == "mlp.experts.gate_up_proj":
            gate, up = np.split(values, 2, axis=1)
            tensors |= {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
            continue
        if name == "mlp.experts.down_proj":
            tensors[f"{prefix}ffn_down_exps.weight"] = values
            continue
        base, _, suffix = name.rpartition(".")
        if architecture == "llama" and base in ("self_attn.q_proj", "self_attn.k_proj"):
            values = interleaved(values, head_dim)
        if architecture.startswith("gemma") and base.endswith("norm"):
            values = values + 1
        if base == "mlp.shared_expert_gate":
            values = values[0]
        tensors[f"{prefix}{names[base]}.{suffix}"] = np.ascontiguousarray(values)
    return tensors


def llama3_factors(theta: float, rotary_dim: int, factor: float) -> np.ndarray:
    """What the converter stores for Llama 3's frequencies, written down from its definition."""
    factors = []
    for pair in range(rotary_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / rotary_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def write_file(
    path: Path,
    architecture: str,
    fields: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """`fields` without the architecture's prefix where they begin with a dot; `kinds` of tensors that are quantised."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        key = f"{architecture}{name}" if name.startswith(".") else name
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        kind = (kinds or {}).get(name)
        data = values if kind is None else gguf.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_fields(num_tokens: int = len(TOKENS), pre: str = "smollm") -> dict[str, Any]:
    """A byte-level vocabulary, filled up to `num_tokens`."""
    tokens = [*TOKENS, *(f"[PAD{index}]" for index in range(len(TOKENS), num_tokens))][:num_tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (num_tokens - 3),
        "tokenizer.ggml.merges": MERGES if num_tokens >= len(TOKENS) else [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def model_fields(config: Any) -> dict[str, Any]:
    """The sizes that every architecture has."""
    return {
        ".block_count": config.num_hidden_layers,
        ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size,
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_attention_heads,
        ".attention.head_count_kv": config.num_key_value_heads,
        ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def tiny_model(config: Any) -> PreTrainedModel:
    """A random model whose every parameter matters."""
    from transformers.models.auto import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = parameter.dim() == 1 and not name.endswith("bias") and "gemma" not in config.model_type
            parameter.normal_(1.0 if is_scale else 0.0, 0.2)
    return model
