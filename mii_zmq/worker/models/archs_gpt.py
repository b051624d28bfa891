# SPDX-License-Identifier: Apache-2.0
"""The GPT line: GPT-2, its successors GPT-J and GPT-NeoX, and Phi, which was built like them. LayerNorm, plain MLPs,
learned positions or partly rotated heads, layers whose halves may run in parallel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mii_zmq.worker.models.spec import ArchSpec, MlpKind, NormKind, PositionKind, QkvKind, ResidualKind, Role

_GPT2_HARMLESS = frozenset(
    [
        "n_ctx",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ]
)

GPT2 = ArchSpec(
    family="gpt2",
    published="GPT-2, DistilGPT-2",
    norm=NormKind.LAYER,
    position=PositionKind.LEARNED,
    mlp=MlpKind.PLAIN,
    qkv=QkvKind.STACKED,
    names={
        Role.EMBED: "wte",
        Role.POSITIONS: "wpe",
        Role.FINAL_NORM: "ln_f",
        Role.HEAD: "lm_head",
        Role.ATTN_NORM: "h.{i}.ln_1",
        Role.QKV: "h.{i}.attn.c_attn",
        Role.O: "h.{i}.attn.c_proj",
        Role.MLP_NORM: "h.{i}.ln_2",
        Role.UP: "h.{i}.mlp.c_fc",
        Role.DOWN: "h.{i}.mlp.c_proj",
    },
    prefixes=("transformer.", ""),
    fields={
        "vocab_size": ("vocab_size",),
        "hidden_size": ("n_embd", "hidden_size"),
        "intermediate_size": ("n_inner",),
        "num_layers": ("n_layer", "num_hidden_layers"),
        "num_heads": ("n_head", "num_attention_heads"),
        "norm_eps": ("layer_norm_epsilon",),
        "activation": ("activation_function",),
        "max_position_embeddings": ("n_positions", "max_position_embeddings"),
        "tie_word_embeddings": ("tie_word_embeddings",),
    },
    defaults={
        "num_kv_heads": None,
        "head_dim": None,
        "intermediate_size": None,
        "norm_eps": 1e-5,
        "activation": "gelu_new",
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    norm_bias=True,
    is_transposed=True,
    required={
        "scale_attn_weights": (True, "its attention scores are not scaled"),
        "scale_attn_by_inverse_layer_idx": (False, "its attention scores are scaled by the layer's number"),
    },
    # Reordered and upcast scores differ in rounding alone.
    harmless=_GPT2_HARMLESS | {"reorder_and_upcast_attn"},
    ignored_tensors=(".attn.bias", ".attn.masked_bias"),
)

GPTJ = replace(
    GPT2,
    family="gptj",
    published="GPT-J 6B",
    position=PositionKind.ROPE,
    residual=ResidualKind.PARALLEL,
    qkv=QkvKind.SEPARATE,
    names={
        Role.EMBED: "wte",
        Role.FINAL_NORM: "ln_f",
        Role.HEAD: "lm_head",
        Role.ATTN_NORM: "h.{i}.ln_1",
        Role.Q: "h.{i}.attn.q_proj",
        Role.K: "h.{i}.attn.k_proj",
        Role.V: "h.{i}.attn.v_proj",
        Role.O: "h.{i}.attn.out_proj",
        Role.UP: "h.{i}.mlp.fc_in",
        Role.DOWN: "h.{i}.mlp.fc_out",
    },
    fields={**GPT2.fields, "rotary_dim": ("rotary_dim",)},
    defaults={
        **GPT2.defaults,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rotary_dim": 64,
        "rope_theta": 10000.0,
    },
    qkv_bias=False,
    out_bias=False,
    head_bias=True,
    is_transposed=False,
    is_interleaved=True,
    required={
        "scale_attn_weights": (True, "its attention scores are not scaled"),
        "rotary": (True, "its heads are not rotated"),
    },
    harmless=_GPT2_HARMLESS,
)

_GPT_NEOX = ArchSpec(
    family="gpt_neox",
    published="GPT-NeoX 20B, Pythia, Dolly 2",
    norm=NormKind.LAYER,
    position=PositionKind.ROPE,
    mlp=MlpKind.PLAIN,
    qkv=QkvKind.GROUPED,
    names={
        Role.EMBED: "embed_in",
        Role.FINAL_NORM: "final_layer_norm",
        Role.HEAD: "embed_out",
        Role.ATTN_NORM: "layers.{i}.input_layernorm",
        Role.QKV: "layers.{i}.attention.query_key_value",
        Role.O: "layers.{i}.attention.dense",
        Role.MLP_NORM: "layers.{i}.post_attention_layernorm",
        Role.UP: "layers.{i}.mlp.dense_h_to_4h",
        Role.DOWN: "layers.{i}.mlp.dense_4h_to_h",
    },
    prefixes=("gpt_neox.", ""),
    fields={
        "vocab_size": ("vocab_size",),
        "hidden_size": ("hidden_size",),
        "intermediate_size": ("intermediate_size",),
        "num_layers": ("num_hidden_layers",),
        "num_heads": ("num_attention_heads",),
        "norm_eps": ("layer_norm_eps",),
        "activation": ("hidden_act",),
        "max_position_embeddings": ("max_position_embeddings",),
        "tie_word_embeddings": ("tie_word_embeddings",),
        "rope_theta": ("rotary_emb_base", "rope_theta"),
        "rope_scaling": ("rope_scaling", "rope_parameters"),
        "partial_rotary_factor": ("rotary_pct",),
    },
    defaults={
        "num_kv_heads": None,
        "head_dim": None,
        "norm_eps": 1e-5,
        "activation": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
    },
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias=True,
    norm_bias=True,
    harmless=frozenset({"attention_probs_dropout_prob", "hidden_dropout_prob", "use_parallel_residual"}),
    ignored_tensors=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
)


def gpt_neox(raw: dict[str, Any]) -> ArchSpec:
    is_parallel = raw.get("use_parallel_residual", True)
    return replace(_GPT_NEOX, residual=ResidualKind.PARALLEL if is_parallel else ResidualKind.SEQUENTIAL)


PHI = replace(
    _GPT_NEOX,
    family="phi",
    published="Phi-1, Phi-1.5, Phi-2",
    residual=ResidualKind.PARALLEL,
    qkv=QkvKind.SEPARATE,
    names={
        Role.EMBED: "embed_tokens",
        Role.FINAL_NORM: "final_layernorm",
        Role.HEAD: "lm_head",
        Role.ATTN_NORM: "layers.{i}.input_layernorm",
        Role.Q: "layers.{i}.self_attn.q_proj",
        Role.K: "layers.{i}.self_attn.k_proj",
        Role.V: "layers.{i}.self_attn.v_proj",
        Role.O: "layers.{i}.self_attn.dense",
        Role.UP: "layers.{i}.mlp.fc1",
        Role.DOWN: "layers.{i}.mlp.fc2",
    },
    prefixes=("model.", ""),
    fields={
        **_GPT_NEOX.fields,
        "rope_theta": ("rope_theta",),
        "num_kv_heads": ("num_key_value_heads",),
        "partial_rotary_factor": ("partial_rotary_factor",),
    },
    defaults={**_GPT_NEOX.defaults, "activation": "gelu_new", "partial_rotary_factor": 0.5},
    qkv_bias=True,
    out_bias=True,
    head_bias=True,
    required={"qk_layernorm": (False, "its query and key heads are normalised with LayerNorm")},
    harmless=frozenset(),
    ignored_tensors=("rotary_emb.inv_freq",),
)
