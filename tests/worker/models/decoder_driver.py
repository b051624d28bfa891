# SPDX-License-Identifier: Apache-2.0
"""Runs a decoder by hand: the logits of chosen rows, without an executor, scheduler or sampler."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from mii_zmq import kernels
from mii_zmq.worker.batch import SlotState, build_batch
from mii_zmq.worker.kv_pool import BlockShape, KvPool
from mii_zmq.worker.models.decoder import Decoder
from mii_zmq.worker.models.hf_config import load_model_config
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.weights import load_weights
from mii_zmq.worker.parallel import Collectives, RankInfo
from mii_zmq.worker.plan import NewSequence, SamplingSpec, StepPlan, StepRow

CPU = torch.device("cpu")
NUM_BLOCKS = 64


class DecoderDriver:
    """Owns one rank's decoder, a pool full of NaN, and the slots' state."""

    def __init__(
        self,
        directory: Path,
        block_size: int = 8,
        ops: kernels.OpTable | None = None,
        dtype: torch.dtype = torch.float32,
        rank: RankInfo | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        config = self.config = load_model_config(directory)
        rank = rank or RankInfo()
        shard = Shard.of(config, rank)
        weights = load_weights(directory, config, dtype, CPU, rank)
        self.decoder = Decoder(config, weights, ops or kernels.for_device(CPU), CPU, dtype, shard, collectives)
        shape = BlockShape(config.num_layers, shard.num_kv_heads, block_size, config.head_dim, dtype)
        self.pool = KvPool(np, shape, NUM_BLOCKS)
        self.pool.slab.fill_(float("nan"))
        self.state = SlotState(
            8, config.max_position_embeddings, block_size, CPU, config.rope_border, config.recomputes_at_border
        )
        self._free_blocks = list(range(NUM_BLOCKS))[::-2] + list(range(NUM_BLOCKS))[-2::-2]
        self._histories: dict[int, list[int]] = {}
        self._block_size = block_size

    @torch.inference_mode()
    def step(
        self, parts: list[tuple[int, list[int]]], *, sample: bool = True, prompts: Mapping[int, list[int]] | None = None
    ) -> torch.Tensor | None:
        """Compute (slot, its next tokens) in one batch; returns each part's last logits [len(parts), V].

        `prompts`: whole prompts of slots that begin with a part of one (default: what they begin with).
        """
        new, rows = [], []
        for slot, tokens in parts:
            history = self._histories.setdefault(slot, [])
            start, end = len(history), len(history) + len(tokens)
            history += tokens
            if self._is_recomputed(start, end):
                start = 0
            done = -(-start // self._block_size)
            blocks = [self._free_blocks.pop() for _ in range(-(-end // self._block_size) - done)]
            if start == 0:
                known = (prompts or {}).get(slot, history)
                new.append(NewSequence(slot, list(known), len(known), blocks, SamplingSpec()))
                blocks = []
            else:
                self.state.token_ids[slot, start:end] = torch.tensor(tokens, dtype=torch.int32)
            rows.append(StepRow(slot, start, end - start, sample, blocks))
        plan = StepPlan(1, rows, new)
        self.state.apply(plan)
        self.pool.zero_blocks(self.state.begun_blocks(rows))
        batch = build_batch(plan, self.state)
        logits = self.decoder.forward(batch.forward, self.pool.layers)
        return None if logits is None else logits[batch.plan_order]

    def _is_recomputed(self, start: int, end: int) -> bool:
        """Whether the scheduler would preempt a running sequence here, to compute all of it again."""
        border = self.config.rope_border
        fixed = self.state.fixed_rope_lengths
        if not self.config.recomputes_at_border or border is None or fixed is None or start == 0:
            return False
        return start <= border < end and max(fixed) <= border
