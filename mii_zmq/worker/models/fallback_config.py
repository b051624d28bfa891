# SPDX-License-Identifier: Apache-2.0
"""config.json of a family without a spec -> transformers' config and model class, or why it cannot run here.

transformers' own classes are looked up by `model_type` and nothing else: code that a checkpoint names in `auto_map`
is never imported. What only the built model can tell (heads, windows, whether its layers mix tokens outside of
attention) is found by `fallback_probe`.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.checkpoint_json import read_json
from mii_zmq.worker.models.eos import eos_token_ids
from mii_zmq.worker.models.hf_config import HARMLESS
from mii_zmq.worker.models.model_facts import ModelFacts
from mii_zmq.worker.models.transformers_log import quiet

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
"""Rotary scaling that transformers chooses by the longest sequence of a batch."""
_OLD_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
"""What transformers gathers into rope_parameters."""
_ATTENTION_KINDS = ("attention", "full_attention", "sliding_attention")


@dataclass(frozen=True)
class FallbackConfig:
    """A checkpoint that may run on transformers' code."""

    config: Any
    """transformers' config object."""
    model_class: Any
    """transformers' class with a language-model head."""
    facts: ModelFacts
    """As config.json has them; the built model decides."""


def fallback_facts(directory: Path) -> ModelFacts:
    """What config.json says of the model.

    Raises:
        CheckpointError, ModelUnsupported: as `read_fallback_config`.
    """
    return read_fallback_config(directory).facts


def read_fallback_config(directory: Path) -> FallbackConfig:
    """Read the checkpoint's config through transformers, without running any code of the checkpoint.

    Raises:
        CheckpointError: no or malformed config.json.
        ModelUnsupported: transformers does not know the model, or it cannot run with paged attention.
    """
    raw = read_json(directory / "config.json")
    if raw is None:
        raise CheckpointError(f"{directory} has no config.json; give the directory of a Hugging Face checkpoint")
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in CONFIG_MAPPING:
        is_remote = " (its auto_map names code in the checkpoint, which is never run)" if "auto_map" in raw else ""
        raise ModelUnsupported(
            f"config.json has the model_type {family!r}, which transformers {transformers.__version__} does not "
            f"know{is_remote}; a newer transformers may"
        )
    if raw.get("quantization_config") is not None:
        raise ModelUnsupported("the checkpoint is quantized (quantization_config); use the unquantized one")
    config = _parse(directory, raw, CONFIG_MAPPING[family])
    model_class = _model_class(family, config)
    _check_layers(family, config, model_class)
    return FallbackConfig(config, model_class, _facts(directory, raw, family, config))


def _parse(directory: Path, raw: dict[str, Any], config_class: Any) -> Any:
    try:
        with quiet():
            config = config_class.from_json_file(directory / "config.json")
    except (
        StrictDataclassError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as e:
        message = " ".join(str(e).split())[:300]
        raise CheckpointError(f"{directory / 'config.json'} is not a {raw['model_type']} config: {message}") from None
    known = {field.name for field in dataclasses.fields(config_class)} | config_class.attribute_map.keys()
    unknown = sorted(key for key in raw.keys() - known - HARMLESS - _OLD_ROPE_KEYS if raw[key] is not None)
    if unknown:
        logger.info(
            "transformers' config of the %s family does not declare these keys of config.json: %s",
            raw["model_type"], ", ".join(unknown),
        )  # fmt: skip
    return config


def _model_class(family: str, config: Any) -> Any:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{family} is an encoder-decoder; only decoders with a language-model head are served")
    if config.get_text_config(decoder=True) is not config:
        raise ModelUnsupported(f"the {family} model is not only for text; only text models are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnsupported(f"transformers has no causal language model of the {family} family")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # Some classes use the interface without the flag (stablelm), so their source decides, as transformers does it.
    if not (model_class._supports_attention_backend or model_class._can_set_attn_implementation()):
        raise ModelUnsupported(
            f"transformers' code of the {family} family does not use its attention interface, so paged attention "
            "cannot be put in"
        )
    return model_class


def _check_layers(family: str, config: Any, model_class: Any) -> None:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if not isinstance(kinds, (list, tuple)):
        raise CheckpointError(f"the {family} config has layers of the kinds {kinds!r:.60}; they must be a list")
    others = sorted({str(kind) for kind in kinds} - set(_ATTENTION_KINDS))
    if others:
        raise ModelUnsupported(
            f"the {family} checkpoint has layers of the kind {', '.join(others)}; only full and sliding attention "
            "can be paged"
        )
    if model_class._is_stateful and not kinds:
        raise ModelUnsupported(f"{family} keeps a recurrent state, which paged attention cannot hold")
    if getattr(config, "add_cross_attention", False):
        raise ModelUnsupported(f"the {family} checkpoint has cross attention (add_cross_attention)")


def _facts(directory: Path, raw: dict[str, Any], family: str, config: Any) -> ModelFacts:
    num_heads = _positive(config, family, "num_attention_heads")
    num_kv_heads = _get(config, family, "num_key_value_heads") or num_heads
    head_dim = _get(config, family, "head_dim") or _positive(config, family, "hidden_size") // num_heads
    vocab_size = _positive(config, family, "vocab_size")
    name = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelUnsupported(f"config.json has the dtype {name!r}; supported are {', '.join(DTYPES)}")
    return ModelFacts(
        family=family,
        vocab_size=vocab_size,
        num_layers=_positive(config, family, "num_hidden_layers"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_context(config, family),
        dtype=name,
        eos_token_ids=eos_token_ids(directory, raw, vocab_size),
    )


def _context(config: Any, family: str) -> int:
    """Positions that the model may use: no more than up to where its rotary scaling depends on the length."""
    context = _positive(config, family, "max_position_embeddings")
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if not isinstance(rope, dict) or rope.get("rope_type") not in LENGTH_DEPENDENT_ROPES:
            continue
        border = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if isinstance(border, int) and border < context:
            logger.warning(
                "%s: the context is cut from %d to %d tokens, since the rotary scaling %s depends on the longest "
                "sequence of a batch behind that",
                family, context, border, rope["rope_type"],
            )  # fmt: skip
            context = border
    return context


def _positive(config: Any, family: str, name: str) -> int:
    value = _get(config, family, name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelUnsupported(f"the {family} config has {name} = {value!r}; it must be a positive integer")
    return value


def _get(config: Any, family: str, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:
        # What transformers raises where the layers' own configs differ in it.
        raise ModelUnsupported(f"{name} differs between the layers of the {family} model") from None
