# SPDX-License-Identifier: Apache-2.0
"""The table of architectures: config.json's `architectures[0]` -> `ArchSpec`. To add one, add an entry and a parity
case in tests/worker/models.
"""

from __future__ import annotations

from dataclasses import replace

from mii_zmq.worker.models.spec import ArchSpec, MlpKind, NormKind, PositionKind, Role, WindowKind

_LLAMA = ArchSpec(
    family="llama",
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
        "rope_scaling": ("rope_parameters", "rope_scaling"),
    },
    defaults={
        "num_kv_heads": None,
        "head_dim": None,
        "norm_eps": 1e-6,
        "activation": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    },
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    required={"rope_interleaved": (False, "its heads are rotated in another order")},
    harmless=frozenset({"pretraining_tp", "is_llama_config", "rms_norm_type"}),
    ignored_tensors=("rotary_emb.inv_freq",),
)

_MISTRAL = replace(
    _LLAMA,
    family="mistral",
    window=WindowKind.ALL_LAYERS,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    defaults={**_LLAMA.defaults, "num_kv_heads": 8},
)

_QWEN2 = replace(
    _LLAMA,
    family="qwen2",
    window=WindowKind.BY_LAYER,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    defaults={**_LLAMA.defaults, "num_kv_heads": 32},
)

_QWEN3 = replace(
    _LLAMA,
    family="qwen3",
    window=WindowKind.BY_LAYER,
    mlp_bias=False,
    qk_norm=True,
    names={
        **_LLAMA.names,
        Role.Q_NORM: "layers.{i}.self_attn.q_norm",
        Role.K_NORM: "layers.{i}.self_attn.k_norm",
    },
    defaults={**_LLAMA.defaults, "num_kv_heads": 32, "head_dim": 128},
)

_OPT = ArchSpec(
    family="opt",
    norm=NormKind.LAYER,
    position=PositionKind.LEARNED,
    mlp=MlpKind.PLAIN,
    names={
        Role.EMBED: "embed_tokens",
        Role.POSITIONS: "embed_positions",
        Role.FINAL_NORM: "final_layer_norm",
        Role.HEAD: "lm_head",
        Role.ATTN_NORM: "layers.{i}.self_attn_layer_norm",
        Role.Q: "layers.{i}.self_attn.q_proj",
        Role.K: "layers.{i}.self_attn.k_proj",
        Role.V: "layers.{i}.self_attn.v_proj",
        Role.O: "layers.{i}.self_attn.out_proj",
        Role.MLP_NORM: "layers.{i}.final_layer_norm",
        Role.UP: "layers.{i}.fc1",
        Role.DOWN: "layers.{i}.fc2",
    },
    prefixes=("model.decoder.", "decoder.", ""),
    fields={
        "vocab_size": ("vocab_size",),
        "hidden_size": ("hidden_size",),
        "intermediate_size": ("ffn_dim",),
        "num_layers": ("num_hidden_layers",),
        "num_heads": ("num_attention_heads",),
        "activation": ("activation_function",),
        "max_position_embeddings": ("max_position_embeddings",),
        "tie_word_embeddings": ("tie_word_embeddings",),
        "word_embed_proj_dim": ("word_embed_proj_dim",),
    },
    defaults={
        "num_kv_heads": None,
        "head_dim": None,
        "norm_eps": 1e-5,
        "activation": "relu",
        "tie_word_embeddings": True,
        "word_embed_proj_dim": None,
    },
    qkv_bias="enable_bias",
    out_bias="enable_bias",
    mlp_bias="enable_bias",
    norm_bias=True,
    position_offset=2,
    required={
        "do_layer_norm_before": (True, "OPT-350m normalises behind its blocks; use another size of OPT"),
        "_remove_final_layer_norm": (False, "it has no final norm"),
        "layer_norm_elementwise_affine": (True, "its norms have no weights"),
    },
    harmless=frozenset({"init_std", "layerdrop", "output_projection", "prefix"}),
)

ARCHITECTURES: dict[str, ArchSpec] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "OPTForCausalLM": _OPT,
}

BIAS_DEFAULTS: dict[str, bool] = {"attention_bias": False, "mlp_bias": False, "enable_bias": True}
"""Config keys named by a spec's bias choices, and their value where config.json leaves them out."""
