# SPDX-License-Identifier: Apache-2.0
"""The GPU's decoder in Triton's interpreter beside the CPU's decoder: the same steps for both, their logits compared.

For programs of their own, because the interpreter is chosen when Triton is imported. Ranks of a tensor-parallel group
are threads of which one runs at a time.
"""

from __future__ import annotations

import os

from tests.interpreter import INTERPRETED

os.environ.update(INTERPRETED)

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mii_zmq import kernels
from mii_zmq.kernels.triton.updates import apply_updates_kernel
from mii_zmq.worker.batch import SlotState, build_batch
from mii_zmq.worker.cuda_batch import PackedLayout, StepPacker, choose_bucket, decode_buckets
from mii_zmq.worker.kv_pool import BlockShape, KvPool
from mii_zmq.worker.models.cuda_attention import chunk_tiles
from mii_zmq.worker.models.cuda_buffers import Card, DeviceState
from mii_zmq.worker.models.cuda_decoder import CudaDecoder
from mii_zmq.worker.models.decoder import Decoder
from mii_zmq.worker.models.model_weights import DecoderWeights
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.spec import ModelConfig
from mii_zmq.worker.parallel import RankInfo
from mii_zmq.worker.plan import EngineLimits, NewSequence, SamplingSpec, StepPlan, StepRow
from tests.worker.models.vivid_weights import make_weights, shard_weights

CPU = torch.device("cpu")
SLOTS, MAX_LEN, BLOCK, NUM_BLOCKS, BUDGET = 4, 64, 16, 16, 128
TOLERANCE = 5e-5
FUSED_TOKENS = 2
"""As many the ranks' sum and the norm behind it take in one operation."""


class Baton:
    """What the ranks, threads of one process, exchange; whoever holds the baton runs."""

    def __init__(self, size: int) -> None:
        self._size, self._turn, self._round = size, 0, 0
        self._given: list[Tensor] = []
        self._taken: list[Tensor] = []
        self._changed = threading.Condition()

    def wait_for_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)

    def pass_on(self) -> None:
        with self._changed:
            self._turn = (self._turn + 1) % self._size
            self._changed.notify_all()

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._given.append(x.clone())
        if len(self._given) == self._size:
            self._taken, self._given = self._given, []
        self.pass_on()
        self.wait_for_turn(rank)
        return self._taken


@dataclass
class RankCollectives:
    """Implements `parallel.Collectives`."""

    baton: Baton
    rank: int
    may_fuse: bool

    def reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self.baton.exchange(self.rank, x)).sum(0))

    def gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        parts = self.baton.exchange(self.rank, x)
        assert [part.shape[1] for part in parts] == sizes
        return torch.cat(parts, dim=1)

    def reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float) -> bool:
        assert self.may_fuse, "which operation makes a row's norm depends on the number of rows"
        if len(x) > FUSED_TOKENS:
            return False
        residual.add_(torch.stack(self.baton.exchange(self.rank, x)).sum(0))
        out.copy_(residual * torch.rsqrt(residual.square().mean(1, keepdim=True) + eps) * weight)
        x.fill_(float("nan"))
        return True

    def agree(self, value: int) -> int:
        return value


class GpuRank:
    """One rank's decoder with everything around it."""

    def __init__(
        self, config: ModelConfig, whole: DecoderWeights, rank: RankInfo, baton: Baton, deterministic: bool
    ) -> None:
        shard, card = Shard.of(config, rank), Card(num_processors=1, is_hopper=False)
        tile_tokens = chunk_tiles(config.head_dim, BLOCK, card).tokens
        self.layout = PackedLayout(SLOTS, BUDGET, tile_tokens, tiles_only=deterministic)
        self.state = DeviceState.create(self.layout, 1024, MAX_LEN, BLOCK, CPU)
        is_alone = rank.world_size == 1
        weights = copy.deepcopy(whole if is_alone else shard_weights(whole, config, shard))
        self.decoder = CudaDecoder(
            config, weights, self.state, self.layout, BUDGET, BLOCK, MAX_LEN, card, deterministic,
            shard, None if is_alone else RankCollectives(baton, rank.rank, not deterministic),
        )  # fmt: skip
        shape = BlockShape(config.num_layers, shard.num_kv_heads, BLOCK, config.head_dim, torch.float32)
        pool = KvPool(np, shape, NUM_BLOCKS)
        pool.slab.fill_(float("nan"))
        self.decoder.use_pool(pool.slab)
        limits = EngineLimits(
            config.vocab_size, MAX_LEN, NUM_BLOCKS, BLOCK, SLOTS, BUDGET,
            rope_border=config.rope_border, recomputes_at_border=config.recomputes_at_border,
        )  # fmt: skip
        self._packer = StepPacker(
            self.layout, self.state.token_ids.stride(0), self.state.block_tables.stride(0), limits
        )  # fmt: skip

    def step(self, plan: StepPlan) -> tuple[Tensor, list[int]]:
        """Logits of the sampled rows, and their slots."""
        state, fixed = self.state, self.layout.fixed_words
        step = self._packer.pack(plan, state.packed.numpy()[:fixed])
        state.packed[fixed : fixed + len(step.updates)] = torch.from_numpy(step.updates)
        if step.num_updates:
            apply_updates_kernel[(step.num_updates, 1)](
                state.packed[fixed:], state.token_ids, state.block_tables, TILE=128
            )  # fmt: skip
        bucket = choose_bucket(step, self.layout, decode_buckets(SLOTS))
        # Mixed buckets are for tens of tokens; a little padding will do here.
        num_tokens = bucket.num_tokens if step.num_tokens == step.num_rows else step.num_tokens + 1
        decodes = step.num_decodes and min(step.num_decodes + 1, SLOTS)
        self.decoder.trunk(num_tokens, decodes, step.num_tiles and step.num_tiles + 1)
        return self.decoder.head(len(step.sample_slots) + (len(plan.rows) > 1)), step.sample_slots


