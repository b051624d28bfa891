# SPDX-License-Identifier: Apache-2.0
"""Finds out by running a loaded transformers model what its attention layers are, and refuses what cannot be paged.

One forward pass of a few tokens records each layer's call: heads, scale, soft-cap and the window that the model's own
mask gives it. Whatever the calls do not show (biases on the scores, state between tokens outside of attention,
positions that are ignored) is left to the comparison in `fallback`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mii_zmq.errors import ModelUnsupported

if TYPE_CHECKING:
    from mii_zmq.worker.models.fallback_attention import AttentionCall

NUM_PROBE_TOKENS = 5
MAX_HORIZON = 2**20
"""Positions up to which masks are looked at; a longer window counts as none."""


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer asks for in every call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    """0: none."""
    window: int | None
    """Keys that a query sees, itself included; None: all before it."""


class UnusualMask(Exception):
    """A mask that is neither causal nor a causal window."""


@dataclass
class Probe:
    """A `Step` that computes attention plainly for one sequence and records every layer, in the order of the calls."""

    family: str
    max_position_embeddings: int
    layers: dict[nn.Module, LayerShape] = field(default_factory=dict)
    _masks: list[tuple[Tensor, int | UnusualMask | None]] = field(default_factory=list)

    def mask(self, visible: Callable[..., Any], num_tokens: int, like: dict[str, Any]) -> Tensor:
        window: int | UnusualMask | None
        tokens = torch.arange(num_tokens)
        sees = tokens[:, None] >= tokens
        try:
            window = find_window(visible, min(self.max_position_embeddings, MAX_HORIZON))
            if window is not None:
                sees &= tokens[:, None] - tokens < window
        except UnusualMask as error:
            window = error
        mask = torch.zeros(1, 1, num_tokens, num_tokens, **like)
        mask.masked_fill_(~sees.to(mask.device), torch.finfo(mask.dtype).min)
        self._masks.append((mask, window))
        return mask

    def attend(self, call: AttentionCall) -> Tensor:
        module, query, key, value = call.module, call.query, call.key, call.value
        num_heads, num_tokens, head_dim = query.shape[1:]
        if module in self.layers:
            raise self._unsupported("calls attention twice in one layer")
        if key.shape[2] != num_tokens or value.shape[2] != num_tokens:
            raise self._unsupported(f"attends to {key.shape[2]} keys for {num_tokens} tokens (cross attention)")
        if value.shape[-1] != key.shape[-1] or key.shape[-1] != head_dim:
            raise self._unsupported(f"has keys of {key.shape[-1]} and values of {value.shape[-1]} elements per head")
        if any(call.options.get(name) is not None for name in ("s_aux", "sinks")):
            raise self._unsupported("has attention sinks")
        if getattr(module, "is_causal", True) is False:
            raise self._unsupported("has layers that look ahead (bidirectional attention)")
        scale = head_dim**-0.5 if call.scale is None else call.scale
        softcap = call.options.get("softcap") or 0.0
        if not isinstance(scale, int | float) or not isinstance(softcap, int | float):
            raise self._unsupported("computes the scale of its scores for each token")
        if call.mask is None:
            raise self._unsupported("attends without a causal mask")
        window = self._window(call.mask)
        layer = LayerShape(num_heads, key.shape[1], head_dim, float(scale), float(softcap), window)
        self._check_like_others(layer)
        self.layers[module] = layer
        group = num_heads // layer.num_kv_heads
        scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        shares = torch.softmax((scores + call.mask).float(), -1).to(value.dtype)
        return (shares @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous()

    def _window(self, mask: Tensor) -> int | None:
        for known, window in self._masks:
            if known.data_ptr() == mask.data_ptr() and known.shape == mask.shape:
                if isinstance(window, UnusualMask):
                    raise self._unsupported(f"has a mask that {window}")
                return window
        raise self._unsupported("builds its own attention masks")

    def _check_like_others(self, layer: LayerShape) -> None:
        if layer.num_heads % layer.num_kv_heads:
            raise self._unsupported(f"shares {layer.num_kv_heads} key/value heads among {layer.num_heads} heads")
        for other in list(self.layers.values())[:1]:
            shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
            if shape != (other.num_heads, other.num_kv_heads, other.head_dim):
                raise self._unsupported(
                    f"has layers of different shapes ({other.num_heads} heads, {other.num_kv_heads} key/value heads of "
                    f"{other.head_dim}, and {layer.num_heads}, {layer.num_kv_heads} of {layer.head_dim})"
                )

    def _unsupported(self, what: str) -> ModelUnsupported:
        return ModelUnsupported(f"the {self.family} model {what}, which paged attention cannot do")


def find_window(visible: Callable[..., Any], horizon: int) -> int | None:
    """The causal window of a mask function, found by asking it about some queries and every key up to `horizon`.

    Raises:
        UnusualMask: it is something else.
    """
    keys, first = torch.arange(horizon + 1), torch.tensor(0)
    window: int | None = None
    for query in (horizon - 1, horizon - 2, horizon // 2, horizon // 3, 0):
        if query < 0:
            continue
        try:
            sees = torch.as_tensor(visible(first, first, torch.tensor(query), keys)).expand(keys.shape)
        except (IndexError, RuntimeError):
            raise UnusualMask("depends on more than positions") from None
        count = int(sees.sum())
        if bool(sees[query + 1 :].any()):
            raise UnusualMask("looks ahead")
        if count == 0 or not bool(sees[query + 1 - count : query + 1].all()):
            raise UnusualMask("has gaps")
        if query == horizon - 1:
            window = None if count == horizon else count
        if count != min(query + 1, horizon if window is None else window):
            raise UnusualMask("depends on absolute positions")
    return window
