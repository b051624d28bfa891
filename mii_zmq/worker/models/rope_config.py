# SPDX-License-Identifier: Apache-2.0
"""Rotary settings of config.json, in the spellings of all years -> one `RopeConfig` per layer, and the context.

Settings stand at the top level (`rope_theta`, `partial_rotary_factor`), in `rope_scaling` (`type` or `rope_type`) or in
`rope_parameters`, there perhaps once per kind of layer. A setting that is not understood is an error that names it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.layer_pattern import LayerWindows
from mii_zmq.worker.models.spec import ArchSpec, PositionKind, RopeConfig

_KINDS = {
    "default": (frozenset[str](), frozenset[str]()),
    "linear": (frozenset({"factor"}), frozenset[str]()),
    "dynamic": (frozenset({"factor"}), frozenset[str]()),
    "llama3": (frozenset({"factor", "low_freq_factor", "high_freq_factor"}), frozenset[str]()),
    "yarn": (
        frozenset({"factor"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "longrope": (frozenset({"short_factor", "long_factor"}), frozenset({"attention_factor", "factor"})),
}
"""Kind -> (settings that it needs, settings that it may have)."""
ROPE_KINDS = tuple(_KINDS)
_ALIASES = {"su": "longrope"}
_ALWAYS = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor", "original_max_position_embeddings"})
_UNREAD = frozenset({"finetuned"})
"""Notes of whoever trained the checkpoint."""
_LAYER_KINDS = ("full_attention", "sliding_attention")


def read_ropes(spec: ArchSpec, values: dict[str, Any], windows: LayerWindows) -> tuple[RopeConfig | None, ...]:
    """Per layer; None where its heads are not rotated.

    Raises:
        CheckpointError: a setting is missing or malformed.
        ModelUnsupported: a kind or setting that is not implemented.
    """
    if spec.position is not PositionKind.ROPE:
        return (None,) * len(windows.is_local)
    settings = _object(values.get("rope_scaling"))
    theta, local_theta = values["rope_theta"], values.get("rope_local_theta")
    if settings.keys() & set(_LAYER_KINDS):
        if unknown := settings.keys() - set(_LAYER_KINDS):
            raise ModelUnsupported(f"config.json: {sorted(unknown)[0]} beside rope settings per kind of layer")
        full = _read(_object(settings.get("full_attention")), theta, values)
        local = _read(_object(settings.get("sliding_attention")), local_theta or theta, values)
    else:
        full = _read(settings, theta, values)
        local = full if local_theta is None else _read({}, local_theta, values)
    # With windows EXAONE 4 rotates in the windowed layers only.
    rotates_full = values.get("rotates_full_layers", True) or windows.window is None
    return tuple(local if is_local else full if rotates_full else None for is_local in windows.is_local)


def served_context(ropes: tuple[RopeConfig | None, ...], values: dict[str, Any]) -> int:
    """How long a sequence the config says the model is for, scaling included.

    `max_position_embeddings` holds it already for llama3 and longrope. Of a yarn or dynamic config it is usually the
    length before scaling; linear configs mean either, so they are scaled only as far as they say themselves.
    """
    context = int(values["max_position_embeddings"])
    for rope in ropes:
        if rope is not None and rope.kind in ("dynamic", "yarn"):
            context = max(context, int(rope.original_max_position_embeddings * rope.factor))
        elif rope is not None and rope.kind == "linear":
            context = max(context, int(_number(values.get("max_sequence_length") or context, "max_sequence_length")))
    return context


def _object(settings: Any) -> dict[str, Any]:
    settings = settings or {}
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"config.json has rope settings of type {type(settings).__name__}; they must be an object"
        )
    return settings


def _read(settings: dict[str, Any], default_theta: float, values: dict[str, Any]) -> RopeConfig:
    settings = {key: value for key, value in settings.items() if value is not None}
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    kind = _ALIASES.get(kind, kind)
    if kind not in _KINDS:
        raise ModelUnsupported(f"config.json has the rope_type {kind!r}; supported are {', '.join(_KINDS)}")
    needed, optional = _KINDS[kind]
    if missing := needed - settings.keys():
        raise CheckpointError(f"config.json: rope_type {kind!r} needs {sorted(missing)[0]}")
    if unknown := settings.keys() - needed - optional - _ALWAYS - _UNREAD:
        key = sorted(unknown)[0]
        raise ModelUnsupported(
            f"config.json: {key} = {str(settings[key])[:60]} in the rope settings is not supported for the rope_type "
            f"{kind!r}"
        )
    theta, rotary_dim = _number(settings.get("rope_theta", default_theta), "rope_theta"), _rotary_dim(settings, values)
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    context = int(values["max_position_embeddings"])
    # What stands at the top level (Phi-3) wins; dynamic scaling grows from max_position_embeddings in any case.
    original = values.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    original = context if kind == "dynamic" else int(_number(original or context, "original_max_position_embeddings"))
    if original < 2 or theta <= 1:
        raise CheckpointError(
            f"config.json scales its rotary embedding from {original} positions with the base {theta:g}; both must be "
            "larger than 1"
        )
    if kind == "longrope":
        return _longrope(settings, theta, rotary_dim, original, context)
    factor = _number(settings["factor"], "factor")
    rope = RopeConfig(theta, rotary_dim, kind, factor, original_max_position_embeddings=original)
    return _finish(rope, settings)


def _finish(rope: RopeConfig, settings: dict[str, Any]) -> RopeConfig:
    if rope.kind == "llama3":
        return replace(
            rope,
            low_freq_factor=_number(settings["low_freq_factor"], "low_freq_factor"),
            high_freq_factor=_number(settings["high_freq_factor"], "high_freq_factor"),
        )
    if rope.kind == "yarn":
        return replace(
            rope,
            beta_fast=_number(settings.get("beta_fast") or 32, "beta_fast"),
            beta_slow=_number(settings.get("beta_slow") or 1, "beta_slow"),
            truncate=bool(settings.get("truncate", True)),
            attention_factor=_yarn_attention_factor(settings, rope.factor),
        )
    return rope


def _yarn_attention_factor(settings: dict[str, Any], factor: float) -> float:
    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in settings:
        return _number(settings["attention_factor"], "attention_factor")
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and all_dim:
        return temperature(_number(mscale, "mscale")) / temperature(_number(all_dim, "mscale_all_dim"))
    return temperature(1.0)


def _longrope(settings: dict[str, Any], theta: float, rotary_dim: int, original: int, context: int) -> RopeConfig:
    factors = {}
    for key in ("short_factor", "long_factor"):
        value = settings[key]
        if not isinstance(value, list) or len(value) != rotary_dim // 2:
            raise CheckpointError(f"config.json: {key} must be a list of {rotary_dim // 2} numbers")
        factors[key] = tuple(_number(number, key) for number in value)
    factor = _number(settings.get("factor", context / original), "factor")
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        theta,
        rotary_dim,
        "longrope",
        factor,
        original_max_position_embeddings=original,
        attention_factor=_number(attention_factor, "attention_factor"),
        short_factors=factors["short_factor"],
        long_factors=factors["long_factor"],
    )


def _rotary_dim(settings: dict[str, Any], values: dict[str, Any]) -> int:
    head_dim = int(values["head_dim"])
    own = values.get("partial_rotary_factor")
    share = settings.get("partial_rotary_factor", 1.0 if own is None else own)
    if own is None and share != 1.0:
        raise ModelUnsupported(
            f"config.json: partial_rotary_factor = {share!r}; the published code of this family rotates whole heads"
        )
    width = values.get("rotary_dim") or int(head_dim * _number(share, "partial_rotary_factor"))
    if not isinstance(width, int) or not 0 < width <= head_dim or width % 2:
        raise ModelUnsupported(
            f"config.json has {width!r} rotated elements per head of {head_dim}; an even number is needed"
        )
    return width


def _number(value: Any, key: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json has {key} = {value!r} in its rope settings; it must be a positive number")
    return float(value)
