# SPDX-License-Identifier: Apache-2.0
"""Ragged paged attention with plain torch ops: prompt chunks and decodes of one step in one call.

Per step, `plan` turns the layout into index and mask tensors that all layers share; per layer, the call gathers whole
tiles of the pool into one scratch buffer (no repeat of K/V for grouped heads) and runs batched products over them.
One-token rows are computed together in groups of similar length, so that padding stays bounded; prompt chunks run one
by one, in pieces of queries, so that keys behind a piece are never multiplied. A prompt that starts in this step reads
its keys from the projection, not from the pool.

Cells of a gathered block behind the sequence's end are masked, not skipped: whoever starts a block must zero it, since
0 * NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mii_zmq.kernels.layout import AttentionShape, KvLayer, RaggedLayout

PIECE = 128
"""Queries per product of a prompt chunk: small enough to skip most of the causal triangle, large enough to be fast."""
GROUP_BYTES = 32 * 2**20
"""Most bytes of K and V that one decode group gathers."""
WASTE_BYTES = 256 * 2**10
WASTE_SHARE = 0.2
"""A decode group may gather this much padding: WASTE_BYTES, or WASTE_SHARE of what it needs, whichever is more."""


@dataclass(frozen=True)
class DecodeGroup:
    """Consecutive one-token rows that are computed together, padded to the longest."""

    token_begin: int
    token_end: int
    tile_ids: Tensor
    """[2 * R * Hk * blocks]: k or v, row, kv head, block."""
    gathered: Tensor
    """[2 * R * Hk * blocks, block_size * D]: where each layer gathers its tiles."""
    keys: Tensor
    """[R * Hk, keys, D], as is `values`: views of what was gathered (a lone row is cut exactly, so needs no mask)."""
    values: Tensor
    target: Tensor
    """[R * Hk, Hq / Hk, D]: this group's part of the output."""
    bias: Tensor | None
    """[R * Hk, 1 or Hq / Hk, keys]: -inf where a row has no key, else 0 or ALiBi's bias."""


@dataclass(frozen=True)
class ChunkPiece:
    """Some consecutive queries of a prompt chunk and the keys that they may see."""

    token_begin: int
    token_end: int
    key_begin: int
    key_end: int
    bias: Tensor | None
    """[queries, keys], with ALiBi [Hq, queries, keys]; None: plain causal square."""


@dataclass(frozen=True)
class PromptChunk:
    token_begin: int
    token_end: int
    tile_ids: Tensor | None
    """[2 * Hk * blocks]: k or v, kv head, block. None: keys and values are those of this step's tokens."""
    gathered: Tensor | None
    """[2 * Hk * blocks, block_size * D]: where each layer gathers its tiles."""
    pieces: tuple[ChunkPiece, ...]


@dataclass(frozen=True)
class AttentionPlan:
    """What every layer with the same window does in one step.

    Buffers and views are made once here and reused by all layers: with few tokens, a layer's time is the number of
    torch calls that it makes.
    """

    out: Tensor
    """[T, Hq, D]; each layer overwrites it."""
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PromptChunk, ...]


