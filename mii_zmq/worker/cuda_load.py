# SPDX-License-Identifier: Apache-2.0
"""Weights -> a ready executor on a GPU: buffers, the KV pool fitted to what memory is left, kernels and graphs.

The order matters: buffers of known size first, then the pool from what the card really has left, less a reserve for
graphs and compiled kernels, so that nothing runs out later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError
from mii_zmq.worker.cuda_batch import PackedLayout
from mii_zmq.worker.cuda_executor import UPDATE_WORDS, CudaExecutor
from mii_zmq.worker.kv_pool import BlockShape, KvPool, array_module
from mii_zmq.worker.memory_bill import MemoryBill
from mii_zmq.worker.models.cuda_attention import chunk_tiles
from mii_zmq.worker.models.cuda_buffers import Card, DeviceState
from mii_zmq.worker.models.cuda_decoder import CudaDecoder
from mii_zmq.worker.models.model_weights import DecoderWeights
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.spec import ModelConfig
from mii_zmq.worker.parallel import Collectives, RankInfo
from mii_zmq.worker.plan import EngineLimits

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

DTYPES = (torch.bfloat16, torch.float16)
TOKEN_BUDGET = 4096
"""Where an H200 is saturated: mixed workloads of an 8B shape gain 2 to 3 percent from 2,048 to 4,096 tokens per step
and nothing from 8,192, while every decode that shares a step waits twice as long (BENCHMARKS.md)."""
GRAPH_RESERVE = 2**30
"""Bytes kept for graphs, compiled kernels and cuBLAS workspaces."""
MIN_BLOCK_SIZE = 16
GIB = 2**30


def build_cuda_executor(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: DecoderWeights,
    max_model_len: int,
    progress: Progress | None = None,
    use_graphs: bool = True,
    rank: RankInfo | None = None,
    collectives: Collectives | None = None,
) -> CudaExecutor:
    """An executor over this rank's weights, which lie on the GPU in bfloat16 or float16.

    Raises:
        ConfigError: a setting or the card's memory does not allow it.
        ModelUnsupported: the kernels do not take the model's shape.
    """
    say: Progress = progress or (lambda text, share: None)
    device, dtype = weights.embed.device, weights.embed.dtype
    if config.block_size < MIN_BLOCK_SIZE:
        raise ConfigError(f"block_size is {config.block_size}; on a GPU it must be at least {MIN_BLOCK_SIZE}")
    budget = max(config.token_budget or TOKEN_BUDGET, config.max_sequences)
    card, shard = Card.of(device), Shard.of(model_config, rank or RankInfo())
    tile_tokens = chunk_tiles(model_config.head_dim, config.block_size, card).tokens
    layout = PackedLayout(config.max_sequences, budget, tile_tokens, tiles_only=config.deterministic)
    state = DeviceState.create(layout, UPDATE_WORDS, max_model_len, config.block_size, device)
    max_tokens = -(-budget // 64) * 64
    decoder = CudaDecoder(
        model_config, weights, state, layout, max_tokens, config.block_size, max_model_len, card,
        deterministic=config.deterministic, shard=shard, collectives=collectives,
    )  # fmt: skip
    block = BlockShape(model_config.num_layers, shard.num_kv_heads, config.block_size, model_config.head_dim, dtype)
    num_blocks = _num_blocks(config, block, max_model_len, device)
    if collectives is not None:
        num_blocks = collectives.agree(num_blocks)
    say("reserving the KV pool", 0.0)
    pool = KvPool(array_module(device), block, num_blocks)
    limits = EngineLimits(
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_sequences=config.max_sequences,
        token_budget=budget,
        eos_token_ids=model_config.eos_token_ids,
        scores_prompts=True,
        hidden_size=model_config.state_size,
        rope_border=model_config.rope_border,
        recomputes_at_border=model_config.recomputes_at_border,
    )
    executor = CudaExecutor(decoder, state, layout, pool, limits, use_graphs)
    free_before = torch.cuda.mem_get_info(device)[0]
    begin = time.perf_counter()
    executor.capture(say)
    executor.bill = MemoryBill(
        weight_bytes=decoder.weight_bytes,
        kv_bytes=pool.num_bytes,
        num_blocks=num_blocks,
        num_tokens=num_blocks * config.block_size,
        graph_bytes=max(1, free_before - torch.cuda.mem_get_info(device)[0]),
    )
    logger.info(
        "%s on %s; %s; %d graphs captured in %.1f s",
        dtype, device, executor.bill, len(executor.graphs), time.perf_counter() - begin,
    )  # fmt: skip
    say("ready", 1.0)
    return executor


def _num_blocks(config: EngineConfig, block: BlockShape, max_model_len: int, device: torch.device) -> int:
    """As many blocks as asked for, or as the memory allows and the slots can ever use."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    room = int(free - total * (1 - config.gpu_memory_fraction)) - GRAPH_RESERVE
    if config.kv_cache_gb is not None:
        wanted = int(config.kv_cache_gb * 10**9) // block.num_bytes
    else:
        wanted = config.max_sequences * -(-max_model_len // config.block_size)
    if config.num_blocks is not None:
        wanted = config.num_blocks
    is_asked_for = config.num_blocks is not None or config.kv_cache_gb is not None
    fits = max(0, room) // block.num_bytes
    if min(wanted, fits) < 1 or (is_asked_for and wanted > fits):
        raise ConfigError(
            f"the KV pool should hold {max(wanted, 1)} blocks of {block.num_bytes / GIB:.4f} GiB, but of the card's "
            f"{total / GIB:.1f} GiB only {max(0, room) / GIB:.2f} GiB are left for it; use a smaller --kv-cache-gb or "
            "--num-blocks, a smaller --token-budget, or a larger --gpu-memory-fraction"
        )
    return min(wanted, fits)
