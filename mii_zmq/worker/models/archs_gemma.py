# SPDX-License-Identifier: Apache-2.0
"""Google's Gemma families: norms stored as scale - 1, scaled embeddings, tanh GELU; from the second on norms on both
sides of each half layer and windows in most layers.
"""

from __future__ import annotations

from dataclasses import replace

from mii_zmq.worker.models.archs_llama import LLAMA
from mii_zmq.worker.models.spec import Role, WindowKind

_CAUSAL_ONLY = {"use_bidirectional_attention": (False, "its tokens see those that follow them")}

GEMMA = replace(
    LLAMA,
    family="gemma",
    published="Gemma 1, 1.1, CodeGemma",
    mlp_bias=False,
    norm_offset=1.0,
    scales_embedding=True,
    fields={**LLAMA.fields, "activation": ("hidden_activation",)},
    defaults={
        **LLAMA.defaults,
        "num_kv_heads": 16,
        "head_dim": 256,
        "activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    # The first releases say "gelu" and mean the approximation; all published code computes the approximation.
    required={**_CAUSAL_ONLY, "hidden_act": (frozenset({"gelu", "gelu_pytorch_tanh"}), "it has another activation")},
    harmless=frozenset(),
)

GEMMA2 = replace(
    GEMMA,
    family="gemma2",
    published="Gemma 2",
    window=WindowKind.BY_TYPE,
    names={
        **LLAMA.names,
        Role.ATTN_POST_NORM: "layers.{i}.post_attention_layernorm",
        Role.MLP_NORM: "layers.{i}.pre_feedforward_layernorm",
        Role.MLP_POST_NORM: "layers.{i}.post_feedforward_layernorm",
    },
    fields={
        **GEMMA.fields,
        "query_scalar": ("query_pre_attn_scalar",),
        "attn_softcap": ("attn_logit_softcapping",),
        "logit_softcap": ("final_logit_softcapping",),
    },
    defaults={
        **GEMMA.defaults,
        "num_kv_heads": 4,
        "query_scalar": 256,
        "attn_softcap": 50.0,
        "logit_softcap": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    # The published code reads sliding_window.
    harmless=frozenset({"sliding_window_size"}),
)

GEMMA3 = replace(
    GEMMA2,
    family="gemma3",
    published="Gemma 3 270M, 1B",
    names={
        **GEMMA2.names,
        Role.Q_NORM: "layers.{i}.self_attn.q_norm",
        Role.K_NORM: "layers.{i}.self_attn.k_norm",
    },
    fields={
        **{name: keys for name, keys in GEMMA2.fields.items() if name != "attn_softcap"},
        "rope_local_theta": ("rope_local_base_freq",),
    },
    # The published larger models leave out of config.json whatever equals these.
    defaults={
        **{name: value for name, value in GEMMA2.defaults.items() if name != "attn_softcap"},
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_layers": 26,
        "num_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_theta": 1e4,
        "logit_softcap": None,
        "sliding_window_pattern": 6,
    },
    required={**GEMMA.required, "attn_logit_softcapping": (None, "the published code leaves it out for Gemma 3")},
)

GEMMA3_MULTIMODAL = replace(
    GEMMA3,
    published="Gemma 3 4B to 27B, text only",
    prefixes=("language_model.model.", "model.language_model.", "model.", ""),
    ignored_prefixes=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    harmless=GEMMA3.harmless
    | {"boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "vision_config"},
)