class TorchAttention:
    """Owns the scratch buffer; one instance per model, used by one thread."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._scratch = torch.empty(0, dtype=shape.dtype, device=shape.device)
        self._no_bias = torch.zeros(1, 1, 1, dtype=shape.dtype, device=shape.device)
        self._group_size = shape.num_heads // shape.num_kv_heads
        self._needs_bias = bool(shape.softcap) or shape.alibi_slopes is not None
        """Whether the plain causal square does not do."""

    def plan(self, layout: RaggedLayout, window: int | None) -> AttentionPlan:
        """Index and mask tensors for layers with this window (keys a query sees, itself included; None: all)."""
        lengths = layout.seq_lens
        counts = np.diff(layout.query_start_loc)
        single = counts == 1
        last_blocks = (lengths - 1) // layout.block_size
        if window is None:
            first_blocks = np.zeros_like(last_blocks)
        else:
            first_blocks = np.maximum(lengths - counts + 1 - window, 0) // layout.block_size
        shape = self._shape
        out = torch.empty(layout.num_tokens, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
        groups = [
            self._plan_group(layout, window, begin, end, first_blocks, last_blocks, out)
            for begin, end in self._group_rows(single, last_blocks - first_blocks + 1, layout.block_size)
        ]
        chunks = [
            self._plan_chunk(layout, window, row, int(first_blocks[row]), int(last_blocks[row]))
            for row in np.flatnonzero(~single).tolist()
        ]
        return AttentionPlan(out, tuple(groups), tuple(chunks))

    def __call__(self, qkv: Tensor, layer: KvLayer, plan: AttentionPlan) -> Tensor:
        """qkv [T, Hq + 2 Hk, D], rotated and already written to the pool -> [T, Hq * D], valid until the next call."""
        for group in plan.groups:
            self._decode(qkv, layer, group)
        for chunk in plan.chunks:
            self._prompt(qkv, layer, chunk, plan.out)
        return plan.out.view(qkv.shape[0], -1)

    def _decode(self, qkv: Tensor, layer: KvLayer, group: DecodeGroup) -> None:
        torch.index_select(layer.tiles, 0, group.tile_ids, out=group.gathered)
        # The heads that share a kv head are the query rows of one product, so K and V are read once.
        queries = qkv[group.token_begin : group.token_end, : self._shape.num_heads].reshape(group.target.shape)
        if self._shape.softcap:
            group.target.copy_(self._attend_capped(queries, group.keys, group.values, group.bias))
            return
        if qkv.dtype is torch.float32:
            beta = 0 if group.bias is None else 1
            bias = self._no_bias if group.bias is None else group.bias
            scores = torch.baddbmm(bias, queries, group.keys.transpose(1, 2), beta=beta, alpha=self._shape.scale)
            torch.bmm(torch.softmax(scores, -1), group.values, out=group.target)
            return
        mask = None if group.bias is None else group.bias.expand(-1, self._group_size, -1).unsqueeze(1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries.unsqueeze(1),
            group.keys.unsqueeze(1),
            group.values.unsqueeze(1),
            attn_mask=mask,
            scale=self._shape.scale,
        )
        group.target.copy_(attended.squeeze(1))

    def _prompt(self, qkv: Tensor, layer: KvLayer, chunk: PromptChunk, out: Tensor) -> None:
        shape = self._shape
        tokens = qkv[chunk.token_begin : chunk.token_end].transpose(0, 1)
        if chunk.tile_ids is None or chunk.gathered is None:
            keys = tokens[shape.num_heads : shape.num_heads + shape.num_kv_heads]
            values = tokens[shape.num_heads + shape.num_kv_heads :]
        else:
            torch.index_select(layer.tiles, 0, chunk.tile_ids, out=chunk.gathered)
            keys, values = chunk.gathered.view(2, shape.num_kv_heads, -1, shape.head_dim)
        for piece in chunk.pieces:
            if shape.softcap:
                self._prompt_capped(qkv, keys, values, piece, out)
                continue
            attended = torch.nn.functional.scaled_dot_product_attention(
                qkv[piece.token_begin : piece.token_end, : shape.num_heads].transpose(0, 1).unsqueeze(0),
                keys[:, piece.key_begin : piece.key_end].unsqueeze(0),
                values[:, piece.key_begin : piece.key_end].unsqueeze(0),
                attn_mask=piece.bias,
                is_causal=piece.bias is None,
                scale=shape.scale,
                enable_gqa=True,
            )
            out[piece.token_begin : piece.token_end].copy_(attended.squeeze(0).transpose(0, 1))

    def _prompt_capped(self, qkv: Tensor, keys: Tensor, values: Tensor, piece: ChunkPiece, out: Tensor) -> None:
        shape = self._shape
        queries = qkv[piece.token_begin : piece.token_end, : shape.num_heads].transpose(0, 1)
        num_queries = queries.shape[1]
        bias = piece.bias
        if bias is not None:
            # [1 or Hq, queries, keys] in the order of the grouped queries: kv head, head of the group, query.
            wanted = bias.expand(shape.num_heads, -1, -1)
            bias = wanted.reshape(shape.num_kv_heads, self._group_size * num_queries, -1)
        attended = self._attend_capped(
            queries.reshape(shape.num_kv_heads, self._group_size * num_queries, shape.head_dim),
            keys[:, piece.key_begin : piece.key_end],
            values[:, piece.key_begin : piece.key_end],
            bias,
        )
        out[piece.token_begin : piece.token_end] = attended.view(queries.shape).transpose(0, 1)

    def _attend_capped(self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """[B, queries, D], [B, keys, D] twice, [B, 1 or queries, keys] -> [B, queries, D], with soft-capped scores."""
        cap = self._shape.softcap
        scores = torch.bmm(queries, keys.transpose(1, 2)).float()
        scores = scores.mul_(self._shape.scale / cap).tanh_().mul_(cap)
        if bias is not None:
            scores.add_(bias)
        return torch.bmm(torch.softmax(scores, -1).to(values.dtype), values)

    def _gather_buffer(self, tile_ids: Tensor, block_size: int) -> Tensor:
        """Room for these tiles; all groups and chunks use the same memory, one after the other."""
        width = block_size * self._shape.head_dim
        needed = tile_ids.numel() * width
        if self._scratch.numel() < needed:
            self._scratch = self._scratch.new_empty(needed)
        return self._scratch[:needed].view(-1, width)

    def _group_rows(self, single: np.ndarray, num_blocks: np.ndarray, block_size: int) -> list[tuple[int, int]]:
        """Cut each run of one-token rows where padding to the longest row would cost too much."""
        shape = self._shape
        block_bytes = 2 * shape.num_kv_heads * block_size * shape.head_dim * shape.dtype.itemsize
        bounds: list[tuple[int, int]] = []
        begin, longest, used = 0, 0, 0
        needed_blocks = num_blocks.tolist()
        for row in np.flatnonzero(single).tolist():
            needed = needed_blocks[row]
            padded = max(longest, needed) * (row - begin + 1)
            waste = (padded - used - needed) * block_bytes
            fits = waste <= max(WASTE_BYTES, WASTE_SHARE * (used + needed) * block_bytes)
            if bounds and bounds[-1][1] == row and fits and padded * block_bytes <= GROUP_BYTES:
                bounds[-1] = (begin, row + 1)
                longest, used = max(longest, needed), used + needed
            else:
                bounds.append((row, row + 1))
                begin, longest, used = row, needed, needed
        return bounds

    def _plan_group(
        self,
        layout: RaggedLayout,
        window: int | None,
        begin: int,
        end: int,
        first_blocks: np.ndarray,
        last_blocks: np.ndarray,
        out: Tensor,
    ) -> DecodeGroup:
        shape, block_size, rows = self._shape, layout.block_size, end - begin
        first, last = first_blocks[begin:end, None], last_blocks[begin:end, None]
        num_blocks = int((last - first).max()) + 1
        columns = first + np.arange(num_blocks)
        block_ids = np.take_along_axis(layout.block_tables[begin:end], np.minimum(columns, last), axis=1)
        num_keys = num_blocks * block_size
        lengths = layout.seq_lens[begin:end, None]
        token_begin = int(layout.query_start_loc[begin])
        key_begin, key_end = 0, num_keys
        if rows == 1:
            key_end = int(lengths[0, 0]) - int(first_blocks[begin]) * block_size
            key_begin = 0 if window is None else max(0, key_end - window)
        positions = first * block_size + np.arange(key_begin, key_end)
        visible = positions < lengths
        if window is not None:
            visible &= positions >= lengths - window
        bias = self._decode_bias(visible, positions + 1 - lengths)
        tile_ids = self._tile_ids(block_ids)
        gathered = self._gather_buffer(tile_ids, block_size)
        keys, values = gathered.view(2, rows * shape.num_kv_heads, num_keys, shape.head_dim)[:, :, key_begin:key_end]
        target = out[token_begin : token_begin + rows].view(-1, self._group_size, shape.head_dim)
        return DecodeGroup(token_begin, token_begin + rows, tile_ids, gathered, keys, values, target, bias)

    def _plan_chunk(
        self, layout: RaggedLayout, window: int | None, row: int, first_block: int, last_block: int
    ) -> PromptChunk:
        begin, end = layout.query_start_loc[row : row + 2].tolist()
        length = int(layout.seq_lens[row])
        start = length - (end - begin)
        tile_ids, gathered, base = None, None, 0
        if start > 0:
            tile_ids = self._tile_ids(layout.block_tables[row : row + 1, first_block : last_block + 1])
            gathered = self._gather_buffer(tile_ids, layout.block_size)
            base = first_block * layout.block_size
        pieces = []
        for piece_begin in range(begin, end, PIECE):
            piece_end = min(piece_begin + PIECE, end)
            positions = np.arange(start + piece_begin - begin, start + piece_end - begin)
            key_begin = base if window is None else max(base, int(positions[0]) + 1 - window)
            key_end = int(positions[-1]) + 1
            bias = None
            is_square = key_begin == 0 and len(positions) == key_end and (window is None or window >= key_end)
            if not is_square or self._needs_bias:
                key_positions = np.arange(key_begin, key_end)
                visible = key_positions <= positions[:, None]
                if window is not None:
                    visible &= key_positions > positions[:, None] - window
                bias = self._chunk_bias(visible, key_positions - positions[:, None])
            pieces.append(ChunkPiece(piece_begin, piece_end, key_begin - base, key_end - base, bias))
        return PromptChunk(begin, end, tile_ids, gathered, tuple(pieces))

    def _tile_ids(self, block_ids: np.ndarray) -> Tensor:
        """[R, blocks] -> flat tile numbers in the order k or v, row, kv head, block."""
        shape = self._shape
        planes = np.arange(2 * shape.num_kv_heads, dtype=np.int64).reshape(2, 1, shape.num_kv_heads, 1)
        tiles = block_ids.astype(np.int64)[None, :, None, :] * shape.tiles_per_block + planes
        return torch.from_numpy(tiles.reshape(-1)).to(shape.device)

    def _decode_bias(self, visible: np.ndarray, distances: np.ndarray) -> Tensor | None:
        """[R, keys] twice -> [R * Hk, 1 or Hq / Hk, keys]; None where nothing is hidden."""
        slopes = self._shape.alibi_slopes
        if slopes is None:
            if visible.all():
                return None
            return self._bias(visible).repeat_interleave(self._shape.num_kv_heads, 0).unsqueeze(1)
        bias = self._bias(visible).unsqueeze(1) + slopes.view(-1, 1) * self._distances(distances).unsqueeze(1)
        return bias.to(self._shape.dtype).view(-1, self._group_size, visible.shape[1])

    def _chunk_bias(self, visible: np.ndarray, distances: np.ndarray) -> Tensor:
        """[queries, keys] twice -> [queries, keys], with ALiBi [Hq, queries, keys]."""
        slopes = self._shape.alibi_slopes
        if slopes is None:
            return self._bias(visible)
        return (self._bias(visible) + slopes.view(-1, 1, 1) * self._distances(distances)).to(self._shape.dtype)

    def _distances(self, distances: np.ndarray) -> Tensor:
        return torch.from_numpy(distances).to(self._shape.device, torch.float32)

    def _bias(self, visible: np.ndarray) -> Tensor:
        mask = torch.from_numpy(visible).to(self._shape.device)
        bias = torch.zeros(visible.shape, dtype=self._shape.dtype, device=self._shape.device)
        return bias.masked_fill_(~mask, float("-inf"))
