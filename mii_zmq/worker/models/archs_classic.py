# SPDX-License-Identifier: Apache-2.0
"""OPT, BLOOM, Falcon and the first Qwen. Where one class has several layouts, a function of config.json picks one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mii_zmq.worker.models.spec import (
    ArchSpec,
    MlpKind,
    NormKind,
    PositionKind,
    QkvKind,
    ResidualKind,
    Role,
)

_OPT = ArchSpec(
    family="opt",
    published="OPT 125M to 66B",
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
        "embed_dim": ("word_embed_proj_dim",),
    },
    defaults={
        "num_kv_heads": None,
        "head_dim": None,
        "norm_eps": 1e-5,
        "activation": "relu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "embed_dim": 0,
        "enable_bias": True,
    },
    qkv_bias="enable_bias",
    out_bias="enable_bias",
    mlp_bias="enable_bias",
    norm_bias=True,
    position_offset=2,
    required={"layer_norm_elementwise_affine": (True, "its norms have no weights")},
    harmless=frozenset(
        {"do_layer_norm_before", "_remove_final_layer_norm", "init_std", "layerdrop", "output_projection"}
    ),
)


def opt(raw: dict[str, Any]) -> ArchSpec:
    """OPT-350m projects its embeddings and norms behind each half layer, with no final norm."""
    names = dict(_OPT.names)
    residual = _OPT.residual
    if not raw.get("do_layer_norm_before", True):
        residual = ResidualKind.POST_NORM
        names[Role.ATTN_POST_NORM] = names.pop(Role.ATTN_NORM)
        names[Role.MLP_POST_NORM] = names.pop(Role.MLP_NORM)
    if residual is ResidualKind.POST_NORM or raw.get("_remove_final_layer_norm"):
        del names[Role.FINAL_NORM]
    if raw.get("word_embed_proj_dim") not in (None, raw.get("hidden_size")):
        names |= {Role.PROJECT_IN: "project_in", Role.PROJECT_OUT: "project_out"}
    return replace(_OPT, names=names, residual=residual)


BLOOM = ArchSpec(
    family="bloom",
    published="BLOOM, BLOOMZ",
    norm=NormKind.LAYER,
    position=PositionKind.ALIBI,
    mlp=MlpKind.PLAIN,
    qkv=QkvKind.GROUPED,
    names={
        Role.EMBED: "word_embeddings",
        Role.EMBED_NORM: "word_embeddings_layernorm",
        Role.FINAL_NORM: "ln_f",
        Role.HEAD: "lm_head",
        Role.ATTN_NORM: "h.{i}.input_layernorm",
        Role.QKV: "h.{i}.self_attention.query_key_value",
        Role.O: "h.{i}.self_attention.dense",
        Role.MLP_NORM: "h.{i}.post_attention_layernorm",
        Role.UP: "h.{i}.mlp.dense_h_to_4h",
        Role.DOWN: "h.{i}.mlp.dense_4h_to_h",
    },
    prefixes=("transformer.", ""),
    fields={
        "vocab_size": ("vocab_size",),
        "hidden_size": ("n_embed", "hidden_size"),
        "num_layers": ("n_layer", "num_hidden_layers"),
        "num_heads": ("n_head", "num_attention_heads"),
        "norm_eps": ("layer_norm_epsilon",),
        "max_position_embeddings": ("seq_length",),
        "tie_word_embeddings": ("tie_word_embeddings",),
    },
    # ALiBi has no last position; where seq_length is missing, the length of the training texts limits the context.
    defaults={
        "num_kv_heads": None,
        "head_dim": None,
        "intermediate_size": None,
        "norm_eps": 1e-5,
        "activation": "gelu_new",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    norm_bias=True,
    required={"apply_residual_connection_post_layernorm": (False, "its residual is the normed stream")},
    harmless=frozenset(
        [
            "attention_softmax_in_fp32",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "n_inner",
            "offset_alibi",
            "pretraining_tp",
            "skip_bias_add",
            "skip_bias_add_qkv",
            "slow_but_exact",
        ]
    ),
)

_FALCON = replace(
    BLOOM,
    family="falcon",
    published="Falcon 7B, 11B, 40B, 180B, RW 1B and 7B",
    names={role: name for role, name in BLOOM.names.items() if role is not Role.EMBED_NORM},
    fields={
        "vocab_size": ("vocab_size",),
        "hidden_size": ("n_embed", "hidden_size"),
        "intermediate_size": ("ffn_hidden_size",),
        "num_layers": ("num_hidden_layers", "n_layer"),
        "num_heads": ("num_attention_heads", "n_head"),
        "num_kv_heads": ("num_kv_heads", "n_head_kv"),
        "norm_eps": ("layer_norm_epsilon",),
        "activation": ("activation",),
        "max_position_embeddings": ("max_position_embeddings",),
        "tie_word_embeddings": ("tie_word_embeddings",),
        "rope_theta": ("rope_theta",),
        "rope_scaling": ("rope_scaling", "rope_parameters"),
    },
    defaults={**BLOOM.defaults, "activation": "gelu", "rope_theta": 10000.0, "rope_scaling": None},
    qkv_bias="bias",
    out_bias="bias",
    mlp_bias="bias",
    harmless=frozenset(
        {"alibi", "ff_factor", "multi_query", "new_decoder_architecture", "num_ln_in_parallel_attn", "parallel_attn"}
    ),
    ignored_tensors=("rotary_emb.inv_freq",),
)


def falcon(raw: dict[str, Any]) -> ArchSpec:
    """RW (ALiBi, one half after the other), 7B (one key/value head), or 40B, 180B and 11B (groups of heads)."""
    names, fields, defaults = dict(_FALCON.names), dict(_FALCON.fields), dict(_FALCON.defaults)
    required, harmless = dict(_FALCON.required), _FALCON.harmless
    is_new = bool(raw.get("new_decoder_architecture", False))
    is_parallel = is_new or bool(raw.get("parallel_attn", True))
    has_one_kv_head = not is_new and bool(raw.get("multi_query", True))
    if is_new:
        required["parallel_attn"] = (True, "the new decoder has no sequential form")
    else:
        # The published code reads the number of key/value heads in the new decoder only.
        harmless |= set(fields.pop("num_kv_heads"))
    if has_one_kv_head:
        defaults["num_kv_heads"] = 1
    if is_new and raw.get("num_ln_in_parallel_attn") in (None, 2):
        names |= {Role.ATTN_NORM: "h.{i}.ln_attn", Role.MLP_NORM: "h.{i}.ln_mlp"}
    elif is_parallel:
        required["num_ln_in_parallel_attn"] = (1, "its layers have more norms than the published code reads")
        del names[Role.MLP_NORM]
    if raw.get("alibi"):
        # The published code adds the bias before it scales the scores.
        defaults["scales_alibi"] = True
    return replace(
        _FALCON,
        names=names,
        fields=fields,
        defaults=defaults,
        required=required,
        harmless=harmless,
        qkv=QkvKind.STACKED if has_one_kv_head else QkvKind.GROUPED,
        residual=ResidualKind.PARALLEL if is_parallel else ResidualKind.SEQUENTIAL,
        position=PositionKind.ALIBI if raw.get("alibi") else PositionKind.ROPE,
    )


QWEN = ArchSpec(
    family="qwen",
    published="Qwen 1.8B to 72B and their chat models",
    norm=NormKind.RMS,
    position=PositionKind.ROPE,
    mlp=MlpKind.GATED,
    qkv=QkvKind.STACKED,
    names={
        Role.EMBED: "wte",
        Role.FINAL_NORM: "ln_f",
        Role.HEAD: "lm_head",
        Role.ATTN_NORM: "h.{i}.ln_1",
        Role.QKV: "h.{i}.attn.c_attn",
        Role.O: "h.{i}.attn.c_proj",
        Role.MLP_NORM: "h.{i}.ln_2",
        Role.GATE: "h.{i}.mlp.w2",
        Role.UP: "h.{i}.mlp.w1",
        Role.DOWN: "h.{i}.mlp.c_proj",
    },
    prefixes=("transformer.", ""),
    fields={
        "vocab_size": ("vocab_size",),
        "hidden_size": ("hidden_size",),
        "doubled_intermediate_size": ("intermediate_size",),
        "num_layers": ("num_hidden_layers",),
        "num_heads": ("num_attention_heads",),
        "head_dim": ("kv_channels",),
        "norm_eps": ("layer_norm_epsilon",),
        "max_position_embeddings": ("seq_length",),
        "tie_word_embeddings": ("tie_word_embeddings",),
        "rope_theta": ("rotary_emb_base",),
    },
    # Within seq_length, which limits the context, neither log-n attention nor the dynamic base has an effect.
    defaults={
        "num_kv_heads": None,
        "norm_eps": 1e-6,
        "activation": "silu",
        "intermediate_size": None,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
    qkv_bias=True,
    required={
        "no_bias": (True, "its projections have biases"),
        "rotary_pct": (1.0, "its heads are rotated in part"),
        "scale_attn_weights": (True, "its attention scores are not scaled"),
        "use_cache_quantization": (False, "its keys and values are quantized"),
    },
    harmless=frozenset(
        [
            "attn_dropout_prob",
            "bf16",
            "emb_dropout_prob",
            "fp16",
            "fp32",
            "max_position_embeddings",
            "onnx_safe",
            "softmax_in_fp32",
            "use_cache_kernel",
            "use_dynamic_ntk",
            "use_flash_attn",
            "use_logn_attn",
        ]
    ),
    ignored_tensors=("rotary_emb.inv_freq", ".attn.masked_bias"),
)
