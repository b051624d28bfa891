# SPDX-License-Identifier: Apache-2.0
"""Families whose published code grew out of Llama's: RMSNorm, gated MLP, rotary positions, grouped heads."""

from __future__ import annotations

from dataclasses import replace

from mii_zmq.worker.models.spec import ArchSpec, MlpKind, NormKind, PositionKind, QkvKind, Role, WindowKind

LLAMA = ArchSpec(
    family="llama",
    published="Llama 1 to 3.3, Yi, SmolLM2, TinyLlama, Vicuna, DeepSeek-LLM",
    norm=NormKind.RMS,
    position=PositionKind.ROPE,
    mlp=MlpKind.GATED,
    names={
        Role.EMBED: "embed_tokens",
        Role.FINAL_NORM: "norm",
        Role.HEAD: "lm_head",
        Role.ATTN_NORM: "layers.{i}.input_layernorm",
        Role.Q: "layers.{i}.self_attn.q_proj",
        Role.K: "layers.{i}.self_attn.k_proj",
        Role.V: "layers.{i}.self_attn.v_proj",
        Role.O: "layers.{i}.self_attn.o_proj",
        Role.MLP_NORM: "layers.{i}.post_attention_layernorm",
        Role.GATE: "layers.{i}.mlp.gate_proj",
        Role.UP: "layers.{i}.mlp.up_proj",
        Role.DOWN: "layers.{i}.mlp.down_proj",
    },
    prefixes=("model.", ""),
    fields={
        "vocab_size": ("vocab_size",),
        "hidden_size": ("hidden_size",),
        "intermediate_size": ("intermediate_size",),
        "num_layers": ("num_hidden_layers",),
        "num_heads": ("num_attention_heads",),
        "num_kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim",),
        "norm_eps": ("rms_norm_eps",),
        "activation": ("hidden_act",),
        "max_position_embeddings": ("max_position_embeddings",),
        "tie_word_embeddings": ("tie_word_embeddings",),
        "rope_theta": ("rope_theta",),
        "rope_scaling": ("rope_scaling", "rope_parameters"),
        "max_sequence_length": ("max_sequence_length",),
    },
    defaults={
        "num_kv_heads": None,
        "head_dim": None,
        "norm_eps": 1e-6,
        "activation": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_sequence_length": None,
    },
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    required={"rope_interleaved": (False, "its heads are rotated in another order")},
    harmless=frozenset({"pretraining_tp", "is_llama_config", "rms_norm_type"}),
    ignored_tensors=("rotary_emb.inv_freq",),
)

SEED_OSS = replace(
    LLAMA,
    family="seed_oss",
    published="Seed-OSS 36B",
    out_bias="attention_out_bias",
    defaults={**LLAMA.defaults, "num_kv_heads": 8, "head_dim": 128, "attention_bias": True},
    harmless=LLAMA.harmless | {"residual_dropout"},
)

MISTRAL = replace(
    LLAMA,
    family="mistral",
    published="Mistral 7B, Nemo, Small 3; Zephyr",
    window=WindowKind.ALL_LAYERS,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    defaults={**LLAMA.defaults, "num_kv_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)

_DENSE_MLP = (Role.GATE, Role.UP, Role.DOWN)
_EXPERT_FIELDS = {"num_experts": ("num_local_experts", "num_experts"), "top_k": ("num_experts_per_tok",)}
_TRAINING_OF_ROUTERS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})

MIXTRAL = replace(
    MISTRAL,
    family="mixtral",
    published="Mixtral 8x7B, 8x22B",
    names={
        **{role: name for role, name in MISTRAL.names.items() if role not in _DENSE_MLP},
        Role.ROUTER: "layers.{i}.block_sparse_moe.gate",
        Role.EXPERT_GATE: "layers.{i}.block_sparse_moe.experts.{e}.w1",
        Role.EXPERT_UP: "layers.{i}.block_sparse_moe.experts.{e}.w3",
        Role.EXPERT_DOWN: "layers.{i}.block_sparse_moe.experts.{e}.w2",
    },
    fields={**MISTRAL.fields, **_EXPERT_FIELDS},
    defaults={
        **MISTRAL.defaults,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_experts": 8,
        "top_k": 2,
        "norm_topk_prob": True,
    },
    harmless=MISTRAL.harmless | _TRAINING_OF_ROUTERS,
)

