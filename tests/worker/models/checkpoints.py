# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of every family and layout, made with transformers, and the models that they were saved from.

Names begin with the family. Sizes are chosen so that the prompts of the parity tests cross every window and border.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    BloomConfig,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
)
from transformers.models.auto import AutoModelForCausalLM

VOCAB = 131
BORDER = 32
"""Length at which the dynamic and longrope checkpoints change their frequencies."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
COMMON: dict[str, Any] = {
    **_SIZES,
    "intermediate_size": 80,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_SHORT = {**COMMON, "max_position_embeddings": BORDER}
_NEOX = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB, "n_positions": 256, "n_embd": 48, "n_layer": 3, "n_head": 6, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OPT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "word_embed_proj_dim": 48, "init_std": 0.2,
}  # fmt: skip
# Slopes of a power of two heads are powers of two, which Falcon's rounding to bfloat16 leaves as they are.
_FALCON = {**_SIZES, "max_position_embeddings": 256}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.5, 4.0],
    "original_max_position_embeddings": BORDER,
}
_GEMMA: dict[str, Any] = {**COMMON, "head_dim": 16}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama_bias_llama3": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, rope_parameters={**LLAMA3_ROPE}),
    "llama_linear_rope": LlamaConfig(
        **COMMON, head_dim=16, rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    ),
    "llama_dynamic_rope": LlamaConfig(
        **_SHORT, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama_yarn": LlamaConfig(**COMMON, head_dim=16, rope_parameters={**YARN_ROPE}),
    "llama_yarn_mscale": LlamaConfig(
        **COMMON,
        head_dim=32,
        rope_parameters={
            **YARN_ROPE, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5,
        },
    ),
    "mistral": MistralConfig(**COMMON, sliding_window=13),
    "mistral_no_window": MistralConfig(**COMMON, sliding_window=None),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=5, num_experts_per_tok=2, sliding_window=19),
    "qwen2": Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=17, max_window_layers=1),
    "qwen2_no_window": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen2_moe": Qwen2MoeConfig(
        **COMMON, **_EXPERTS, shared_expert_intermediate_size=40, decoder_sparse_step=2, norm_topk_prob=False
    ),
    "qwen2_moe_dense_layer": Qwen2MoeConfig(
        **COMMON, **_EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1], norm_topk_prob=True,
        qkv_bias=False,
    ),
    "qwen3": Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**COMMON, **_EXPERTS, head_dim=16, norm_topk_prob=True),
    "phi3": Phi3Config(**COMMON, sliding_window=21),
    "phi3_longrope": Phi3Config(
        **COMMON,
        rope_parameters={**LONG_ROPE},
        partial_rotary_factor=0.75,
        original_max_position_embeddings=BORDER,
        tie_word_embeddings=True,
    ),
    "seed_oss": SeedOssConfig(**COMMON, head_dim=16, attention_out_bias=True),
    "exaone4": Exaone4Config(**COMMON, sliding_window=9, sliding_window_pattern=3),
    "exaone4_global": Exaone4Config(
        **COMMON, sliding_window=None, layer_types=["full_attention"] * 3, rope_parameters={**LLAMA3_ROPE}
    ),
    "gemma": GemmaConfig(**_GEMMA),
    "gemma2": Gemma2Config(
        **_GEMMA, query_pre_attn_scalar=20, sliding_window=13, attn_logit_softcapping=3.0, final_logit_softcapping=4.0
    ),
    "gemma3": Gemma3TextConfig(
        **_GEMMA,
        query_pre_attn_scalar=20,
        sliding_window=11,
        sliding_window_pattern=3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "gemma3_multimodal": Gemma3Config(
        text_config=Gemma3TextConfig(**_GEMMA, sliding_window=11, sliding_window_pattern=2, query_pre_attn_scalar=16),
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        },
        mm_tokens_per_image=4,
    ),
    "opt": OPTConfig(**_OPT),
    "opt_350m": OPTConfig(**{**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt_no_bias": OPTConfig(**_OPT, enable_bias=False, tie_word_embeddings=False),
    "gpt2": GPT2Config(**_GPT),
    "gptj": GPTJConfig(**_GPT, rotary_dim=4),
    "gpt_neox": GPTNeoXConfig(**_NEOX, rope_parameters={"rope_theta": 9000.0, "partial_rotary_factor": 0.5}),
    "gpt_neox_sequential": GPTNeoXConfig(**_NEOX, use_parallel_residual=False, hidden_act="gelu_fast"),
    "phi": PhiConfig(**COMMON, partial_rotary_factor=0.5),
    "bloom": BloomConfig(**_SIZES, n_layer=3, n_head=6),
    "falcon_7b": FalconConfig(**_FALCON),
    "falcon_40b": FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_11b": FalconConfig(
        **_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, ffn_hidden_size=80,
        tie_word_embeddings=False,
    ),
    "falcon_rw": FalconConfig(
        **{**_FALCON, "num_attention_heads": 4}, alibi=True, multi_query=False, parallel_attn=False, bias=True
    ),
    "qwen": Qwen2Config(**{**COMMON, "num_key_value_heads": 6}, rms_norm_eps=1e-6),
}  # fmt: skip


def make_checkpoint(name: str, directory: Path, **save_options: object) -> PreTrainedModel:
    """Save the named model into `directory`; every parameter is random, norms and biases included."""
    torch.manual_seed(7)
    # Only the eager attention has Gemma's soft-caps; Falcon's adds its bias twice.
    attention = "sdpa" if name.startswith("falcon") else "eager"
    options = {"dtype": torch.float32, "attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(CONFIGS[name], **options).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                mean = 0.0 if parameter_name.endswith("bias") or name.startswith("gemma") else 1.0
                parameter.normal_(mean, 0.3)
            elif parameter.dim() == 3 or "gate.weight" in parameter_name:
                # Experts and routers begin with other values, some of them zeros.
                parameter.normal_(0.0, 0.2)
    if name == "qwen":
        _save_as_qwen(model, directory)
    else:
        model.save_pretrained(directory, **save_options)
    return model


def _save_as_qwen(model: PreTrainedModel, directory: Path) -> None:
    """A Qwen2 model as a checkpoint of the first Qwen, whose computation is the same."""
    renamed = {
        "model.embed_tokens.weight": "transformer.wte.weight",
        "model.norm.weight": "transformer.ln_f.weight",
        "lm_head.weight": "lm_head.weight",
    }
    parts = {
        "input_layernorm": "ln_1", "self_attn.o_proj": "attn.c_proj", "post_attention_layernorm": "ln_2",
        "mlp.up_proj": "mlp.w1", "mlp.gate_proj": "mlp.w2", "mlp.down_proj": "mlp.c_proj",
    }  # fmt: skip
    state = model.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(model.config.num_hidden_layers):
        renamed |= {f"model.layers.{layer}.{a}.weight": f"transformer.h.{layer}.{b}.weight" for a, b in parts.items()}
        for kind in ("weight", "bias"):
            stacked = [state[f"model.layers.{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            tensors[f"transformer.h.{layer}.attn.c_attn.{kind}"] = torch.cat(stacked)
    tensors |= {new: state[old].contiguous() for old, new in renamed.items()}
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    raw = {
        "architectures": ["QWenLMHeadModel"], "attn_dropout_prob": 0.0, "auto_map": {"AutoConfig": "a.B"},
        "bf16": False, "emb_dropout_prob": 0.0, "fp16": False, "fp32": False, "hidden_size": 48,
        "intermediate_size": 160, "kv_channels": 8, "layer_norm_epsilon": 1e-6, "max_position_embeddings": 8192,
        "model_type": "qwen", "no_bias": True, "num_attention_heads": 6, "num_hidden_layers": 3, "onnx_safe": None,
        "rotary_emb_base": 10000, "rotary_pct": 1.0, "scale_attn_weights": True, "seq_length": 256,
        "tie_word_embeddings": False, "tokenizer_class": "QWenTokenizer", "transformers_version": "4.32.0",
        "use_cache": True, "use_dynamic_ntk": True, "use_flash_attn": "auto", "use_logn_attn": True,
        "vocab_size": VOCAB,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(raw))


def max_relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())
