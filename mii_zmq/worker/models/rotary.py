# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies of every kind of scaling, as functions of the config and, for two kinds, of a sequence's length.

Knows nothing of devices' kernels or of who decides a sequence's length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mii_zmq.worker.models.spec import RopeConfig


def inverse_frequencies(rope: RopeConfig, length: int | None = None) -> Tensor:
    """[rotary_dim / 2] float32: angle per position of each pair; `length` decides where `rope.border` is given."""
    if rope.kind == "dynamic":
        return length_frequencies(
            rope, torch.tensor([rope.original_max_position_embeddings if length is None else length])
        )[0]
    frequencies = _plain(rope)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    if rope.kind == "longrope":
        is_long = length is not None and length > rope.original_max_position_embeddings
        return frequencies / torch.tensor(rope.long_factors if is_long else rope.short_factors)
    return frequencies


def length_frequencies(rope: RopeConfig, lengths: Tensor) -> Tensor:
    """[T] lengths of the tokens' sequences -> [T, rotary_dim / 2], for the kinds with a border."""
    border = rope.original_max_position_embeddings
    if rope.kind == "longrope":
        short, long = inverse_frequencies(rope), inverse_frequencies(rope, border + 1)
        is_long = (lengths > border).unsqueeze(1)
        return torch.where(is_long, long.to(lengths.device), short.to(lengths.device))
    # The base grows with the length, so that the longest wave always covers the sequence ("NTK-aware" scaling).
    ratio = lengths.clamp(min=border).float() / border
    dim = rope.rotary_dim
    bases = rope.theta * (rope.factor * ratio - (rope.factor - 1)) ** (dim / (dim - 2))
    return 1.0 / bases.unsqueeze(1) ** _exponents(rope).to(lengths.device)


def _exponents(rope: RopeConfig) -> Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim


def _plain(rope: RopeConfig) -> Tensor:
    return 1.0 / rope.theta ** _exponents(rope)


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Pairs that turn often are kept, those that turn rarely slowed, a linear ramp between (Peng et al. 2023)."""

    def pair_of(turns: float) -> float:
        """Index of the pair that turns so often over the original context."""
        wave = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)