@dataclass
class Twins:
    """A model on both decoders, and the sequences that they run."""

    config: ModelConfig
    num_ranks: int = 1
    deterministic: bool = False
    histories: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, weights = self.config, make_weights(self.config)
        self._baton = Baton(self.num_ranks)
        ranks = [RankInfo(rank, self.num_ranks) for rank in range(self.num_ranks)]
        self._ranks = [GpuRank(config, weights, rank, self._baton, self.deterministic) for rank in ranks]
        self._pool = KvPool(
            np, BlockShape(config.num_layers, config.num_kv_heads, BLOCK, config.head_dim, torch.float32), NUM_BLOCKS
        )
        self._slots = SlotState(SLOTS, MAX_LEN, BLOCK, CPU, config.rope_border, config.recomputes_at_border)
        self._model = Decoder(config, weights, kernels.for_device(CPU), CPU, torch.float32)
        self._tables = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).view(SLOTS, -1).tolist()
        self._draw = torch.Generator().manual_seed(5)

    def step(self, parts: list[tuple[int, int, int]], starts: tuple[int, ...] = ()) -> None:
        """Compute tokens (slot, begin, end) in one step; sequences grow as needed, those in `starts` are installed,
        known up to the end of what is computed."""
        for slot, _, end in parts:
            history = self.histories.setdefault(slot, [])
            more = torch.randint(0, self.config.vocab_size, (max(0, end - len(history)),), generator=self._draw)
            for token in more.tolist():
                self._append(slot, token, is_installed=slot not in starts)
        new = [
            NewSequence(slot, self.histories[slot], len(self.histories[slot]), self._tables[slot], SamplingSpec())
            for slot in starts
        ]
        plan = StepPlan(1, [StepRow(slot, begin, end - begin, True) for slot, begin, end in parts], new)
        self._slots.apply(plan)
        batch = build_batch(plan, self._slots)
        expected = self._model.forward(batch.forward, self._pool.layers)
        assert expected is not None
        order = {slot: row for row, slot in enumerate(batch.sample_slots)}
        for found, slots in self._run_ranks(plan):
            wanted = expected[[order[slot] for slot in slots]]
            error = float((found[: len(slots)] - wanted).abs().max() / wanted.abs().max())
            assert error < TOLERANCE, f"{parts}: relative error {error}"

    def _append(self, slot: int, token: int, is_installed: bool) -> None:
        """As if it had been drawn."""
        history = self.histories[slot]
        if is_installed:
            self._slots.token_ids[slot, len(history)] = token
            for rank in self._ranks:
                rank.state.token_ids[slot, len(history)] = token
        history.append(token)

    def _run_ranks(self, plan: StepPlan) -> list[tuple[Tensor, list[int]]]:
        if self.num_ranks == 1:
            return [self._ranks[0].step(plan)]
        results: list[Any] = [None] * self.num_ranks

        def run(rank: int) -> None:
            self._baton.wait_for_turn(rank)
            try:
                results[rank] = self._ranks[rank].step(plan)
            finally:
                self._baton.pass_on()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert None not in results
        return results


Steps = Callable[[Twins], None]


def ragged(twins: Twins) -> None:
    """Whole prompts, a prompt in chunks, single tokens, all mixed; the second crosses a window and a block."""
    twins.step([(0, 0, 3), (1, 0, 12)], starts=(0, 1))
    twins.step([(0, 3, 4), (1, 12, 18), (2, 0, 1)], starts=(2,))
    twins.step([(1, 18, 19)])


def borders(twins: Twins) -> None:
    """Sequences on both sides of a border of 12, and one that crosses it while it runs."""
    twins.step([(0, 0, 11), (1, 0, 14)], starts=(0, 1))
    twins.step([(0, 11, 12), (1, 14, 15)])
    if twins.config.recomputes_at_border:
        twins.step([(0, 0, 13), (1, 15, 16)], starts=(0,))
    else:
        twins.step([(0, 12, 13), (1, 15, 16)])
    twins.step([(0, 13, 14)])