QWEN2 = replace(
    LLAMA,
    family="qwen2",
    published="Qwen1.5, Qwen2, Qwen2.5, QwQ; DeepSeek-R1 distilled into them",
    window=WindowKind.BY_SWITCH,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    defaults={**LLAMA.defaults, "num_kv_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    required={**LLAMA.required, "use_mrope": (False, "its positions are those of images and videos")},
)

_QWEN_EXPERTS = {
    Role.ROUTER: "layers.{i}.mlp.gate",
    Role.EXPERT_GATE: "layers.{i}.mlp.experts.{e}.gate_proj",
    Role.EXPERT_UP: "layers.{i}.mlp.experts.{e}.up_proj",
    Role.EXPERT_DOWN: "layers.{i}.mlp.experts.{e}.down_proj",
}
_QWEN_EXPERT_FIELDS = {
    **_EXPERT_FIELDS,
    "moe_intermediate_size": ("moe_intermediate_size",),
    "norm_topk_prob": ("norm_topk_prob",),
    "decoder_sparse_step": ("decoder_sparse_step",),
    "mlp_only_layers": ("mlp_only_layers",),
}
_QWEN_EXPERT_DEFAULTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
_NO_SWITCHED_WINDOW = {
    "use_sliding_window": (False, "published versions of the code disagree about which layers it holds in")
}

QWEN2_MOE = replace(
    QWEN2,
    family="qwen2_moe",
    published="Qwen1.5-MoE, Qwen2-57B-A14B",
    window=WindowKind.NONE,
    qkv_bias="qkv_bias",
    names={
        **QWEN2.names,
        **_QWEN_EXPERTS,
        Role.SHARED_GATE: "layers.{i}.mlp.shared_expert.gate_proj",
        Role.SHARED_UP: "layers.{i}.mlp.shared_expert.up_proj",
        Role.SHARED_DOWN: "layers.{i}.mlp.shared_expert.down_proj",
        Role.SHARED_SWITCH: "layers.{i}.mlp.shared_expert_gate",
    },
    fields={
        **QWEN2.fields,
        **_QWEN_EXPERT_FIELDS,
        "shared_intermediate_size": ("shared_expert_intermediate_size",),
    },
    defaults={
        **QWEN2.defaults,
        "num_kv_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "top_k": 4,
        "moe_intermediate_size": 1408,
        "shared_intermediate_size": 5632,
        **_QWEN_EXPERT_DEFAULTS,
    },
    required={**QWEN2.required, **_NO_SWITCHED_WINDOW},
    harmless=QWEN2.harmless | _TRAINING_OF_ROUTERS | {"sliding_window", "max_window_layers"},
)

QWEN3 = replace(
    QWEN2,
    family="qwen3",
    published="Qwen3 0.6B to 32B",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    names={
        **QWEN2.names,
        Role.Q_NORM: "layers.{i}.self_attn.q_norm",
        Role.K_NORM: "layers.{i}.self_attn.k_norm",
    },
    defaults={**QWEN2.defaults, "head_dim": 128},
)

QWEN3_MOE = replace(
    QWEN3,
    family="qwen3_moe",
    published="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    window=WindowKind.NONE,
    names={**QWEN3.names, **_QWEN_EXPERTS},
    fields={**QWEN3.fields, **_QWEN_EXPERT_FIELDS},
    defaults={
        **QWEN3.defaults,
        "num_kv_heads": 4,
        "head_dim": None,
        "num_experts": 128,
        "top_k": 8,
        "moe_intermediate_size": 768,
        **_QWEN_EXPERT_DEFAULTS,
    },
    required={**QWEN3.required, **_NO_SWITCHED_WINDOW},
    harmless=QWEN3.harmless | _TRAINING_OF_ROUTERS | {"sliding_window", "max_window_layers"},
)

PHI3 = replace(
    LLAMA,
    family="phi3",
    published="Phi-3, Phi-3.5 mini, Phi-4, Phi-4-mini",
    window=WindowKind.ALL_LAYERS,
    qkv=QkvKind.STACKED,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    names={
        **{role: name for role, name in LLAMA.names.items() if role not in (Role.Q, Role.K, Role.V, *_DENSE_MLP)},
        Role.QKV: "layers.{i}.self_attn.qkv_proj",
        Role.GATE_UP: "layers.{i}.mlp.gate_up_proj",
        Role.DOWN: "layers.{i}.mlp.down_proj",
    },
    fields={
        **LLAMA.fields,
        "partial_rotary_factor": ("partial_rotary_factor",),
        "original_max_position_embeddings": ("original_max_position_embeddings",),
    },
    defaults={
        **LLAMA.defaults,
        "norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
    },
    required={
        "attention_bias": (False, "its projections have biases"),
        "mlp_bias": (False, "its projections have biases"),
        "lm_head_bias": (False, "its head has a bias"),
        "full_attn_mod": (1, "its layers attend differently"),
        "interpolate_factor": (1, "its positions are interpolated"),
    },
)

EXAONE4 = replace(
    LLAMA,
    family="exaone4",
    published="EXAONE 4.0 1.2B, 32B",
    window=WindowKind.BY_TYPE,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    names={
        **{role: name for role, name in QWEN3.names.items() if role not in (Role.ATTN_NORM, Role.MLP_NORM)},
        Role.ATTN_POST_NORM: "layers.{i}.post_attention_layernorm",
        Role.MLP_POST_NORM: "layers.{i}.post_feedforward_layernorm",
    },
    defaults={
        **LLAMA.defaults,
        "num_kv_heads": 32,
        "norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rotates_full_layers": False,
    },
)
