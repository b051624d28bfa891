# SPDX-License-Identifier: Apache-2.0
"""The model and the engines that `bench_engine` measures; in a dry run fake ones, on any machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from kernel_timeline import Record, record
from measured_engine import MeasuredEngine

from mii_zmq.config import EngineConfig
from mii_zmq.worker.cuda_load import TOKEN_BUDGET, build_cuda_executor
from mii_zmq.worker.fake import FakeExecutor
from mii_zmq.worker.models.random_weights import random_weights, shape_config
from mii_zmq.worker.models.spec import MlpKind, ModelConfig
from mii_zmq.worker.plan import EngineLimits, Executor

MAX_SEQUENCES = 256
READ_TB_S = 4.4
"""An H200's pure reads, measured."""


class Bench:
    """One model on one card, with the engines that the tests ask for."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = shape_config(args.random_weights)
        self._weights: Any = None

    def engine(self, deterministic: bool = False, **fields: Any) -> MeasuredEngine:
        return MeasuredEngine(self._fake_executor() if self.args.dry_run else self._executor(deterministic, **fields))

    def _executor(self, deterministic: bool, **fields: Any) -> Executor:
        args = self.args
        engine_config = EngineConfig(
            model=f"random:{args.random_weights}", token_budget=args.token_budget, max_sequences=MAX_SEQUENCES,
            gpu_memory_fraction=args.gpu_memory_fraction, deterministic=deterministic, **fields,
        )  # fmt: skip
        if self._weights is None:
            self._weights = random_weights(self.config, torch.bfloat16, torch.device("cuda"))
        return build_cuda_executor(engine_config, self.config, self._weights, args.max_model_len)

    def _fake_executor(self) -> Executor:
        budget = self.args.token_budget or TOKEN_BUDGET
        limits = EngineLimits(self.config.vocab_size, self.args.max_model_len, 16384, 64, MAX_SEQUENCES, budget)
        return FakeExecutor(limits)

    def records(self, work: Callable[[], None]) -> list[Record]:
        """What the GPU does during `work`; in a dry run the records of three made-up steps."""
        if not self.args.dry_run:
            return record(work)
        work()
        names = ("Memcpy HtoD", "batch_inputs_kernel", "gemv_kernel", "argmax_rows_kernel", "Memcpy DtoH")
        return [Record(name, 10.0 * index, 10.0 * index + 9) for index, name in enumerate(names * 3)]


def decode_floor_ms(config: ModelConfig, batch: int, context: int) -> float:
    """Milliseconds in which an H200 reads what a decode step must read: matrices, experts hit, keys and values.

    Tokens are taken to be routed evenly and independently: (1 - k / E)^batch of the experts rest.
    """
    hidden, heads_width = config.hidden_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    planes = 3 if config.spec.mlp is MlpKind.GATED else 2
    elements = config.vocab_size * hidden + 2.0 * config.num_layers * kv_width * context * batch
    for layer in range(config.num_layers):
        elements += hidden * (heads_width + 2 * kv_width) + heads_width * hidden
        moe = config.moe
        if moe is not None and moe.layers[layer]:
            hits = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** batch)
            elements += 3 * hidden * (hits * moe.intermediate_size + moe.shared_intermediate_size)
        else:
            elements += planes * hidden * config.intermediate_size
    return 2 * elements / READ_TB_S / 1e9
