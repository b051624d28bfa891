# SPDX-License-Identifier: Apache-2.0
"""Random weights of which no part could be left out unseen, and one rank's part of them, without files."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from mii_zmq.worker.models.model_weights import Affine, DecoderWeights, LayerWeights, MoeWeights
from mii_zmq.worker.models.random_weights import random_weights
from mii_zmq.worker.models.shard import Shard, Span
from mii_zmq.worker.models.spec import MlpKind, ModelConfig


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for entry in fields(part):
            yield from _tensors(getattr(part, entry.name))


def make_weights(config: ModelConfig) -> DecoderWeights:
    """Norms are not one, biases not zero, and all products are about as large as their input."""
    weights = random_weights(config, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    for tensor in _tensors(weights):
        noise = torch.randn(tensor.shape, generator=generator)
        is_ones = tensor.dim() == 1 and bool((tensor == 1).all())
        tensor.copy_(1 + 0.3 * noise if is_ones else 0.2 * noise)
    weights.embed.mul_(3.0)
    for layer in weights.layers:
        if layer.qk_norm is not None:
            # Of the heads of a kind, all have the same.
            heads = config.num_heads
            layer.qk_norm[:heads], layer.qk_norm[heads:] = layer.qk_norm[0].clone(), layer.qk_norm[heads].clone()
    return weights


def shard_weights(whole: DecoderWeights, config: ModelConfig, shard: Shard) -> DecoderWeights:
    """What the loader would give this rank."""
    part = copy.copy(whole)
    part.layers = [_shard_layer(layer, config, shard) for layer in whole.layers]
    head = whole.head or Affine(whole.embed)
    part.head = _rows(head, [shard.vocab])
    return part


def _shard_layer(layer: LayerWeights, config: ModelConfig, shard: Shard) -> LayerWeights:
    size, num_heads, num_kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    heads = [
        shard.heads,
        *((offset + shard.kv_heads[0], offset + shard.kv_heads[1]) for offset in (num_heads, num_heads + num_kv_heads)),
    ]
    elements = [(start * size, stop * size) for start, stop in heads]
    part = copy.copy(layer)
    part.qkv = _rows(layer.qkv, elements)
    part.out = _columns(layer.out, elements[0], shard)
    if layer.qk_norm is not None:
        part.qk_norm = torch.cat([layer.qk_norm[slice(*span)] for span in heads[:2]])
    if layer.up is not None and layer.down is not None:
        parts = 2 if config.spec.mlp is MlpKind.GATED else 1
        part.up = _rows(layer.up, _channels(shard.channels, config.intermediate_size, parts))
        part.down = _columns(layer.down, shard.channels, shard)
    if layer.moe is not None and config.moe is not None:
        part.moe = _shard_experts(layer.moe, config.moe.shared_intermediate_size, shard)
    return part


def _shard_experts(whole: MoeWeights, shared_width: int, shard: Shard) -> MoeWeights:
    part = copy.copy(whole)
    held = slice(*shard.experts)
    part.up, part.down, part.first_expert = whole.up[held], whole.down[held], shard.experts[0]
    if whole.shared_up is not None and whole.shared_down is not None:
        part.shared_up = _rows(Affine(whole.shared_up), _channels(shard.shared_channels, shared_width, 2)).weight
        part.shared_down = _columns(Affine(whole.shared_down), shard.shared_channels, shard).weight
    return part


def _channels(span: Span, width: int, parts: int) -> list[Span]:
    return [(index * width + span[0], index * width + span[1]) for index in range(parts)]


def _rows(affine: Affine, spans: list[Span]) -> Affine:
    def pick(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[slice(*span)] for span in spans])

    return Affine(pick(affine.weight), None if affine.bias is None else pick(affine.bias))


def _columns(affine: Affine, span: Span, shard: Shard) -> Affine:
    return Affine(affine.weight[:, slice(*span)].contiguous(), affine.bias if shard.rank.rank == 0 else None)
