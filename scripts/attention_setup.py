# SPDX-License-Identifier: Apache-2.0
"""The engine's attention with everything it reads, for `bench_kernels`: pool, block tables, a packed step.

The classes are the engine's own, so memory layout and launch parameters are, too; the rest of the model is missing.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
from kernel_case import DEVICE, DTYPE, IS_INTERPRETED, SHAPE, pick
from torch import Tensor

from mii_zmq.kernels.triton.batch_inputs import batch_inputs_kernel
from mii_zmq.kernels.triton.updates import TILE as UPDATE_TILE
from mii_zmq.kernels.triton.updates import apply_updates_kernel
from mii_zmq.worker.cuda_batch import PackedLayout, PackedStep, StepPacker
from mii_zmq.worker.kv_pool import BlockShape, KvPool, array_module
from mii_zmq.worker.models.cuda_attention import AttentionPlace, CudaAttention, chunk_tiles
from mii_zmq.worker.models.cuda_buffers import Buffers, Card, DeviceState, Rows
from mii_zmq.worker.models.cuda_decoder import INPUT_TILE
from mii_zmq.worker.models.cuda_rotary import RotaryTables
from mii_zmq.worker.models.decoder import attention_shape
from mii_zmq.worker.models.random_weights import SHAPES
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.spec import RopeConfig
from mii_zmq.worker.parallel import RankInfo
from mii_zmq.worker.plan import NewSequence, SamplingSpec, StepPlan, StepRow

MAX_LEN = pick((8448,), (160,))[0]
MAX_TOKENS = pick((8192,), (96,))[0]
NUM_LAYERS = pick((32,), (3,))[0]
NUM_BLOCKS = pick((4224,), (40,))[0]
"""64 sequences of 4,096 tokens, or 256 of 1,000."""
UPDATE_WORDS = 1 << 20
CARD = Card(2, is_hopper=False) if IS_INTERPRETED else None


class AttentionSetup:
    """All layers' attention over a pool of random keys and values, layers outermost."""

    def __init__(self) -> None:
        self.rope = RopeConfig(500000.0, SHAPE.head_dim)
        ropes = (self.rope,) * NUM_LAYERS
        # Small where attention does not look.
        config = replace(
            SHAPES["8B"], vocab_size=256, hidden_size=64, intermediate_size=64, num_layers=NUM_LAYERS,
            num_heads=SHAPE.heads, num_kv_heads=SHAPE.kv_heads, head_dim=SHAPE.head_dim, scale=SHAPE.head_dim**-0.5,
            windows=(None,) * NUM_LAYERS, ropes=ropes, max_position_embeddings=MAX_LEN,
        )  # fmt: skip
        card = CARD or Card.of(DEVICE)
        shard = Shard.of(config, RankInfo())
        tiles = chunk_tiles(SHAPE.head_dim, SHAPE.block, card)
        self.scale, self.eps = config.scale, config.norm_eps
        self.layout = PackedLayout(pick((256,), (8,))[0], MAX_TOKENS, tiles.tokens)
        self.state = DeviceState.create(self.layout, UPDATE_WORDS, MAX_LEN, SHAPE.block, DEVICE)
        self.buffers = Buffers(config, shard, self.state, MAX_TOKENS, self.layout.max_rows, False, DEVICE, DTYPE)
        self.attention = CudaAttention(
            attention_shape(config, shard, DEVICE, DTYPE), config.norm_eps, self.buffers, self.state, self.layout,
            SHAPE.block, card, deterministic=False,
        )  # fmt: skip
        rotation = RotaryTables(ropes, self.state, self.layout, self.buffers.positions, MAX_LEN).by_layer[0]
        block = BlockShape(NUM_LAYERS, SHAPE.kv_heads, SHAPE.block, SHAPE.head_dim, DTYPE)
        self.pool = KvPool(array_module(DEVICE), block, NUM_BLOCKS)
        for layer in range(NUM_LAYERS):
            self.pool.slab[:, layer].normal_()
        self.attention.use_pool(self.pool.slab)
        self.places = [AttentionPlace(index, None, rotation, None, None) for index in range(NUM_LAYERS)]

    def prepare(self, rows: list[tuple[int, int]]) -> PackedStep:
        """Bring a step of rows (start, tokens) to the device, over blocks picked at random, with random q, k and v."""
        order = torch.randperm(NUM_BLOCKS).tolist()
        self.tables, self.lengths, new = [], [start + count for start, count in rows], []
        for slot, (start, count) in enumerate(rows):
            self.tables.append([order.pop() for _ in range(triton.cdiv(start + count, SHAPE.block))])
            token_ids = random.choices(range(SHAPE.vocab), k=start + count)
            new.append(NewSequence(slot, token_ids, start + count, self.tables[-1], SamplingSpec()))
        plan = StepPlan(1, [StepRow(slot, start, count, True) for slot, (start, count) in enumerate(rows)], new)
        packed, fixed = torch.zeros(len(self.state.packed), dtype=torch.int32), self.layout.fixed_words
        state = self.state
        packer = StepPacker(self.layout, state.token_ids.stride(0), state.block_tables.stride(0))
        self.step = packer.pack(plan, packed.numpy()[:fixed])
        packed[fixed : fixed + len(self.step.updates)] = torch.from_numpy(self.step.updates)
        state.packed.copy_(packed)
        grid = (self.step.num_updates, triton.cdiv(self.step.longest_update, UPDATE_TILE))
        apply_updates_kernel[grid](state.packed[fixed:], state.token_ids, state.block_tables, TILE=UPDATE_TILE)
        self.make_inputs()
        self.rows.qkv.normal_()
        return self.step

    @property
    def rows(self) -> Rows:
        return self.buffers.trunk(self.step.num_tokens)

    @property
    def num_items(self) -> int:
        return self.step.num_decodes + self.attention.spare_items if self.step.num_decodes else 0

    def make_inputs(self) -> None:
        state, buffers, attention, max_rows = self.state, self.buffers, self.attention, self.layout.max_rows
        num_tokens, num_items = self.step.num_tokens, self.num_items
        batch_inputs_kernel[(triton.cdiv(max(num_tokens, num_items), INPUT_TILE),)](
            state.packed, state.token_ids, state.block_tables, buffers.input_ids, buffers.positions, buffers.cells,
            attention.items, state.token_ids.stride(0), state.block_tables.stride(0), num_tokens, num_items,
            attention.target_programs, SHAPE.kv_heads,
            MAX_ROWS=max_rows, SEARCH_STEPS=max_rows.bit_length(), BLOCK_SIZE=SHAPE.block, TILE=INPUT_TILE,
        )  # fmt: skip

    @contextlib.contextmanager
    def stale_cells(self, layer: int) -> Iterator[None]:
        """Behind each row's last token its block holds NaN, as a former owner may have left it."""
        tails = []
        for table, length in zip(self.tables, self.lengths, strict=True):
            tails.append(self.pool.slab[table[-1], layer, :, :, (length - 1) % SHAPE.block + 1 :])
            tails[-1].fill_(float("nan"))
        yield
        for tail in tails:
            tail.normal_()

    def keys_values(self, slot: int, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V [kv heads, length, head_dim] of a row."""
        blocks = self.pool.slab[torch.tensor(self.tables[slot], device=DEVICE), layer]
        keys, values = blocks.permute(1, 2, 0, 3, 4).reshape(2, SHAPE.kv_heads, -1, SHAPE.head_dim)[:, :, :length]
        return keys, values
