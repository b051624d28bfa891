# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory's JSON files -> `ModelConfig`.

Every key of config.json is either understood, known to be harmless, or an error that names it: a model never runs
with a silently ignored setting that would change its text. `auto_map` is never executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.archs import ARCHITECTURES, BIAS_DEFAULTS
from mii_zmq.worker.models.spec import ArchSpec, ModelConfig, PositionKind, RopeConfig, WindowKind

HARMLESS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "attn_pdrop",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
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
DEFAULT_WINDOW = 4096
"""What the published code of the windowed families takes where config.json has no sliding_window at all."""
_WINDOW_KEYS = {
    WindowKind.NONE: frozenset[str](),
    WindowKind.ALL_LAYERS: frozenset({"sliding_window", "layer_types"}),
    WindowKind.BY_LAYER: frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}),
}
_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_DTYPES = ("float32", "bfloat16", "float16")
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
    raw = _read_json(directory / "config.json")
    if raw is None:
        raise CheckpointError(f"{directory} has no config.json; give the directory of a Hugging Face checkpoint")
    spec = _find_spec(raw)
    _check_keys(raw, spec)
    values = _canonical(raw, spec)
    vocab_size = values["vocab_size"]
    return ModelConfig(
        spec=spec,
        **{name: values[name] for name in _INTEGERS},
        norm_eps=float(values["norm_eps"]),
        activation=_activation(values["activation"]),
        tie_word_embeddings=bool(values["tie_word_embeddings"]),
        qkv_bias=_bias(raw, spec.qkv_bias),
        out_bias=_bias(raw, spec.out_bias),
        mlp_bias=_bias(raw, spec.mlp_bias),
        windows=_windows(raw, spec, values["num_layers"]),
        rope=_rope(raw, values) if spec.position is PositionKind.ROPE else None,
        dtype=_dtype(raw),
        eos_token_ids=_eos_token_ids(directory, raw, vocab_size),
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _find_spec(raw: dict[str, Any]) -> ArchSpec:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in ARCHITECTURES:
        raise ModelUnsupported(
            f"config.json names the architecture {name!r}; supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def _check_keys(raw: dict[str, Any], spec: ArchSpec) -> None:
    known = HARMLESS | spec.harmless | _WINDOW_KEYS[spec.window]
    known |= {key for keys in spec.fields.values() for key in keys}
    known |= {choice for choice in (spec.qkv_bias, spec.out_bias, spec.mlp_bias) if isinstance(choice, str)}
    for key, value in raw.items():
        if value is None or key in known:
            continue
        if key in spec.required:
            supported, reason = spec.required[key]
            if value != supported:
                raise ModelUnsupported(f"config.json has {key} = {value!r}, supported is {supported!r}: {reason}")
        elif key == "quantization_config":
            raise ModelUnsupported("the checkpoint is quantized (quantization_config); use the unquantized one")
        elif key not in MUST_BE_OFF or value:
            raise ModelUnsupported(
                f"config.json has {key} = {str(value)[:60]}, which the {spec.family} family here does not know and "
                "which may change the text; remove it if it does not"
            )


def _canonical(raw: dict[str, Any], spec: ArchSpec) -> dict[str, Any]:
    values: dict[str, Any] = dict(spec.defaults)
    for name, keys in spec.fields.items():
        for key in keys:
            if raw.get(key) is not None:
                values[name] = raw[key]
                break
        if name not in values:
            raise CheckpointError(f"config.json lacks {keys[0]}")
    values["num_kv_heads"] = values["num_kv_heads"] or values["num_heads"]
    for name in _INTEGERS:
        if name != "head_dim":
            _check_positive(spec, name, values[name])
    if values["head_dim"] is None:
        if values["hidden_size"] % values["num_heads"]:
            raise ModelUnsupported(
                f"hidden size {values['hidden_size']} is not a multiple of the {values['num_heads']} heads"
            )
        values["head_dim"] = values["hidden_size"] // values["num_heads"]
    _check_positive(spec, "head_dim", values["head_dim"])
    if values["num_heads"] % values["num_kv_heads"]:
        raise ModelUnsupported(
            f"{values['num_heads']} heads cannot be shared by {values['num_kv_heads']} key/value heads"
        )
    if values.get("word_embed_proj_dim") not in (None, values["hidden_size"]):
        raise ModelUnsupported(
            f"config.json has word_embed_proj_dim = {values['word_embed_proj_dim']}, hidden_size = "
            f"{values['hidden_size']}: projected embeddings (OPT-350m) are not supported; use another size of OPT"
        )
    return values


def _check_positive(spec: ArchSpec, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        key = spec.fields[name][0] if name in spec.fields else name
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a positive integer")


def _bias(raw: dict[str, Any], choice: bool | str) -> bool:
    if isinstance(choice, bool):
        return choice
    value = raw.get(choice)
    return bool(BIAS_DEFAULTS[choice] if value is None else value)


def _activation(name: object) -> str:
    if name not in _ACTIVATIONS:
        raise ModelUnsupported(f"the activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[str(name)]


def _windows(raw: dict[str, Any], spec: ArchSpec, num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window", DEFAULT_WINDOW)
    if spec.window is WindowKind.NONE or window is None:
        return (None,) * num_layers
    if spec.window is WindowKind.BY_LAYER and not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    if not isinstance(window, int) or window <= 0:
        raise CheckpointError(f"config.json has sliding_window = {window!r}; it must be a positive integer")
    kinds = raw.get("layer_types")
    if kinds is None:
        first = 0 if spec.window is WindowKind.ALL_LAYERS else raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelUnsupported(
            "config.json: layer_types must name full_attention or sliding_attention for each of the "
            f"{num_layers} layers"
        )
    if spec.window is WindowKind.ALL_LAYERS and set(kinds) != {"sliding_attention"}:
        raise ModelUnsupported(f"config.json: layer_types other than sliding_attention in the {spec.family} family")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(raw: dict[str, Any], values: dict[str, Any]) -> RopeConfig:
    scaling = dict(values["rope_scaling"] or {})
    theta = scaling.pop("rope_theta", None) or values["rope_theta"]
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in _ROPE_KEYS:
        raise ModelUnsupported(f"config.json has the rope_type {kind!r}; supported are {', '.join(_ROPE_KEYS)}")
    if kind == "llama3":
        scaling.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    for key in _ROPE_KEYS[kind] - scaling.keys():
        raise CheckpointError(f"config.json: rope_type {kind!r} needs {key}")
    for key in scaling.keys() - _ROPE_KEYS[kind]:
        # A rotated share below one, or anything newer, changes the text; an explicit 1.0 does not.
        if not (key == "partial_rotary_factor" and scaling[key] == 1.0):
            raise ModelUnsupported(f"config.json: {key} = {scaling[key]!r} in the rope settings is not supported")
    scaling.pop("partial_rotary_factor", None)
    return RopeConfig(theta=float(theta), kind=kind, **scaling)


def _dtype(raw: dict[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelUnsupported(f"config.json has the dtype {name!r}; supported are {', '.join(_DTYPES)}")
    return name


def _eos_token_ids(directory: Path, raw: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Every id that any of the checkpoint's files calls the end: chat tunes often name one in one file only."""
    generation = _read_json(directory / "generation_config.json") or {}
    found: list[Any] = []
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id"), _tokenizer_eos(directory)):
        found += value if isinstance(value, list) else [value]
    ids = [v for v in found if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < vocab_size]
    return tuple(dict.fromkeys(ids))


def _tokenizer_eos(directory: Path) -> int | None:
    settings = _read_json(directory / "tokenizer_config.json") or {}
    token = settings.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return None
    for token_id, entry in (settings.get("added_tokens_decoder") or {}).items():
        if isinstance(entry, dict) and entry.get("content") == content and str(token_id).isdecimal():
            return int(token_id)
    tokenizer = _read_json(directory / "tokenizer.json") or {}
    for entry in tokenizer.get("added_tokens") or ():
        if isinstance(entry, dict) and entry.get("content") == content:
            return entry.get("id")
    return None
