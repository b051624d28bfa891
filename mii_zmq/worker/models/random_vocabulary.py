# SPDX-License-Identifier: Apache-2.0
"""Random weights that say nothing but text: so that a random model can be served, and every token makes an event.

The vocabulary of a published shape has other ids than the tokenizer at hand, and many of a tokenizer's ids are special
or pieces of characters. No setting of the sampler keeps them away, since what is measured is the ordinary sampler over
the whole vocabulary: the weights do. One channel of the residual stream is made constant, no layer writes to it, and
the head reads from it a large negative number for every id that is not to be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mii_zmq.errors import ConfigError
from mii_zmq.tokenizer import TextTokenizer
from mii_zmq.worker.models.model_weights import Affine, DecoderWeights
from mii_zmq.worker.models.shard import Shard

CHANNEL = 0
CONSTANT = 0.125
"""What the channel holds: beside the others little, or all tokens would look alike. The last norm of the largest shape
leaves about a sixtieth of it."""
PENALTY = 32768.0
"""Times what is left: tens below zero at least, while the standard deviation of random logits is one or two."""


def readable_ids(tokenizer: TextTokenizer, vocab_size: int) -> list[int]:
    """The ids below `vocab_size` that are text by themselves: no special ones, no pieces of characters.

    Raises:
        ConfigError: there are none.
    """
    found = [
        token_id
        for token_id in range(min(tokenizer.vocab_size, vocab_size))
        if token_id not in tokenizer.all_special_ids and _is_text(tokenizer, token_id)
    ]
    if not found:
        raise ConfigError(f"the tokenizer has no token below {vocab_size} that is text by itself; use another one")
    return found


def _is_text(tokenizer: TextTokenizer, token_id: int) -> bool:
    if tokenizer.token_bytes is None:
        text = tokenizer.decode([token_id])
        return bool(text) and "�" not in text
    try:
        return bool(tokenizer.token_bytes(token_id).decode("utf-8"))
    except UnicodeDecodeError:
        return False


def keep_to(weights: DecoderWeights, shard: Shard, token_ids: Iterable[int]) -> None:
    """Change one rank's random weights in place so that no other ids are drawn, however the sampler is set.

    For decoders whose layers add to the residual stream behind nothing but their last projections (all `SHAPES`).
    Where the head is the embedding, tokens that are not drawn are not to be read either.
    """
    weights.embed[:, CHANNEL] = CONSTANT
    for layer in weights.layers:
        for matrix in (layer.out, layer.down):
            if matrix is not None:
                _silence(matrix)
        if layer.moe is not None:
            layer.moe.down[:, CHANNEL] = 0.0
            if layer.moe.shared_down is not None:
                layer.moe.shared_down[CHANNEL] = 0.0
    rows, first = (weights.embed, 0) if weights.head is None else (weights.head.weight, shard.vocab[0])
    is_kept = torch.zeros(first + len(rows), dtype=torch.bool, device=rows.device)
    ids = torch.tensor([token_id for token_id in token_ids if token_id < len(is_kept)], device=rows.device)
    is_kept[ids.long()] = True
    rows[~is_kept[first:], CHANNEL] = -PENALTY


def _silence(matrix: Affine) -> None:
    matrix.weight[CHANNEL] = 0.0
    if matrix.bias is not None:
        matrix.bias[CHANNEL] = 0.0
