# SPDX-License-Identifier: Apache-2.0
"""Which layers of a checkpoint have a window, and which have experts. Plain numbers from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.spec import ArchSpec, MoeConfig, Role, WindowKind

PATTERN_KEYS = frozenset({"sliding_window_pattern", "_sliding_window_pattern"})
WINDOW_KEYS = {
    WindowKind.NONE: frozenset({"layer_types"}),
    WindowKind.ALL_LAYERS: frozenset({"sliding_window", "layer_types"}),
    WindowKind.BY_SWITCH: frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}),
    WindowKind.BY_TYPE: frozenset({"sliding_window", "layer_types"}) | PATTERN_KEYS,
}
DEFAULT_MAX_WINDOW_LAYERS = 28
"""What the published code of the Qwen families takes where config.json does not say."""
_FULL, _LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerWindows:
    """The window, if the model has one at all, and the layers that it holds in."""

    window: int | None
    is_local: tuple[bool, ...]

    def within(self, context: int) -> tuple[int | None, ...]:
        """Per layer; a window that holds the whole context is none."""
        window = self.window if self.window is not None and self.window < context else None
        return tuple(window if local else None for local in self.is_local)


def read_windows(raw: dict[str, Any], spec: ArchSpec, num_layers: int) -> LayerWindows:
    """Raises ModelUnsupported or CheckpointError: a pattern that the family does not have, or nonsense."""
    types = _layer_types(raw, num_layers)
    window = raw.get("sliding_window", spec.defaults.get("sliding_window"))
    is_off = spec.window is WindowKind.NONE or window is None
    if spec.window is WindowKind.BY_SWITCH and not raw.get("use_sliding_window", False):
        is_off = True
    if is_off:
        if types is not None and spec.window is WindowKind.NONE and _LOCAL in types:
            raise ModelUnsupported(f"config.json: layer_types with {_LOCAL} in the {spec.family} family")
        return LayerWindows(None, (False,) * num_layers)
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        raise CheckpointError(f"config.json has sliding_window = {window!r}; it must be a positive integer")
    if types is None:
        return LayerWindows(window, _pattern(raw, spec, num_layers))
    if spec.window is WindowKind.ALL_LAYERS and set(types) != {_LOCAL}:
        raise ModelUnsupported(f"config.json: layer_types other than {_LOCAL} in the {spec.family} family")
    return LayerWindows(window, tuple(kind == _LOCAL for kind in types))


def _layer_types(raw: dict[str, Any], num_layers: int) -> list[str] | None:
    types = raw.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers or not set(map(str, types)) <= {_FULL, _LOCAL}:
        raise ModelUnsupported(
            f"config.json: layer_types must name {_FULL} or {_LOCAL} for each of the {num_layers} layers"
        )
    return types


def _pattern(raw: dict[str, Any], spec: ArchSpec, num_layers: int) -> tuple[bool, ...]:
    if spec.window is WindowKind.ALL_LAYERS:
        return (True,) * num_layers
    if spec.window is WindowKind.BY_SWITCH:
        first = raw.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        if not isinstance(first, int):
            raise CheckpointError(f"config.json has max_window_layers = {first!r}; it must be an integer")
        return tuple(layer >= first for layer in range(num_layers))
    keys = [key for key in PATTERN_KEYS if raw.get(key) is not None]
    pattern = raw[keys[0]] if keys else spec.defaults["sliding_window_pattern"]
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        # EXAONE spells one period: L for local, G for global.
        return tuple(pattern[layer % len(pattern)] == "L" for layer in range(num_layers))
    if not isinstance(pattern, int) or pattern < 1:
        raise CheckpointError(f"config.json has {keys[0]} = {pattern!r}; it must be a positive integer")
    return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))


def read_experts(values: dict[str, Any], spec: ArchSpec, num_layers: int) -> MoeConfig | None:
    """From canonical `values`; None in a family without experts."""
    if not spec.has(Role.ROUTER):
        return None
    num_experts, top_k = values["num_experts"], values["top_k"]
    width = values.get("moe_intermediate_size") or values["intermediate_size"]
    step, dense = values.get("decoder_sparse_step") or 1, values.get("mlp_only_layers") or ()
    shared = values["shared_intermediate_size"] if spec.has(Role.SHARED_UP) else 0
    if not isinstance(dense, (list, tuple)):
        raise CheckpointError(f"config.json has mlp_only_layers = {dense!r}; it must be a list of layers")
    for name, value in (
        ("experts", num_experts),
        ("experts per token", top_k),
        ("channels per expert", width),
        ("layers from one with experts to the next", step),
        *([("channels of the shared expert", shared)] if spec.has(Role.SHARED_UP) else []),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"config.json gives {value!r} as the number of {name}; it must be a positive integer")
    if top_k > num_experts:
        raise CheckpointError(f"config.json routes each token to {top_k} of {num_experts} experts")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        renormalise=bool(values["norm_topk_prob"]),
        shared_intermediate_size=shared,
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )
