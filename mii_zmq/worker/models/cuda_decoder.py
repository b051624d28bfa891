# SPDX-License-Identifier: Apache-2.0
"""The decoder on a GPU: a fixed sequence of kernels over fixed buffers, so that it can be captured in CUDA graphs.

`trunk` goes from the packed step to the last layer's attention, `head` from there to logits, for the sampled rows
only. Both read what they have to do from device memory; their arguments are sizes of grids. The order of kernels is
the same for every batch size. With several ranks each holds a `Shard`, and all of them get the same whole logits.
Knows nothing of plans, sampling or graphs.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import triton
from torch import Tensor

from mii_zmq.kernels.triton.batch_inputs import batch_inputs_kernel
from mii_zmq.kernels.triton.elementwise import embed_kernel, gather_rows_kernel, softcap_kernel
from mii_zmq.worker.cuda_batch import PackedLayout
from mii_zmq.worker.models.cuda_attention import AttentionPlace, CudaAttention
from mii_zmq.worker.models.cuda_buffers import Buffers, Card, DeviceState, Rows
from mii_zmq.worker.models.cuda_gemm import launch_options
from mii_zmq.worker.models.cuda_layer import NORMED, Field, Launch, LayerBuilder, LayerLaunches, Source, X
from mii_zmq.worker.models.cuda_rotary import RotaryTables
from mii_zmq.worker.models.decoder import attention_shape, embedding_scale
from mii_zmq.worker.models.model_weights import Affine, DecoderWeights, LayerWeights
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.spec import ModelConfig
from mii_zmq.worker.parallel import Collectives, RankInfo

INPUT_TILE = 64
SOFTCAP_TILE = 4096
NARROW = attrgetter("narrow")


class Layer(NamedTuple):
    launches: LayerLaunches
    place: AttentionPlace


class CudaDecoder:
    """A loaded model in bfloat16 or float16, with its buffers for `max_tokens` tokens and the layout's sampled rows."""

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
        shard: Shard | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        """`deterministic`: no bit of a token's result depends on what else is in the step, if every row is tiles.

        `shard` is given with `collectives`, where several ranks share the model.
        """
        shard = shard or Shard.of(config, RankInfo())
        self.config = config
        self._pdl = card.is_hopper
        self.weight_bytes = weights.num_bytes
        embed = weights.embed
        device, dtype = embed.device, embed.dtype
        self._layout, self._state, self._block_size = layout, state, block_size
        has_delta = LayerBuilder.needs_delta(config, weights.layers, collectives)
        self._buffers = Buffers(config, shard, state, max_tokens, layout.max_rows, has_delta, device, dtype)
        shape = attention_shape(config, shard, device, dtype)
        self._num_kv_heads = shape.num_kv_heads
        self._attention = CudaAttention(
            shape, config.norm_eps, self._buffers, state, layout, block_size, card, deterministic
        )
        self._rotary = RotaryTables(config.ropes, state, layout, self._buffers.positions, max_model_len)
        builder = LayerBuilder(config, self._buffers, card, deterministic, collectives)
        self._embedding = self._make_embedding(weights, builder)
        self._layers = [self._make_layer(layer, index, builder) for index, layer in enumerate(weights.layers)]
        self._ending, self._settling, self._state_field = self._make_ending(weights, builder, shard)
        self._collectives = collectives
        ranks = range(shard.rank.world_size)
        spans = [RankInfo(rank, len(ranks)).span(config.vocab_size) for rank in ranks]
        self._vocab_sizes = [stop - start for start, stop in spans]

    def use_pool(self, slab: Tensor) -> None:
        """The KV pool [block, layer, k or v, kv head, token, dim], layers outermost in memory; call before `trunk`."""
        self._attention.use_pool(slab)

    def trunk(self, num_tokens: int, max_decodes: int, num_tiles: int) -> None:
        """Everything up to the last layer's attention, for at most so many tokens, decode rows and prompt tiles."""
        num_items = max_decodes + self._attention.spare_items if max_decodes else 0
        self._batch_inputs(num_tokens, num_items)
        self._rotary.prepare(num_tokens)
        rows = self._buffers.trunk(num_tokens)
        for launch in self._embedding:
            launch(rows)
        last = self._layers[-1]
        for layer in self._layers:
            for launch in layer.launches.before:
                launch(rows)
            self._attention.run(layer.place, rows, num_items, num_tiles)
            if layer is not last:
                for launch in layer.launches.after:
                    launch(rows)

    @property
    def last_logits(self) -> Tensor:
        """[max_rows, vocab]: what `head` wrote last."""
        return self._buffers.logits

    def head(self, num_rows: int) -> Tensor:
        """Logits [num_rows, vocab] of the step's sampled rows; rows beyond them mean nothing."""
        rows, last = self._buffers.head(num_rows), self._layers[-1].launches
        self._gather_rows(rows)
        for launches in (last.again, last.after, self._ending):
            for launch in launches:
                launch(rows)
        logits = self._buffers.logits[:num_rows]
        if self._collectives is not None:
            logits.copy_(self._collectives.gather(self._buffers.local_logits[:num_rows], self._vocab_sizes))
        if self.config.logit_softcap:
            self._cap(logits)
        return logits

    def states(self, num_rows: int) -> Tensor:
        """Final hidden states [num_rows, D] of the listed tokens, as the head reads them; further rows mean nothing.

        Overwritten by the next `states`, `head` or `trunk`.
        """
        rows, last = self._buffers.head(num_rows), self._layers[-1].launches
        self._gather_rows(rows)
        for launches in (last.again, last.after, self._settling):
            for launch in launches:
                launch(rows)
        return self._state_field(rows)

    def _batch_inputs(self, num_tokens: int, num_items: int) -> None:
        state, buffers, attention, max_rows = self._state, self._buffers, self._attention, self._layout.max_rows
        batch_inputs_kernel[(triton.cdiv(max(num_tokens, num_items), INPUT_TILE),)](
            state.packed, state.token_ids, state.block_tables, buffers.input_ids, buffers.positions, buffers.cells,
            attention.items, state.token_ids.stride(0), state.block_tables.stride(0), num_tokens, num_items,
            attention.target_programs, self._num_kv_heads,
            MAX_ROWS=max_rows, SEARCH_STEPS=max_rows.bit_length(), BLOCK_SIZE=self._block_size, TILE=INPUT_TILE,
        )  # fmt: skip

    def _gather_rows(self, rows: Rows) -> None:
        layout, packed, tokens = self._layout, self._state.packed, self._buffers.tokens
        width, heads_width = rows.x.shape[1], rows.attended.shape[1]
        gather_rows_kernel[(rows.x.shape[0],)](
            packed[3:], packed[layout.sample_tokens :], tokens.x, tokens.attended, rows.x, rows.attended,
            A=width, B=heads_width, PAD=triton.next_power_of_2(max(width, heads_width)), PDL=self._pdl,
            **launch_options(self._pdl),
        )  # fmt: skip

    def _cap(self, logits: Tensor) -> None:
        num_rows, width = logits.shape
        softcap_kernel[(num_rows, triton.cdiv(width, SOFTCAP_TILE))](
            logits, logits.stride(0), self.config.logit_softcap,
            V=width, TILE=SOFTCAP_TILE, PDL=self._pdl, **launch_options(self._pdl),
        )  # fmt: skip

    def _make_embedding(self, weights: DecoderWeights, builder: LayerBuilder) -> list[Launch]:
        config, buffers, embed, positions = self.config, self._buffers, weights.embed, weights.positions
        scale, first = embedding_scale(config, embed.dtype), config.spec.position_offset

        def look_up(ids: Tensor, table: Tensor, added: Tensor | None, target: Tensor, scale: float) -> None:
            width = table.shape[1]
            embed_kernel[(target.shape[0],)](
                ids, buffers.positions, table, added, target, first,
                D=width, D_PAD=triton.next_power_of_2(width), HAS_POSITIONS=added is not None, SCALE=scale,
            )  # fmt: skip

        if weights.project_in is None:
            launches: list[Launch] = [lambda rows: look_up(buffers.input_ids, embed, positions, rows.x, scale)]
        else:
            project = Affine(weights.project_in)
            launches = [lambda rows: look_up(buffers.input_ids, embed, None, rows.narrow, scale)]
            if positions is not None:
                table = positions[first:]
                launches.append(lambda rows: look_up(buffers.positions, table, None, rows.x, 1.0))
            launches.append(builder.matrix(project, Source(NARROW), X, adds_to_out=positions is not None))
        if (norm := builder.norm(weights.embed_norm)) is not None:
            launches.append(lambda rows: norm.run(rows.x, rows.x, self._pdl))
        return launches

    def _make_layer(self, weights: LayerWeights, index: int, builder: LayerBuilder) -> Layer:
        q_norm = k_norm = None
        if weights.qk_norm is not None:
            # All heads of a kind are scaled alike.
            q_norm, k_norm = weights.qk_norm[0], weights.qk_norm[-1]
        place = AttentionPlace(index, self.config.windows[index], self._rotary.by_layer[index], q_norm, k_norm)
        return Layer(builder.build(weights), place)

    def _make_ending(
        self, weights: DecoderWeights, builder: LayerBuilder, shard: Shard
    ) -> tuple[list[Launch], list[Launch], Field]:
        """From the last layer's `x`, or `delta`, to this rank's logits; and, where it is the final hidden states that
        are wanted, to these, with the field that they are in."""
        launches: list[Launch] = []
        source = builder.read(launches, builder.norm(weights.final_norm))
        if weights.project_out is not None:
            launches.append(builder.matrix(Affine(weights.project_out), source, NARROW))
            source = Source(NARROW)
        settling, state_field = list(launches), source.field
        if source.norm is not None:
            # The head applies the norm itself.
            norm, field, state_field = source.norm, source.field, NORMED
            settling.append(lambda rows: norm.run(field(rows), rows.normed, self._pdl))
        # A tied head's rows of this rank are a view of the embedding.
        head = weights.head or Affine(weights.embed[slice(*shard.vocab)])
        logits = self._buffers.local_logits
        launches.append(builder.matrix(head, source, lambda rows: logits[: rows.x.shape[0]]))
        return launches, settling, state_field
