# SPDX-License-Identifier: Apache-2.0
"""The decoder on a GPU: a fixed sequence of kernels over fixed buffers, so that it can be captured in CUDA graphs.

`trunk` goes from the packed step to the last layer's attention, `head` from there to logits, for the sampled rows
only. Both read what they have to do from device memory; their arguments are sizes of grids. The order of kernels is
the same for every batch size and family. Knows nothing of plans, sampling or graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mii_zmq.kernels.triton.batch_inputs import ITEM_WORDS, batch_inputs_kernel
from mii_zmq.kernels.triton.chunk_attention import chunk_attention_kernel
from mii_zmq.kernels.triton.decode_attention import decode_attention_kernel
from mii_zmq.kernels.triton.elementwise import embed_kernel, gather_rows_kernel
from mii_zmq.kernels.triton.rope_kv import rope_kv_kernel
from mii_zmq.worker.cuda_batch import PackedLayout
from mii_zmq.worker.models.cuda_invariant_linear import InvariantLinear
from mii_zmq.worker.models.cuda_linear import FusedLinear, Norm, Scratch, launch_options
from mii_zmq.worker.models.layers import inverse_frequencies
from mii_zmq.worker.models.spec import MlpKind, ModelConfig, NormKind
from mii_zmq.worker.models.weights import Affine, DecoderWeights, LayerWeights

TILE_TOKENS = 128
"""Query tokens per program of prompt attention."""
INPUT_TILE = 64
MANY_DECODES = 128
FEW_TILES, MANY_TILES = (3, 4), (5, 2)
"""Pipeline stages and warps of decode attention: for up to `MANY_DECODES` rows, and for more."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class DeviceState:
    """What lives on the device from step to step."""

    packed: Tensor
    """The step's int32 buffer, laid out by `PackedLayout`."""
    token_ids: Tensor
    """[slots, max_model_len + 1] int32."""
    block_tables: Tensor
    """[slots, blocks] int32."""

    @classmethod
    def create(
        cls, layout: PackedLayout, update_words: int, max_model_len: int, block_size: int, device: torch.device
    ) -> DeviceState:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        # Rows are padded to whole 16 byte lines; one more token than the longest sequence, for the one drawn behind it.
        return cls(
            packed=zeros(layout.fixed_words + update_words),
            token_ids=zeros(layout.max_sequences, (max_model_len + 4) // 4 * 4),
            block_tables=zeros(layout.max_sequences, (-(-max_model_len // block_size) + 3) // 4 * 4),
        )


@dataclass(frozen=True)
class Card:
    """What the choice of kernels depends on."""

    num_processors: int
    is_hopper: bool
    """Compute capability 9.0 or later: programmatic dependent launch and the tensor copy engine."""

    @classmethod
    def of(cls, device: torch.device) -> Card:
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, properties.major >= 9)


Linear = FusedLinear | InvariantLinear


@dataclass(frozen=True)
class _Layer:
    qkv: Linear
    out: Linear
    up: Linear
    down: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None
    index: int


class CudaDecoder:
    """A loaded model in bfloat16 or float16, with its buffers for `max_tokens` tokens and `max_rows` sampled rows."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        state: DeviceState,
        layout: PackedLayout,
        max_tokens: int,
        block_size: int,
        max_model_len: int,
        card: Card,
        deterministic: bool = False,
    ) -> None:
        """`deterministic`: no bit of a token's result depends on what else is in the step, if every row is tiles."""
        self.config = config
        self._card, self._deterministic = card, deterministic
        self.weight_bytes = weights.num_bytes
        embed = weights.embed
        device, dtype = embed.device, embed.dtype
        self._pdl, self._tma = card.is_hopper, card.is_hopper and config.head_dim in (64, 128)
        self._layout, self._state, self._block_size = layout, state, block_size
        self._key_tile = min(64, block_size)
        self._target_programs = card.num_processors * 4
        self._embed, self._positions = embed, weights.positions
        self._width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._make_buffers(max_tokens, device, dtype)
        self._make_rotary(max_model_len, device)
        self._layers = [self._make_layer(layer, index) for index, layer in enumerate(weights.layers)]
        head = embed if weights.head is None else weights.head
        self._head = self._linear(Affine(head, None), norm=self._norm(weights.final_norm))

    def use_pool(self, slab: Tensor) -> None:
        """The KV pool [block, layer, k or v, kv head, token, dim], layers outermost in memory; call before `trunk`."""
        self._slab = slab
        flat = slab.transpose(0, 1).view(-1, self.config.head_dim)
        self._descriptor = None
        if self._tma:
            shape = [min(flat.shape[0], 2**31 - 1), flat.shape[1]]
            box = [self._key_tile, self.config.head_dim]
            self._descriptor = TensorDescriptor(flat, shape, list(flat.stride()), box)

    def trunk(self, num_tokens: int, max_decodes: int, num_tiles: int) -> None:
        """Everything up to the last layer's attention, for at most so many tokens, decode rows and prompt tiles."""
        num_items = max_decodes + self._spare_items if max_decodes else 0
        self._batch_inputs(num_tokens, num_items)
        x, qkv, attended = self._x[:num_tokens], self._qkv[:num_tokens], self._attended[:num_tokens]
        inner = self._inner[:num_tokens]
        width = self.config.hidden_size
        embed_kernel[(num_tokens,)](
            self._input_ids, self._position, self._embed, self._positions, x, self.config.spec.position_offset,
            D=width, D_PAD=triton.next_power_of_2(width), HAS_POSITIONS=self._positions is not None,
        )  # fmt: skip
        last = self._layers[-1]
        for layer in self._layers:
            layer.qkv.run(x, qkv)
            self._rotate_and_store(layer, qkv)
            if num_items:
                self._attend_decodes(layer, qkv, attended, num_items)
            if num_tiles:
                self._attend_chunks(layer, qkv, attended, num_tiles)
            if layer is not last:
                self._finish(layer, x, attended, inner)

    @property
    def last_logits(self) -> Tensor:
        """[max_rows, vocab]: what `head` wrote last."""
        return self._logits

    def head(self, num_rows: int) -> Tensor:
        """Logits [num_rows, vocab] of the step's sampled rows; rows beyond them mean nothing."""
        layout, packed = self._layout, self._state.packed
        x, attended = self._head_x[:num_rows], self._head_attended[:num_rows]
        width, heads_width = self.config.hidden_size, self.config.num_heads * self.config.head_dim
        gather_rows_kernel[(num_rows,)](
            packed[3:], packed[layout.sample_tokens :], self._x, self._attended, x, attended,
            A=width, B=heads_width, PAD=triton.next_power_of_2(max(width, heads_width)), PDL=self._pdl,
            **launch_options(self._pdl),
        )  # fmt: skip
        self._finish(self._layers[-1], x, attended, self._inner[:num_rows])
        logits = self._logits[:num_rows]
        self._head.run(x, logits)
        return logits

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor, inner: Tensor) -> None:
        layer.out.run(attended, x)
        layer.up.run(x, inner)
        layer.down.run(inner, x)

    def _batch_inputs(self, num_tokens: int, num_items: int) -> None:
        state, rows = self._state, self._layout.max_rows
        batch_inputs_kernel[(triton.cdiv(max(num_tokens, num_items), INPUT_TILE),)](
            state.packed, state.token_ids, state.block_tables, self._input_ids, self._position, self._cells,
            self._items, state.token_ids.stride(0), state.block_tables.stride(0), num_tokens, num_items,
            self._target_programs, self.config.num_kv_heads,
            MAX_ROWS=rows, SEARCH_STEPS=rows.bit_length(), BLOCK_SIZE=self._block_size, TILE=INPUT_TILE,
        )  # fmt: skip

    def _rotate_and_store(self, layer: _Layer, qkv: Tensor) -> None:
        config = self.config
        heads = config.num_heads + 2 * config.num_kv_heads
        per_program = 8
        rope_kv_kernel[(qkv.shape[0], triton.cdiv(heads, per_program))](
            qkv, self._slab, self._cosines, self._sines, self._position, self._cells, layer.q_norm, layer.k_norm,
            qkv.stride(0), self._slab.stride(0), layer.index * self._slab.stride(1), self._slab.stride(2),
            config.norm_eps,
            NUM_HEADS=config.num_heads, NUM_KV_HEADS=config.num_kv_heads, HEADS_PER_PROGRAM=per_program,
            HEAD_DIM=config.head_dim, HEAD_PAD=triton.next_power_of_2(config.head_dim), BLOCK_SIZE=self._block_size,
            HAS_ROPE=self._cosines is not None, HAS_QK_NORM=layer.q_norm is not None, PDL=self._pdl, num_warps=4,
            **launch_options(self._pdl),
        )  # fmt: skip

    def _attend_decodes(self, layer: _Layer, qkv: Tensor, attended: Tensor, num_items: int) -> None:
        config, tables = self.config, self._state.block_tables
        stages, num_warps = FEW_TILES if num_items <= MANY_DECODES + self._spare_items else MANY_TILES
        group = config.num_heads // config.num_kv_heads
        head_pad = triton.next_power_of_2(config.head_dim)
        decode_attention_kernel[(config.num_kv_heads, num_items)](
            qkv, self._slab, attended, self._partial, self._partial_stats, self._counters, tables, self._items, None,
            qkv.stride(0), attended.stride(0), tables.stride(0), self._slab.stride(0),
            layer.index * self._slab.stride(1), self._slab.stride(2), config.head_dim**-0.5 * LOG2_E, 0.0,
            layer.window or 0,
            NUM_KV_HEADS=config.num_kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
            HEAD_DIM=config.head_dim, HEAD_PAD=head_pad, BLOCK_SIZE=self._block_size, TILE=self._key_tile,
            HAS_WINDOW=layer.window is not None, HAS_SOFTCAP=False, HAS_ALIBI=False, STAGES=stages, PDL=self._pdl,
            num_warps=num_warps, **launch_options(self._pdl),
        )  # fmt: skip

    def _attend_chunks(self, layer: _Layer, qkv: Tensor, attended: Tensor, num_tiles: int) -> None:
        config, layout, state = self.config, self._layout, self._state
        packed, tables = state.packed, state.block_tables
        chunk_attention_kernel[(config.num_heads, num_tiles)](
            qkv, self._slab, self._descriptor, attended, tables, packed[layout.row_slots :],
            packed[layout.row_starts :], packed[layout.query_starts :], packed[4:], packed[layout.tile_rows :],
            packed[layout.tile_starts :], None, qkv.stride(0), attended.stride(0), tables.stride(0),
            self._slab.stride(0), layer.index * self._slab.stride(1), self._slab.stride(2),
            config.head_dim**-0.5 * LOG2_E, 0.0, layer.window or 0,
            GROUP=config.num_heads // config.num_kv_heads, HEAD_DIM=config.head_dim,
            HEAD_PAD=triton.next_power_of_2(config.head_dim), BLOCK_SIZE=self._block_size, TILE_M=TILE_TOKENS,
            TILE_N=self._key_tile, HAS_WINDOW=layer.window is not None, HAS_SOFTCAP=False, HAS_ALIBI=False,
            USE_TMA=self._descriptor is not None, STAGES=2, num_warps=4 if config.head_dim >= 128 else 8,
            # Fused, the loops with and without a mask would round differently, and it is the tile that decides
            # through which of them a row's keys go.
            enable_fp_fusion=not self._deterministic,
        )  # fmt: skip

    def _make_buffers(self, max_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        config, rows = self.config, self._layout.max_rows

        def buffer(num_rows: int, width: int) -> Tensor:
            return torch.zeros(num_rows, width, dtype=dtype, device=device)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        heads_width, inner = config.num_heads * config.head_dim, config.intermediate_size
        self._x, self._qkv = buffer(max_tokens, config.hidden_size), buffer(max_tokens, self._width)
        self._attended, self._inner = buffer(max_tokens, heads_width), buffer(max_tokens, inner)
        self._head_x, self._head_attended = buffer(rows, config.hidden_size), buffer(rows, heads_width)
        self._logits = buffer(rows, config.vocab_size)
        self._input_ids, self._position = integers(max_tokens), integers(max_tokens)
        self._cells = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._spare_items = triton.cdiv(self._target_programs, config.num_kv_heads)
        items = rows + self._spare_items
        self._items = integers(items, ITEM_WORDS)
        group_pad = max(16, triton.next_power_of_2(config.num_heads // config.num_kv_heads))
        cells = items * config.num_kv_heads * group_pad
        head_pad = triton.next_power_of_2(config.head_dim)
        self._partial = torch.zeros(cells * head_pad, dtype=torch.float32, device=device)
        self._partial_stats = torch.zeros(cells * 2, dtype=torch.float32, device=device)
        self._counters = integers(rows * config.num_kv_heads)
        widest = max(self._width, 2 * inner, config.hidden_size)
        up_rows = 2 * inner if config.spec.mlp is MlpKind.GATED else inner
        self._scratch = Scratch(
            normed=buffer(max_tokens, config.hidden_size),
            wide=buffer(max_tokens, up_rows),
            partial=torch.zeros(8 * 128 * widest, dtype=torch.float32, device=device),
            counters=integers(widest),
        )

    def _make_rotary(self, max_model_len: int, device: torch.device) -> None:
        self._cosines = self._sines = None
        rope = self.config.rope
        if rope is not None:
            frequencies = inverse_frequencies(rope, self.config.head_dim).to(device)
            angles = torch.outer(torch.arange(max_model_len + 1, device=device).float(), frequencies)
            self._cosines, self._sines = angles.cos(), angles.sin()

    def _make_layer(self, weights: LayerWeights, index: int) -> _Layer:
        config = self.config
        q_norm = k_norm = None
        if weights.qk_norm is not None:
            q_norm, k_norm = weights.qk_norm[0], weights.qk_norm[config.num_heads]
        gated = config.spec.mlp is MlpKind.GATED
        return _Layer(
            qkv=self._linear(weights.qkv, norm=self._norm(weights.attn_norm)),
            out=self._linear(weights.out, adds_to_out=True),
            up=self._linear(
                weights.up, norm=self._norm(weights.mlp_norm), activation=config.activation, gated=gated
            ),
            down=self._linear(weights.down, adds_to_out=True),
            q_norm=q_norm,
            k_norm=k_norm,
            window=config.windows[index],
            index=index,
        )  # fmt: skip

    def _linear(self, weights: Affine, **surroundings: Any) -> Linear:
        common = (weights.weight, weights.bias, self._scratch)
        if self._deterministic:
            processors = self._card.num_processors
            return InvariantLinear(*common, **surroundings, pdl=self._pdl, num_processors=processors)
        return FusedLinear(*common, **surroundings, pdl=self._pdl)

    def _norm(self, weights: Affine) -> Norm:
        return Norm(weights.weight, weights.bias, self.config.norm_eps, self.config.spec.norm is NormKind.LAYER)
