# SPDX-License-Identifier: Apache-2.0
"""One rank's weights in memory, fused as the decoders use them. Knows no names and no files.

Rotary heads are stored so that the two elements of a pair are adjacent (scores do not change when q and k are permuted
alike). A norm's scale is float32 where the family adds an offset to it: rounded to 16 bits the sum would lose what the
offset hides. A part that the family does not have is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor


@dataclass
class Affine:
    """A matrix [out, in] or a norm's scale [width], and its bias [out]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass
class MoeWeights:
    """The experts that this rank holds; routing is over all of them on every rank."""

    router: Tensor
    """[experts, hidden]."""
    up: Tensor
    """[held experts, 2 * width, hidden]: gate over up."""
    down: Tensor
    """[held experts, hidden, width]."""
    first_expert: int
    shared_up: Tensor | None = None
    """[2 * shared width, hidden], this rank's channels of gate over up."""
    shared_down: Tensor | None = None
    """[hidden, shared width]."""
    shared_switch: Tensor | None = None
    """[1, hidden]."""


@dataclass
class LayerWeights:
    qkv: Affine
    """[(Hq + 2 Hk) * D, hidden]: q heads, k heads, v heads."""
    out: Affine
    attn_norm: Affine | None = None
    attn_post_norm: Affine | None = None
    mlp_norm: Affine | None = None
    mlp_post_norm: Affine | None = None
    up: Affine | None = None
    """Gate over up, where the MLP is gated; None in a layer of experts, like `down`."""
    down: Affine | None = None
    moe: MoeWeights | None = None
    qk_norm: Tensor | None = None
    """[Hq + Hk, D]: the scale of each q and k head."""


@dataclass
class DecoderWeights:
    embed: Tensor
    """[vocab, hidden or embedding width], whole on every rank."""
    layers: list[LayerWeights]
    final_norm: Affine | None = None
    head: Affine | None = None
    """[this rank's rows of the vocabulary, hidden or embedding width]; None: tied, and the whole of `embed`."""
    positions: Tensor | None = None
    embed_norm: Affine | None = None
    project_in: Tensor | None = None
    project_out: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self))


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for entry in fields(part):
            yield from _tensors(getattr(part, entry.name))
