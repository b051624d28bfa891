# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's metadata -> the config.json of the Hugging Face checkpoint that it was made from.

Sizes are read, what the format leaves out is what its own engine assumes for the architecture, and rotary factors,
which it stores as a tensor, are turned back into the settings that give them. Anything unknown is an error.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.gguf_file import GgufFile

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_MODEL_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
_EXACT = {"F32": "float32", "F16": "float16"}
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by hidden size / heads instead of by the head's width."""
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""As in every published Llama 3.1 to 3.3; checked against the stored factors."""
FACTOR_TOLERANCE = 1e-3


class _Metadata:
    """The fields of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.architecture = str(file.fields.get("general.architecture"))
        self._file = file

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.fields.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{self._file.path} has {self.architecture}.{key} = {value!r}; a number is needed")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A field of 32-bit floats; seven digits recover the decimal that the model was trained with."""
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise CheckpointError(f"{self._file.path} has {self.architecture}.{key} = {value!r}; a number is needed")
        return float(f"{value:.6g}")


def model_config(file: GgufFile) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        CheckpointError: a field is missing or malformed.
        ModelUnsupported: an architecture, or a kind of rotary scaling, that is not imported.
    """
    data = _Metadata(file)
    architecture = data.architecture
    if architecture not in CLASSES:
        raise ModelUnsupported(
            f"{file.path} has the architecture {architecture!r}; GGUF files are read for {', '.join(CLASSES)}"
        )
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(
            f"{file.path} has no token_embd.weight; parts of a split model must be merged with "
            "llama-gguf-split --merge first"
        )
    num_heads, hidden_size = data.number("attention.head_count"), data.number("embedding_length")
    if data.number("block_count") > len(file.tensors):
        raise CheckpointError(
            f"{file.path} says {data.number('block_count')} layers, but holds only {len(file.tensors)} tensors"
        )
    head_dim = data.number("attention.key_length", hidden_size // num_heads)
    config: dict[str, Any] = {
        "architectures": [CLASSES[architecture]],
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": data.number("feed_forward_length", data.get("expert_feed_forward_length")),
        "num_hidden_layers": data.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": data.number("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": data.number("context_length"),
        "rms_norm_eps": data.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": data.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, data, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = file.fields.get(f"tokenizer.ggml.{name}_token_id")
    config["pad_token_id"] = file.fields.get("tokenizer.ggml.padding_token_id")
    _add_family(config, file, data)
    return config


def _dtype(file: GgufFile) -> str:
    """What the matrices are stored in; bfloat16 for quantised and mixed ones."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _EXACT.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _add_family(config: dict[str, Any], file: GgufFile, data: _Metadata) -> None:
    """What only some architectures have."""
    family = data.architecture
    if family in ("llama", "qwen3", "qwen3moe"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if family == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
        if data.get("expert_count"):
            del config["attention_bias"], config["mlp_bias"]
            config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
            config["num_local_experts"] = data.number("expert_count")
            config["num_experts_per_tok"] = data.number("expert_used_count")
    if family == "phi3":
        config["original_max_position_embeddings"] = data.number(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
        rotary_dim = data.number("rope.dimension_count", config["head_dim"])
        config["partial_rotary_factor"] = rotary_dim / config["head_dim"]
        config["sliding_window"] = data.get("attention.sliding_window") or None
    if family in ("qwen2moe", "qwen3moe"):
        config |= {
            "num_experts": data.number("expert_count"),
            "num_experts_per_tok": data.number("expert_used_count"),
            "moe_intermediate_size": data.number("expert_feed_forward_length"),
            "norm_topk_prob": family == "qwen3moe",
        }
    if family == "qwen2moe":
        config["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["shared_expert_intermediate_size"] = data.number("expert_shared_feed_forward_length")
    if family.startswith("gemma"):
        del config["hidden_act"]
        config["hidden_activation"] = "gelu_pytorch_tanh"
        if config["dtype"] == "float16":
            config["dtype"] = "bfloat16"  # Its activations leave the range of float16.
    if family in ("gemma2", "gemma3"):
        by_width = config["num_hidden_layers"] == _SCALED_BY_WIDTH[family]
        scalar = config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
        config |= {"query_pre_attn_scalar": scalar, "sliding_window": data.number("attention.sliding_window")}
    if family == "gemma2":
        config["attn_logit_softcapping"] = data.real("attn_logit_softcapping", 50.0)
        config["final_logit_softcapping"] = data.real("final_logit_softcapping", 30.0)
    if family == "gemma3":
        config["rope_local_base_freq"] = data.real("rope.freq_base_swa", 10000.0)


def _rope_scaling(file: GgufFile, data: _Metadata, head_dim: int) -> dict[str, Any] | None:
    if "rope_factors_long.weight" in file.tensors:
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "short_factor": _factors(file, "rope_factors_short.weight"),
            "long_factor": _factors(file, "rope_factors_long.weight"),
        }
        if data.get("rope.scaling.attn_factor"):
            scaling["attention_factor"] = data.get("rope.scaling.attn_factor")
        return scaling
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(
            file, data.real("rope.freq_base", 10000.0), data.number("rope.dimension_count", head_dim)
        )
    kind = data.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": data.real("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": data.real("rope.scaling.factor"),
            "original_max_position_embeddings": data.number(
                "rope.scaling.original_context_length", data.number("context_length")
            ),
        }
    raise ModelUnsupported(f"{file.path} has the rotary scaling {kind!r}; none, linear, yarn and longrope are read")


def _llama3_scaling(file: GgufFile, theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """The settings that give the stored factors, by which the frequencies are divided."""
    stored = file.read("rope_freqs.weight").double().flatten()
    refusal = ModelUnsupported(f"{file.path} has rotary factors (rope_freqs.weight) other than those of Llama 3")
    if 2 * len(stored) != rotary_dim:
        raise refusal
    factor = float(f"{float(stored.max()):.6g}")
    if factor == 1.0:
        return None
    if factor <= 0:
        raise refusal
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    smooth = (LLAMA3_CONTEXT / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    smooth = smooth.clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not ((stored - expected) / expected).abs().max() <= FACTOR_TOLERANCE:
        raise refusal
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def _factors(file: GgufFile, name: str) -> list[float]:
    """The decimals that were rounded to 32-bit floats."""
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} has no {name}")
    return [float(f"{value:.7g}") for value in file.read(name).flatten().tolist()]
