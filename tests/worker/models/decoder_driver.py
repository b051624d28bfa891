# SPDX-License-Identifier: Apache-2.0
"""Runs a decoder by hand: the logits of chosen rows, without an executor, scheduler or sampler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mii_zmq import kernels
from mii_zmq.worker.batch import SlotState, build_batch
from mii_zmq.worker.kv_pool import BlockShape, KvPool
from mii_zmq.worker.models.decoder import Decoder
from mii_zmq.worker.models.hf_config import load_model_config
from mii_zmq.worker.models.weights import load_weights
from mii_zmq.worker.plan import NewSequence, SamplingSpec, StepPlan, StepRow

CPU = torch.device("cpu")
NUM_BLOCKS = 64


class DecoderDriver:
    """Owns a decoder, a pool full of NaN, and the slots' state."""

    def __init__(
        self,
        directory: Path,
        block_size: int = 8,
        ops: kernels.OpTable | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = load_model_config(directory)
        weights = load_weights(directory, config, dtype, CPU)
        self.decoder = Decoder(config, weights, ops or kernels.for_device(CPU), CPU, dtype)
        shape = BlockShape(config.num_layers, config.num_kv_heads, block_size, config.head_dim, dtype)
        self.pool = KvPool(np, shape, NUM_BLOCKS)
        self.pool.slab.fill_(float("nan"))
        self.state = SlotState(8, config.max_position_embeddings, block_size, CPU)
        self._free_blocks = list(range(NUM_BLOCKS))[::-2] + list(range(NUM_BLOCKS))[-2::-2]
        self._lengths: dict[int, int] = {}
        self._block_size = block_size

    @torch.inference_mode()
    def step(self, parts: list[tuple[int, list[int]]], *, sample: bool = True) -> torch.Tensor | None:
        """Compute (slot, its next tokens) in one batch; returns each part's last logits [len(parts), V]."""
        new, rows = [], []
        for slot, tokens in parts:
            start = self._lengths.get(slot, 0)
            end = start + len(tokens)
            needed = -(-end // self._block_size) - -(-start // self._block_size)
            blocks = [self._free_blocks.pop() for _ in range(needed)]
            if start == 0:
                new.append(NewSequence(slot, tokens, len(tokens), blocks, SamplingSpec()))
                blocks = []
            else:
                self.state.token_ids[slot, start:end] = torch.tensor(tokens, dtype=torch.int32)
            rows.append(StepRow(slot, start, len(tokens), sample, blocks))
            self._lengths[slot] = end
        plan = StepPlan(1, rows, new)
        self.state.apply(plan)
        self.pool.zero_blocks(self.state.begun_blocks(rows))
        batch = build_batch(plan, self.state)
        logits = self.decoder.forward(batch.forward, self.pool.layers)
        return None if logits is None else logits[batch.plan_order]
