# SPDX-License-Identifier: Apache-2.0
"""All tensors that a checkpoint of a model may hold, and where in one rank's weights they belong.

`ClaimTable` allocates the weights (on the meta device that costs nothing) and lists a `Claim` for every name; it knows
names and shapes, but no files. Every needed name is filled by exactly one claim, also where another rank holds the
values: a checkpoint is complete or it is not, whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from mii_zmq.worker.models.claims import Claim, Part, head_boxes
from mii_zmq.worker.models.expert_claims import claim_experts
from mii_zmq.worker.models.model_weights import Affine, DecoderWeights, LayerWeights
from mii_zmq.worker.models.shard import Shard, Span
from mii_zmq.worker.models.spec import MlpKind, ModelConfig, Role

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
Piece = tuple[int, Span, int]
"""(row of the fused matrix to begin at, rows of the stored one, rotary dimension)."""


class ClaimTable:
    """Allocates one rank's weights; `claims` says for every tensor name which boxes of it belong where."""

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, allocate: Allocate) -> None:
        self.config = config
        self.shard = shard
        self.claims: dict[str, Claim] = {}
        """By name without the prefix."""
        self._dtype = dtype
        self._allocate = allocate
        self.weights = self._decoder()

    def needed(self) -> set[str]:
        """The names that a complete checkpoint provides."""
        return {name for claim in self.claims.values() for name in claim.fills}

    def find_prefix(self, names: Iterable[str]) -> str | None:
        """The first prefix alternative that makes one of `names` ours; None if none does."""
        own = [name for name in names if not self.is_head(name)]
        for prefix in self.config.spec.prefixes:
            if any(name.startswith(prefix) and name.removeprefix(prefix) in self.claims for name in own):
                return prefix
        return None

    def is_head(self, name: str) -> bool:
        """Whether `name` is the head's, which has no prefix."""
        head = self.config.spec.names[Role.HEAD]
        return name in (f"{head}.weight", f"{head}.bias")

    def empty(self, *shape: int) -> Tensor:
        return self._allocate(shape, self._dtype)

    def whole(self, name: str, *shape: int, is_vocabulary: bool = False) -> Tensor:
        """A tensor that every rank holds as it is stored."""
        tensor = self.empty(*shape)
        self.claims[name] = Claim(shape, (Part(tensor, (slice(None),)),), (name,), is_vocabulary)
        return tensor

    def rows(self, name: str, shape: tuple[int, int], pieces: list[Piece], into: Affine, is_transposed: bool) -> None:
        """Rows of a stored matrix [out, in] and of its bias, into a fused one."""
        weight, bias = [], []
        for target, (start, stop), rotary_dim in pieces:
            place = slice(target, target + stop - start)
            head_dim = self.config.head_dim if rotary_dim else 0
            span = slice(start, stop)
            index = (slice(None), span) if is_transposed else (span,)
            weight.append(Part(into.weight[place], index, is_transposed, head_dim, rotary_dim))
            if into.bias is not None:
                bias.append(Part(into.bias[place], (span,), False, head_dim, rotary_dim))
        key = f"{name}.weight"
        self.claims[key] = Claim(shape[::-1] if is_transposed else shape, tuple(weight), (key,))
        if into.bias is not None:
            self.claims[f"{name}.bias"] = Claim(shape[:1], tuple(bias), (f"{name}.bias",))

    def columns(self, name: str, shape: tuple[int, int], span: Span, has_bias: bool, is_transposed: bool) -> Affine:
        """A matrix [out, in] of which each rank holds some columns.

        The ranks' partial products are summed, so only the first adds the bias.
        """
        out = shape[0]
        matrix = Affine(self.empty(out, span[1] - span[0]))
        index = (slice(*span),) if is_transposed else (slice(None), slice(*span))
        key = f"{name}.weight"
        part = Part(matrix.weight, index, is_transposed)
        self.claims[key] = Claim(shape[::-1] if is_transposed else shape, (part,), (key,))
        if has_bias:
            key = f"{name}.bias"
            matrix.bias = self.empty(out) if self.shard.rank.rank == 0 else None
            parts = () if matrix.bias is None else (Part(matrix.bias, (slice(None),)),)
            self.claims[key] = Claim((out,), parts, (key,))
        return matrix

    def _decoder(self) -> DecoderWeights:
        config, spec = self.config, self.config.spec
        width = config.embed_dim or config.hidden_size
        embed = self.whole(f"{spec.names[Role.EMBED]}.weight", config.vocab_size, width, is_vocabulary=True)
        weights = DecoderWeights(
            embed=embed,
            layers=[self._layer(layer) for layer in range(config.num_layers)],
            final_norm=self._norm(spec.names, Role.FINAL_NORM),
            head=self._head(embed),
            embed_norm=self._norm(spec.names, Role.EMBED_NORM),
        )
        if spec.has(Role.POSITIONS):
            rows = config.max_position_embeddings + spec.position_offset
            weights.positions = self.whole(f"{spec.names[Role.POSITIONS]}.weight", rows, config.hidden_size)
        if spec.has(Role.PROJECT_IN):
            weights.project_in = self.whole(f"{spec.names[Role.PROJECT_IN]}.weight", config.hidden_size, width)
        if spec.has(Role.PROJECT_OUT):
            weights.project_out = self.whole(f"{spec.names[Role.PROJECT_OUT]}.weight", width, config.hidden_size)
        return weights

    def _head(self, embed: Tensor) -> Affine | None:
        config, (start, stop) = self.config, self.shard.vocab
        if config.tie_word_embeddings and not config.spec.head_bias:
            return None
        name = config.spec.names[Role.HEAD]
        head = Affine(embed[start:stop], self.empty(stop - start) if config.spec.head_bias else None)
        if not config.tie_word_embeddings:
            head.weight = self.empty(stop - start, embed.shape[1])
            part = Part(head.weight, (slice(start, stop),))
            self.claims[f"{name}.weight"] = Claim(tuple(embed.shape), (part,), (f"{name}.weight",), True)
        if head.bias is not None:
            part = Part(head.bias, (slice(start, stop),))
            self.claims[f"{name}.bias"] = Claim((config.vocab_size,), (part,), (f"{name}.bias",), True)
        return head

    def _layer(self, layer: int) -> LayerWeights:
        config, spec, shard = self.config, self.config.spec, self.shard
        names = {role: name.replace("{i}", str(layer)) for role, name in spec.names.items()}
        inner = config.num_heads * config.head_dim
        span = (shard.heads[0] * config.head_dim, shard.heads[1] * config.head_dim)
        weights = LayerWeights(
            qkv=self._qkv(names, layer),
            out=self.columns(names[Role.O], (config.hidden_size, inner), span, config.out_bias, spec.is_transposed),
            attn_norm=self._norm(names, Role.ATTN_NORM),
            attn_post_norm=self._norm(names, Role.ATTN_POST_NORM),
            mlp_norm=self._norm(names, Role.MLP_NORM),
            mlp_post_norm=self._norm(names, Role.MLP_POST_NORM),
        )
        if spec.has(Role.Q_NORM):
            weights.qk_norm = self._qk_norm(names, self._rotary_dim(layer))
        if config.moe is not None and config.moe.layers[layer]:
            weights.moe = claim_experts(self, names)
        else:
            shape = (config.hidden_size, config.intermediate_size)
            weights.up = self._up(names)
            weights.down = self.columns(names[Role.DOWN], shape, shard.channels, config.mlp_bias, spec.is_transposed)
        return weights

    def _rotary_dim(self, layer: int) -> int:
        """How much of each head has to be reordered."""
        rope = self.config.ropes[layer]
        return 0 if rope is None or self.config.spec.is_interleaved else rope.rotary_dim

    def _qkv(self, names: dict[Role, str], layer: int) -> Affine:
        config, shard, rotary_dim = self.config, self.shard, self._rotary_dim(layer)
        width = config.head_dim
        rows = (shard.num_heads + 2 * shard.num_kv_heads) * width
        fused = Affine(self.empty(rows, config.hidden_size), self.empty(rows) if config.qkv_bias else None)
        pieces: dict[Role, list[Piece]] = {}
        for box in head_boxes(config, shard):
            piece = (box.target * width, (box.start * width, box.stop * width), rotary_dim if box.is_rotated else 0)
            pieces.setdefault(box.role, []).append(piece)
        heads = {Role.Q: config.num_heads, Role.QKV: config.num_heads + 2 * config.num_kv_heads}
        for role, own in pieces.items():
            shape = (heads.get(role, config.num_kv_heads) * width, config.hidden_size)
            self.rows(names[role], shape, own, fused, config.spec.is_transposed)
        return fused

    def _up(self, names: dict[Role, str]) -> Affine:
        """Gate over up where the MLP is gated, else up alone."""
        config, channels, size = self.config, self.shard.channels, self.config.intermediate_size
        count = channels[1] - channels[0]
        rows = 2 * count if config.spec.mlp is MlpKind.GATED else count
        fused = Affine(self.empty(rows, config.hidden_size), self.empty(rows) if config.mlp_bias else None)
        if config.spec.has(Role.GATE_UP):
            both = [(0, channels, 0), (count, (size + channels[0], size + channels[1]), 0)]
            parts = [(Role.GATE_UP, 2 * size, both)]
        elif config.spec.mlp is MlpKind.GATED:
            parts = [(Role.GATE, size, [(0, channels, 0)]), (Role.UP, size, [(count, channels, 0)])]
        else:
            parts = [(Role.UP, size, [(0, channels, 0)])]
        for role, stored, pieces in parts:
            self.rows(names[role], (stored, config.hidden_size), pieces, fused, config.spec.is_transposed)
        return fused

    def _norm(self, names: Mapping[Role, str], role: Role) -> Affine | None:
        if role not in names:
            return None
        name, width = names[role], self.config.hidden_size
        key = f"{name}.weight"
        norm = Affine(self._scale(width))
        self.claims[key] = Claim((width,), (self._scale_part(norm.weight),), (key,))
        if self.config.spec.norm_bias:
            norm.bias = self.whole(f"{name}.bias", width)
        return norm

    def _qk_norm(self, names: dict[Role, str], rotary_dim: int) -> Tensor:
        """One stored scale for all heads, repeated for each."""
        width, num_heads = self.config.head_dim, self.shard.num_heads
        scales = self._scale(num_heads + self.shard.num_kv_heads, width)
        for role, heads in ((Role.Q_NORM, scales[:num_heads]), (Role.K_NORM, scales[num_heads:])):
            key = f"{names[role]}.weight"
            parts = tuple(self._scale_part(head, width, rotary_dim) for head in heads)
            self.claims[key] = Claim((width,), parts, (key,))
        return scales

    def _scale(self, *shape: int) -> Tensor:
        return self._allocate(shape, torch.float32 if self.config.spec.norm_offset else self._dtype)

    def _scale_part(self, destination: Tensor, head_dim: int = 0, rotary_dim: int = 0) -> Part:
        return Part(destination, (slice(None),), False, head_dim, rotary_dim, self.config.spec.norm_offset)
