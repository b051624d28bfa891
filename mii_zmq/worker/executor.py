# SPDX-License-Identifier: Apache-2.0
"""Runs step plans on a model: apply the plan's changes, forward, sample, remember the drawn ids on the device.

`submit` returns at once; one thread runs the steps in order, and torch releases the interpreter lock while it
computes, so the scheduler plans the next step meanwhile. An exception fails its own step (`result()` raises it) and
leaves the state as the plans say, so that later plans run. Knows nothing of scheduling: what a plan says is done.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mii_zmq import kernels
from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError, InternalError
from mii_zmq.kernels import KvLayer
from mii_zmq.worker.batch import RaggedBatch, SlotState, build_batch
from mii_zmq.worker.kv_pool import BlockShape, KvPool, array_module
from mii_zmq.worker.memory_bill import MemoryBill
from mii_zmq.worker.models.decoder import Decoder, ForwardBatch
from mii_zmq.worker.models.demo_model import resolve_model
from mii_zmq.worker.models.hf_config import load_model_config
from mii_zmq.worker.models.spec import ModelConfig
from mii_zmq.worker.models.weights import load_weights
from mii_zmq.worker.plan import EngineLimits, Executor, SamplingSpec, StepPlan, StepResult
from mii_zmq.worker.sampler import Sampler

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

GIB = 2**30
CPU_KV_BYTES = 4 * 10**9
CPU_TOKEN_BUDGET = 512
GPU_TOKEN_BUDGET = 2048


class Model(Protocol):
    """What the executor needs of a model."""

    def forward(self, batch: ForwardBatch, kv_layers: Sequence[KvLayer]) -> Tensor | None: ...


class TokenSampler(Protocol):
    """Logits to token ids, with per-slot state."""

    def install(self, slot: int, spec: SamplingSpec, token_ids: list[int], num_prompt_tokens: int) -> None: ...

    def release(self, slots: list[int]) -> None: ...

    def sample(
        self, logits: Tensor, slots: list[int], positions: list[int], token_ids: Tensor
    ) -> tuple[Tensor, Tensor]: ...


class LoadedExecutor(Executor, Protocol):
    """An executor with the bill of its memory."""

    bill: MemoryBill


class ModelExecutor:
    """Implements `plan.Executor`."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        sampler: TokenSampler,
        limits: EngineLimits,
        bill: MemoryBill,
        num_threads: int | None = None,
    ) -> None:
        self.limits = limits
        self.bill = bill
        self._model = model
        self._pool = pool
        self._sampler = sampler
        self._state = SlotState(limits.max_sequences, limits.max_model_len, limits.block_size, pool.slab.device)
        self._last_step = 0
        self._num_threads = num_threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="executor", initializer=self._start_thread)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue one step. The plan must not change afterwards."""
        return self._thread.submit(self._run, plan)

    def close(self) -> None:
        """Wait for the running step, drop the others, end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _start_thread(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepResult:
        if plan.step != self._last_step + 1:
            raise InternalError(f"step {plan.step} follows step {self._last_step}; a plan was lost or sent twice")
        self._last_step = plan.step
        self._apply(plan)
        if not plan.rows:
            return StepResult(plan.step, [])
        batch = build_batch(plan, self._state)
        logits = self._model.forward(batch.forward, self._pool.layers)
        if logits is None:
            return StepResult(plan.step, [])
        return self._sample(plan, batch, logits)

    def _apply(self, plan: StepPlan) -> None:
        # The tables first: they must match the scheduler's even if a later part of this step fails.
        self._state.apply(plan)
        self._pool.copy_blocks(plan.copies)
        self._sampler.release(plan.freed_slots)
        for new in plan.new:
            self._sampler.install(new.slot, new.sampling, new.token_ids, new.num_prompt_tokens)
        self._pool.zero_blocks(self._state.begun_blocks(plan.rows))

    def _sample(self, plan: StepPlan, batch: RaggedBatch, logits: Tensor) -> StepResult:
        slots, positions = batch.sample_slots, batch.sample_positions
        drawn, is_finite = self._sampler.sample(logits.float(), slots, positions, self._state.token_ids)
        self._state.record(slots, positions, drawn)
        token_ids, finite = drawn.tolist(), is_finite.tolist()
        failed = {
            slot: "the model's logits are not finite"
            for slot, is_fine in zip(slots, finite, strict=True)
            if not is_fine
        }
        return StepResult(plan.step, [token_ids[index] for index in batch.plan_order], failed)


def load_executor(config: EngineConfig, progress: Progress | None = None) -> LoadedExecutor:
    """Load the model that `config` names and size everything around it.

    Raises:
        StartupError: the checkpoint, a setting or the memory does not allow it; the message is for the operator.
    """
    say: Progress = progress or (lambda text, share: None)
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    device = _device(config)
    directory = Path(resolve_model(config.model, lambda text: say(text, 0.0)))
    model_config = load_model_config(directory)
    dtype = _dtype(config, model_config, device)
    has_kernels = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if config.deterministic and not has_kernels:
        raise ConfigError(
            f"deterministic is set, but in {_name(dtype)} on {device.type} results depend on the batch; only the "
            "engine for GPUs in bfloat16 or float16 can do without: use --device cuda, or leave --deterministic out"
        )
    max_model_len = _max_model_len(config, model_config)
    before = available_memory()
    weights = load_weights(directory, model_config, dtype, device, progress=progress)
    if has_kernels:
        # Triton and CuPy are there only where a GPU is.
        from mii_zmq.worker.cuda_load import build_cuda_executor

        return build_cuda_executor(config, model_config, weights, max_model_len, say)
    say("preparing weights", 0.0)
    decoder = Decoder(model_config, weights, kernels.for_device(device), device, dtype)
    block = BlockShape(
        model_config.num_layers, model_config.num_kv_heads, config.block_size, model_config.head_dim, dtype
    )
    num_blocks = _num_blocks(config, block, max_model_len, device)
    say("reserving the KV pool", 0.0)
    pool = KvPool(array_module(device), block, num_blocks)
    bill = MemoryBill(
        weight_bytes=decoder.weight_bytes,
        kv_bytes=pool.num_bytes,
        num_blocks=num_blocks,
        num_tokens=num_blocks * config.block_size,
    )
    logger.info(
        "%s: %s, %s on %s, %d threads; %s; %.2f GiB were available",
        directory.name, model_config.spec.family, dtype, device, num_threads, bill, before / GIB,
    )  # fmt: skip
    limits = EngineLimits(
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_sequences=config.max_sequences,
        token_budget=config.token_budget or (GPU_TOKEN_BUDGET if device.type == "cuda" else CPU_TOKEN_BUDGET),
        eos_token_ids=model_config.eos_token_ids,
    )
    sampler = Sampler(config.max_sequences, model_config.vocab_size, device)
    say("ready", 1.0)
    return ModelExecutor(decoder, pool, sampler, limits, bill, num_threads)


def available_memory() -> int:
    """Bytes that this process can still take: the machine's, or its control group's where that is less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _read_lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _read_lines("/sys/fs/cgroup/memory.max"), _read_lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdecimal():
        available = min(available, max(0, int(limit[0]) - int(used[0])))
    return available


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").split("\n")
    except OSError:
        return []


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if config.device == "cuda":
        raise ConfigError("device is cuda, but torch finds no NVIDIA GPU here; use --device cpu")
    return torch.device("cpu")


def _dtype(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model_config.dtype  # type: ignore[assignment]
    dtypes: dict[str, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[name]  # type: ignore[no-any-return]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    context = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model's context is {context} tokens")
    return config.max_model_len or context


def _num_blocks(config: EngineConfig, block: BlockShape, max_model_len: int, device: torch.device) -> int:
    """As many blocks as asked for, or as the memory allows and the slots can ever use."""
    if config.num_blocks is not None:
        return config.num_blocks
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(free - total * (1 - config.gpu_memory_fraction))
    else:
        budget = min(CPU_KV_BYTES, available_memory() // 2)
    if config.kv_cache_gb is not None:
        budget = int(config.kv_cache_gb * 10**9)
    useful = config.max_sequences * -(-max_model_len // config.block_size)
    num_blocks = min(budget // block.num_bytes, useful)
    if num_blocks < 1:
        raise ConfigError(
            f"the KV pool gets {budget / GIB:.2f} GiB, but one block takes {block.num_bytes / GIB:.2f} GiB; "
            "give more with --kv-cache-gb, or use a smaller --block-size"
        )
    return num_blocks
