# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory's JSON files -> `ModelConfig`.

Every key of config.json is either understood, known to be harmless, or an error that names it: a model never runs
with a silently ignored setting that would change its text. `auto_map` is never executed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.archs import ARCHITECTURES, find_spec
from mii_zmq.worker.models.checkpoint_json import read_config
from mii_zmq.worker.models.eos import eos_token_ids
from mii_zmq.worker.models.layer_pattern import WINDOW_KEYS, read_experts, read_windows
from mii_zmq.worker.models.rope_config import read_ropes, served_context
from mii_zmq.worker.models.spec import ArchSpec, ModelConfig

HARMLESS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "activation_dropout",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "attn_pdrop",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "custom_pipelines",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dropout",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "length_penalty",
        "license",
        "max_length",
        "min_length",
        "model_max_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_return_dict",
    ]
)
"""Training, generation and bookkeeping keys, which do not change the forward pass."""
MUST_BE_OFF = frozenset({"is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"})
_NULL_COUNTS = frozenset({"attn_softcap", "logit_softcap", "num_kv_heads"})
"""Fields for which an explicit null says something other than a missing key."""
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 10_000
"""Far more than any model has; what is made for each layer must not exhaust the memory on a damaged number."""
_INTEGERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip


def load_model_config(directory: Path) -> ModelConfig:
    """Read config.json, generation_config.json and the tokenizer's end-of-sequence token.

    Raises:
        CheckpointError: no or malformed config.json.
        ModelUnsupported: an architecture without a spec, or a setting that is not implemented.
    """
    raw = read_config(directory)
    spec = find_spec(raw)
    if spec is None:
        names = raw.get("architectures")
        named = names[0] if isinstance(names, list) and names else None
        raise ModelUnsupported(
            f"config.json names the architecture {named!r}; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    _check_keys(raw, spec)
    values = _canonical(raw, spec)
    windows = read_windows(raw, spec, values["num_layers"])
    ropes = read_ropes(spec, values, windows)
    context = served_context(ropes, values)
    return ModelConfig(
        spec=spec,
        **{name: values[name] for name in _INTEGERS if name != "max_position_embeddings"},
        max_position_embeddings=context,
        norm_eps=_real(spec, "norm_eps", values["norm_eps"]),
        activation=_activation(values["activation"]),
        tie_word_embeddings=bool(values["tie_word_embeddings"]),
        qkv_bias=_bias(raw, spec, spec.qkv_bias),
        out_bias=_bias(raw, spec, spec.out_bias),
        mlp_bias=_bias(raw, spec, spec.mlp_bias),
        windows=windows.within(context),
        ropes=ropes,
        dtype=_dtype(raw),
        eos_token_ids=eos_token_ids(directory, raw, values["vocab_size"]),
        scale=_real(spec, "query_scalar", values.get("query_scalar") or values["head_dim"]) ** -0.5,
        alibi_scale=values["head_dim"] ** -0.5 if values.get("scales_alibi") else 1.0,
        attn_softcap=_real(spec, "attn_softcap", values.get("attn_softcap") or 0.0),
        logit_softcap=_real(spec, "logit_softcap", values.get("logit_softcap") or 0.0),
        embed_dim=0 if values.get("embed_dim") in (None, values["hidden_size"]) else values["embed_dim"],
        moe=read_experts(values, spec, values["num_layers"]),
    )


def has_spec(directory: Path) -> bool:
    """Whether the checkpoint's architecture is in our table; raises CheckpointError: it has no config.json."""
    return find_spec(read_config(directory)) is not None


def _check_keys(raw: dict[str, Any], spec: ArchSpec) -> None:
    known = HARMLESS | spec.harmless | WINDOW_KEYS[spec.window]
    known |= {key for keys in spec.fields.values() for key in keys}
    known |= {choice for choice in (spec.qkv_bias, spec.out_bias, spec.mlp_bias) if isinstance(choice, str)}
    for key, value in raw.items():
        if key in spec.required:
            _check_required(spec, key, value)
        elif value is None or key in known:
            continue
        elif key == "quantization_config":
            raise ModelUnsupported("the checkpoint is quantized (quantization_config); use the unquantized one")
        elif key not in MUST_BE_OFF or value:
            raise ModelUnsupported(
                f"config.json has {key} = {str(value)[:60]}, which the {spec.family} family here does not know and "
                "which may change the text; remove it if it does not"
            )


def _check_required(spec: ArchSpec, key: str, value: Any) -> None:
    supported, reason = spec.required[key]
    choices = tuple(supported) if isinstance(supported, frozenset) else (supported,)
    if value is not None and value not in choices:
        named = " or ".join(sorted(map(repr, choices)))
        raise ModelUnsupported(f"config.json has {key} = {value!r}, supported is {named}: {reason}")


def _canonical(raw: dict[str, Any], spec: ArchSpec) -> dict[str, Any]:
    values: dict[str, Any] = dict(spec.defaults)
    for name, keys in spec.fields.items():
        present = [raw[key] for key in keys if raw.get(key) is not None]
        if present:
            values[name] = present[0]
        elif name in _NULL_COUNTS and any(key in raw for key in keys):
            values[name] = None
        if name not in values:
            raise CheckpointError(f"config.json lacks {keys[0]}")
    _fill_sizes(spec, values)
    for name in _INTEGERS:
        _check_positive(spec, name, values[name])
    if values["num_layers"] > MAX_LAYERS:
        raise CheckpointError(f"config.json says {values['num_layers']} layers; at most {MAX_LAYERS} are believed")
    if values["num_heads"] % values["num_kv_heads"]:
        raise ModelUnsupported(
            f"{values['num_heads']} heads cannot be shared by {values['num_kv_heads']} key/value heads"
        )
    return values


def _fill_sizes(spec: ArchSpec, values: dict[str, Any]) -> None:
    """What the published code computes from other sizes where config.json leaves it out."""
    for name in ("hidden_size", "num_heads"):
        _check_positive(spec, name, values[name])
    hidden_size, num_heads = values["hidden_size"], values["num_heads"]
    if values["num_kv_heads"] is None:
        values["num_kv_heads"] = num_heads
    if (doubled := values.get("doubled_intermediate_size")) is not None:
        _check_positive(spec, "doubled_intermediate_size", doubled)
        values["intermediate_size"] = doubled // 2
    if values["intermediate_size"] is None:
        values["intermediate_size"] = 4 * hidden_size
    if values.get("head_dim") is None:
        if hidden_size % num_heads:
            raise ModelUnsupported(f"hidden size {hidden_size} is not a multiple of the {num_heads} heads")
        values["head_dim"] = hidden_size // num_heads
    embed_dim = values.get("embed_dim")
    if embed_dim:
        _check_positive(spec, "embed_dim", embed_dim)


def _check_positive(spec: ArchSpec, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63:
        raise CheckpointError(f"config.json has {_key(spec, name)} = {value!r:.60}; it must be a positive integer")


def _real(spec: ArchSpec, name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise CheckpointError(f"config.json has {_key(spec, name)} = {value!r}; it must be a number, 0 or more")
    return float(value)


def _key(spec: ArchSpec, name: str) -> str:
    return spec.fields[name][0] if name in spec.fields else name


def _bias(raw: dict[str, Any], spec: ArchSpec, choice: bool | str) -> bool:
    if isinstance(choice, bool):
        return choice
    value = raw.get(choice)
    return bool(spec.defaults.get(choice, False) if value is None else value)


def _activation(name: object) -> str:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelUnsupported(f"the activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _dtype(raw: dict[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelUnsupported(f"config.json has the dtype {name!r}; supported are {', '.join(_DTYPES)}")
    return name
