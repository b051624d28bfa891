# SPDX-License-Identifier: Apache-2.0
"""The GPU engine without a GPU: its kernels in Triton's interpreter, CUDA's streams and events replaced by nothing.

`python cuda_engine_on_cpu.py NUM_BLOCKS [deterministic]` runs requests with every kind of sampling through it and
through the CPU's executor, and compares the token ids. Graphs and timing are all that this leaves out. With `faults`
instead, requests that cannot be computed run beside others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import warnings
from dataclasses import replace
from typing import Any

from tests.interpreter import INTERPRETED, adjust_interpreter

os.environ.update(INTERPRETED)

import numpy as np
import torch

from mii_zmq import kernels
from mii_zmq.config import EngineConfig
from mii_zmq.errors import InternalError, NumericError
from mii_zmq.worker import cuda_load
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.executor import ModelExecutor
from mii_zmq.worker.kv_pool import BlockShape, KvPool
from mii_zmq.worker.memory_bill import MemoryBill
from mii_zmq.worker.models.cuda_buffers import Card
from mii_zmq.worker.models.decoder import Decoder
from mii_zmq.worker.models.model_weights import DecoderWeights
from mii_zmq.worker.models.random_weights import SHAPES, random_weights
from mii_zmq.worker.models.spec import RopeConfig
from mii_zmq.worker.plan import EngineLimits, Executor, SamplingSpec, SequenceRequest, TokenLogprobs
from mii_zmq.worker.sampler import Sampler
from tests.worker.scripted_grammars import ScriptedGrammars

CPU = torch.device("cpu")
VOCAB, MAX_LEN, BLOCK, SLOTS, BUDGET = 99, 64, 16, 6, 24
CONFIG = replace(
    SHAPES["tiny"], vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position_embeddings=MAX_LEN, ropes=(RopeConfig(500000.0, 16),) * 2, scale=0.25,
)  # fmt: skip
SPECS = [
    SamplingSpec(num_logprobs=0),
    SamplingSpec(seed=5, temperature=0.8, top_k=12, top_p=0.9, num_logprobs=3, num_prompt_logprobs=2),
    SamplingSpec(seed=6, temperature=1.0, logit_bias=((3, 4.5), (70, -2.0))),
    SamplingSpec(repetition_penalty=1.3, presence_penalty=0.4, num_logprobs=1, num_prompt_logprobs=1),
    SamplingSpec(min_new_tokens=3, stop_token_ids=(5, 6)),
    SamplingSpec(seed=9, temperature=0.7, min_p=0.05, allowed_token_ids=(0, 7, 31, 32, 64, 98)),
    SamplingSpec(seed=11, temperature=0.9, top_p=0.95, is_masked=True),
    SamplingSpec(is_masked=True, allowed_token_ids=tuple(range(0, VOCAB, 2)), num_logprobs=2),
]


POOLED = (("mean", 30), ("last", 17), ("first", 26), ("mean", 1))
"""How prompts are pooled that run beside the others, and their lengths."""


class NoEvent:
    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class NoStream:
    def __init__(self, device: object) -> None: ...

    def synchronize(self) -> None: ...


def replace_cuda() -> None:
    """Everything runs at once, in order, in ordinary memory."""
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream, cuda.stream = NoEvent, NoStream, lambda stream: contextlib.nullcontext()
    cuda.synchronize, cuda.empty_cache = lambda device: None, lambda: None
    cuda.get_device_capability, cuda.mem_get_info = lambda device: (8, 0), lambda device: (10**12, 10**12)
    zeros = torch.zeros
    torch.zeros = lambda *shape, pin_memory=False, **options: zeros(*shape, **options)  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[assignment, method-assign]
    Card.of = classmethod(lambda cls, device: cls(1, is_hopper=False))  # type: ignore[method-assign, assignment]
    cuda_load.array_module = lambda device: np


def make_weights() -> DecoderWeights:
    """Random ones, scaled so that the logits differ clearly."""
    weights = random_weights(CONFIG, torch.float32, CPU)
    for layer in weights.layers:
        for affine in (layer.qkv, layer.out, layer.up, layer.down):
            assert affine is not None
            affine.weight.mul_(8.0)
    weights.embed.mul_(10.0)
    assert weights.head is not None
    weights.head.weight.mul_(20.0)
    return weights


def mask_behind(request: SequenceRequest, num_output_tokens: int) -> bytes:
    """Another fifth of the vocabulary at every token."""
    allowed = [token_id for token_id in range(VOCAB) if (token_id + num_output_tokens) % 5 == 0]
    return sum(1 << token_id for token_id in allowed).to_bytes(4 * -(-VOCAB // 32), "little")


Found = tuple[dict[int, list[Any]], dict[int, list[TokenLogprobs]], dict[int, torch.Tensor], int]


def run(executor: Executor) -> Found:
    """Token ids and finish_reason of every request, its log-probabilities, pooled vectors, number of preemptions."""
    core = EngineCore(executor, grammars=ScriptedGrammars(mask_behind=mask_behind))
    draw = random.Random(3)
    for seq_id, spec in enumerate(SPECS):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([1, 13, 15, 30]))]
        scores = spec.num_prompt_logprobs > 0
        grammar = ("regex", "made up") if spec.is_masked else None
        num_new = draw.randint(6, 14)
        core.add(SequenceRequest(seq_id, prompt, num_new, sampling=spec, score_prompt=scores, grammar=grammar))
    for seq_id, (pooling, length) in enumerate(POOLED, 100):
        prompt = [draw.randrange(VOCAB) for _ in range(length)]
        core.add(SequenceRequest(seq_id, prompt, 0, sampling=SamplingSpec(pooling=pooling)))
    outputs: dict[int, list[Any]] = {seq_id: [] for seq_id in range(len(SPECS))}
    vectors: dict[int, torch.Tensor] = {}
    measured: dict[int, list[TokenLogprobs]] = {seq_id: [] for seq_id in range(len(SPECS))}
    while core.scheduler.has_work:
        for output in core.step():
            assert output.error is None, output.error
            if output.pooled is not None:
                vectors[output.seq_id] = torch.frombuffer(bytearray(output.pooled), dtype=torch.float32)
                continue
            outputs[output.seq_id] += output.token_ids
            measured[output.seq_id] += [*(output.prompt_scores or ()), *(output.logprobs or ())]
            if output.finish_reason:
                outputs[output.seq_id].append(output.finish_reason)
    stats = core.stats()
    assert stats.num_used_blocks == 0
    core.close()
    assert len(vectors) == len(POOLED)
    return outputs, measured, vectors, stats.num_preemptions


def compare_measured(found: dict[int, list[TokenLogprobs]], expected: dict[int, list[TokenLogprobs]]) -> None:
    assert {len(rows) > 0 for rows in found.values()} == {True, False}
    for seq_id, rows in found.items():
        assert [(row.rank, row.top_ids) for row in rows] == [(row.rank, row.top_ids) for row in expected[seq_id]]
        for row, other in zip(rows, expected[seq_id], strict=True):
            numbers, others = ([item.logprob, *item.top_logprobs] for item in (row, other))
            torch.testing.assert_close(torch.tensor(numbers), torch.tensor(others), rtol=1e-3, atol=1e-3)


BANE = 7
"""A token whose embedding is not finite."""


def run_faults(num_blocks: int) -> None:
    """One request without finite logits and one with options that no tensor holds: each ends alone."""
    logging.disable(logging.ERROR)
    weights = make_weights()
    weights.embed[BANE] = float("nan")
    config = EngineConfig(
        model="random", max_sequences=SLOTS, block_size=BLOCK, num_blocks=num_blocks, token_budget=BUDGET
    )
    executor = cuda_load.build_cuda_executor(config, CONFIG, weights, MAX_LEN, use_graphs=False)
    core = EngineCore(executor)
    good = [SequenceRequest(seq_id, [11 + seq_id] * 5, 6, sampling=SPECS[seq_id]) for seq_id in range(2)]
    bad = [
        SequenceRequest(2, [20, BANE, 21] * 6, 6),
        SequenceRequest(4, [20, BANE, 21], 0, sampling=SamplingSpec(pooling="mean")),
        SequenceRequest(3, [30, 31], 6, sampling=SamplingSpec(seed=2**70, temperature=1.0)),
    ]
    found: list[dict[int, list[int]]] = []
    for requests in (good, [*good, *bad], good):
        outputs: dict[int, list[int]] = {request.seq_id: [] for request in requests}
        errors: dict[int, Any] = {}
        for request in requests:
            core.add(request)
        while core.has_work:
            for output in core.step():
                outputs[output.seq_id] += output.token_ids
                if output.error is not None:
                    errors[output.seq_id] = type(output.error)
        assert errors == ({2: NumericError, 3: InternalError, 4: NumericError} if requests[-1].seq_id == 3 else {}), (
            errors
        )
        found.append({request.seq_id: outputs[request.seq_id] for request in good})
    assert found[0] == found[1] == found[2], found
    assert executor._pool.slab.isfinite().all(), "what was not finite was zeroed before the next requests came"
    print(f"{core.stats().num_failed_steps} failed steps")


def main(num_blocks: int, deterministic: bool) -> None:
    warnings.simplefilter("ignore")
    replace_cuda()
    config = EngineConfig(
        model="random", max_sequences=SLOTS, block_size=BLOCK, num_blocks=num_blocks, token_budget=BUDGET,
        deterministic=deterministic,
    )  # fmt: skip
    found, measured, vectors, preemptions = run(
        cuda_load.build_cuda_executor(config, CONFIG, make_weights(), MAX_LEN, use_graphs=False)
    )  # fmt: skip
    pool = KvPool(np, BlockShape(CONFIG.num_layers, 2, BLOCK, 16, torch.float32), num_blocks)
    model = Decoder(CONFIG, make_weights(), kernels.for_device(CPU), CPU, torch.float32)
    limits = EngineLimits(VOCAB, MAX_LEN, num_blocks, BLOCK, SLOTS, BUDGET, scores_prompts=True, hidden_size=32)
    sampler = Sampler(SLOTS, VOCAB, CPU)
    expected, expected_measured, expected_vectors, _ = run(
        ModelExecutor(model, pool, sampler, limits, MemoryBill(0, 0, num_blocks, num_blocks * BLOCK))
    )
    assert found == expected, f"{found}\n{expected}"
    compare_measured(measured, expected_measured)
    for seq_id, vector in vectors.items():
        torch.testing.assert_close(vector, expected_vectors[seq_id], rtol=1e-3, atol=1e-3)
    print(f"{preemptions} preemptions, {sum(map(len, found.values()))} outputs")


if __name__ == "__main__":
    adjust_interpreter()
    if "faults" in sys.argv:
        replace_cuda()
        run_faults(int(sys.argv[1]))
    else:
        main(int(sys.argv[1]), deterministic="deterministic" in sys.argv)
