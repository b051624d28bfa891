#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the GPU engine's numbers on a GPU: against transformers, and against itself by other routes.

    python scripts/verify_engine.py
    python scripts/verify_engine.py --deterministic

Random 8-layer models of three families: the error of our logits against transformers in float32 is at most 1.1 times
that of transformers in the same 16-bit dtype, for prompts, chunked prompts and decodes; graphs give the bits of eager
runs; embeddings err hardly more than theirs; sequences that are preempted end with the length asked for. With
`--deterministic`, instead of these, what that mode promises (`verify_deterministic`).
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from kernel_case import DEVICE, DTYPE
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig, PreTrainedModel, Qwen3Config
from verify_deterministic import check_deterministic

from mii_zmq.config import EngineConfig
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.cuda_batch import row_order
from mii_zmq.worker.cuda_executor import CudaExecutor
from mii_zmq.worker.cuda_load import build_cuda_executor
from mii_zmq.worker.models.hf_config import load_model_config
from mii_zmq.worker.models.weights import load_weights
from mii_zmq.worker.parallel import Collectives, RankInfo
from mii_zmq.worker.plan import POOLINGS, NewSequence, SamplingSpec, SequenceRequest, StepPlan, StepRow

MAX_LEN = 1024
SIZES: dict[str, Any] = {
    "vocab_size": 5003,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "max_position_embeddings": MAX_LEN,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(
        **SIZES, intermediate_size=2816, num_attention_heads=8, num_key_value_heads=2, head_dim=128
    ),
    "qwen3": Qwen3Config(
        **SIZES, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=64,
        tie_word_embeddings=True,
    ),
    "opt": OPTConfig(
        **SIZES, ffn_dim=4096, num_attention_heads=16, word_embed_proj_dim=1024, activation_function="relu"
    ),
}  # fmt: skip
LENGTHS = (1, 2, 5, 63, 64, 65, 130, 300, 700, 17, 128, 900)
WORST_RATIO = 1.1
WORST_POOLED_RATIO = 1.3
"""Of fewer numbers."""


class Driver:
    """Feeds an executor by hand and keeps the logits of every sampled token by (slot, position)."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.executor = executor
        self.logits: dict[tuple[int, int], Tensor] = {}
        self.drawn: dict[int, list[int]] = {}
        self._step = 0
        self._blocks = -(-executor.limits.max_model_len // executor.limits.block_size)

    def run(self, rows: list[tuple[int, int, int, bool]], new: dict[int, list[int]] | None = None) -> None:
        """One step of rows (slot, start, tokens, sample)."""
        self._step += 1
        added = []
        for slot, token_ids in (new or {}).items():
            table = list(range(slot * self._blocks, (slot + 1) * self._blocks))
            random.Random(slot).shuffle(table)
            added.append(NewSequence(slot, token_ids, len(token_ids), table, SamplingSpec()))
            self.drawn[slot] = []
        step_rows = [StepRow(slot, start, count, sample) for slot, start, count, sample in rows]
        pending = self.executor.submit(StepPlan(self._step, step_rows, added))
        result = pending.result()
        sampled = [(slot, start + count) for slot, start, count, sample in rows if sample]
        if result.failed or len(result.token_ids) != len(sampled):
            raise SystemExit(f"step {self._step}: {result}")
        logits = self.executor.logits(len(sampled)).float().cpu()
        order = [row.slot for row in sorted(step_rows, key=row_order) if row.sample]
        for (slot, position), token_id in zip(sampled, result.token_ids, strict=True):
            self.logits[slot, position] = logits[order.index(slot)]
            self.drawn[slot].append(token_id)
            if int(logits[order.index(slot)].argmax()) != token_id:
                raise SystemExit(f"slot {slot} drew {token_id}, which is not the largest logit")


def collect(executor: CudaExecutor, prompts: list[list[int]], chunk: int, num_decodes: int) -> Driver:
    """Prompts in chunks (a step takes one chunk of every prompt), then decodes, all sequences in one batch."""
    driver = Driver(executor)
    done = [0] * len(prompts)
    new = dict(enumerate(prompts))
    while any(done[slot] < len(prompt) for slot, prompt in enumerate(prompts)):
        rows = []
        for slot, prompt in enumerate(prompts):
            count = min(chunk, len(prompt) - done[slot])
            if count > 0:
                rows.append((slot, done[slot], count, done[slot] + count == len(prompt)))
                done[slot] += count
        driver.run(rows, new)
        new = {}
    for index in range(num_decodes):
        driver.run([(slot, len(prompt) + index, 1, True) for slot, prompt in enumerate(prompts)])
    return driver


def relative(found: list[Tensor], expected: list[Tensor]) -> float:
    error = torch.stack(found).double() - torch.stack(expected).double()
    return float(error.norm() / torch.stack(expected).double().norm())


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, driver: Driver, prompts: list[list[int]]) -> dict[tuple[int, int], Tensor]:
    wanted = {}
    for slot, prompt in enumerate(prompts):
        token_ids = torch.tensor([prompt + driver.drawn[slot]], device=DEVICE)
        logits = model(token_ids).logits[0].float().cpu()
        for position in range(len(prompt), token_ids.shape[1]):
            wanted[slot, position] = logits[position - 1]
    return wanted


def load_reference(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.to(DEVICE)  # type: ignore[no-any-return]


def make_executor(
    directory: Path,
    use_graphs: bool = True,
    max_len: int = MAX_LEN,
    *,
    device: torch.device = DEVICE,
    rank: RankInfo | None = None,
    collectives: Collectives | None = None,
    **fields: Any,
) -> CudaExecutor:
    """`device`, `rank` and `collectives` belong to one of several ranks."""
    settings = {"token_budget": 4096, "max_sequences": 64, "kv_cache_gb": 2.0, **fields}
    config = EngineConfig(model=str(directory), **settings)
    model_config = load_model_config(directory)
    weights = load_weights(directory, model_config, DTYPE, device, rank)
    return build_cuda_executor(
        config, model_config, weights, max_len, use_graphs=use_graphs, rank=rank, collectives=collectives
    )


def check_family(name: str, directory: Path) -> bool:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).to(DTYPE)
    model.save_pretrained(directory)
    executor = make_executor(directory)
    draw = random.Random(1)
    prompts = [[draw.randrange(5, 5000) for _ in range(length)] for length in LENGTHS]
    whole = collect(executor, prompts, 4096, 6)
    exact, half = (load_reference(directory, dtype) for dtype in (torch.float32, DTYPE))
    wanted = reference_logits(exact, whole, prompts)
    theirs = reference_logits(half, whole, prompts)
    keys = list(wanted)
    own_error = relative([whole.logits[key] for key in keys], [wanted[key] for key in keys])
    their_error = relative([theirs[key] for key in keys], [wanted[key] for key in keys])
    eager = collect(make_executor(directory, use_graphs=False), prompts, 4096, 6)
    is_equal = all(torch.equal(eager.logits[key], whole.logits[key]) for key in keys)
    prompt_keys = [(slot, len(prompt)) for slot, prompt in enumerate(prompts)]
    chunked = collect(make_executor(directory), prompts, 50, 0)
    between = relative([chunked.logits[k] for k in prompt_keys], [wanted[k] for k in prompt_keys])
    solo = collect(make_executor(directory), prompts[6:7], 4096, 6)
    agreed = 0
    while agreed < 6 and solo.drawn[0][agreed] == whole.drawn[6][agreed]:
        agreed += 1
    same = [len(prompts[6]) + index for index in range(agreed + 1)]
    alone = relative([solo.logits[0, position] for position in same], [wanted[6, position] for position in same])
    ratio = own_error / their_error
    ok = ratio <= WORST_RATIO and is_equal and between <= WORST_RATIO * their_error * 1.1 and alone <= 1.3 * their_error
    print(
        f"{name}: error {own_error:.5f}, transformers' {their_error:.5f}, ratio {ratio:.3f}; chunked {between:.5f}; "
        f"alone {alone:.5f} ({len(same)} tokens); graph == eager: {is_equal}; {'ok' if ok else 'WRONG'}",
        flush=True,
    )
    return ok


@torch.inference_mode()
def reference_state(model: Any, prompt: list[int], pooling: str) -> Tensor:
    states = model.base_model(torch.tensor([prompt], device=DEVICE)).last_hidden_state[0].float().cpu()
    return {"last": states[-1], "first": states[0], "mean": states.mean(0)}[pooling]


def check_pooling(name: str, directory: Path) -> bool:
    """Embeddings of prompts in chunks, beside sequences that generate."""
    core = EngineCore(make_executor(directory, token_budget=256), prefix_cache=False)
    draw = random.Random(4)
    wanted = {}
    for seq_id, (length, pooling) in enumerate(itertools.product(LENGTHS, POOLINGS)):
        prompt = [draw.randrange(5, 5000) for _ in range(length)]
        wanted[seq_id] = (prompt, pooling)
        core.add(SequenceRequest(seq_id, prompt, 0, sampling=SamplingSpec(pooling=pooling)))
        core.add(SequenceRequest(1000 + seq_id, prompt[:40], 8))
    found: dict[int, Tensor] = {}
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise SystemExit(f"sequence {output.seq_id}: {output.error}")
            if output.pooled is not None:
                found[output.seq_id] = torch.frombuffer(bytearray(output.pooled), dtype=torch.float32)
    exact, half = (load_reference(directory, dtype) for dtype in (torch.float32, DTYPE))
    ok, words = found.keys() == wanted.keys(), []
    for kind in POOLINGS:
        chosen = [seq_id for seq_id, (_, pooling) in wanted.items() if pooling == kind]
        expected = [reference_state(exact, *wanted[seq_id]) for seq_id in chosen]
        own_error = relative([found[seq_id] for seq_id in chosen], expected)
        their_error = relative([reference_state(half, *wanted[seq_id]) for seq_id in chosen], expected)
        ok = ok and own_error <= WORST_POOLED_RATIO * their_error
        words.append(f"{kind} {own_error:.2g} (transformers' {their_error:.2g})")
    print(f"{name}, pooled: {', '.join(words)}; {'ok' if ok else 'WRONG'}", flush=True)
    return ok


def check_preemption(directory: Path) -> bool:
    """64 greedy sequences in a pool for about a third of them."""
    core = EngineCore(make_executor(directory, num_blocks=150), prefix_cache=True)
    draw = random.Random(2)
    wanted = {}
    for seq_id in range(64):
        prompt = [draw.randrange(5, 5000) for _ in range(draw.randint(1, 300))]
        wanted[seq_id] = draw.randint(1, 200)
        core.add(SequenceRequest(seq_id, prompt, wanted[seq_id]))
    counts = dict.fromkeys(wanted, 0)
    reasons = set()
    while core.has_work:
        for output in core.step():
            counts[output.seq_id] += len(output.token_ids)
            reasons.add(output.finish_reason)
    stats = core.stats()
    ok = counts == wanted and reasons == {None, "length"} and stats.num_used_blocks == 0 and stats.num_preemptions > 0
    print(f"preemption: {stats.num_preemptions} preemptions, {reasons}; {'ok' if ok else 'WRONG'}", flush=True)
    return ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deterministic", action="store_true", help="check the deterministic mode")
    if parser.parse_args().deterministic:
        sys.exit(0 if check_deterministic() else 1)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        results += [check_family(name, Path(scratch) / name) for name in CONFIGS]
        results += [check_pooling(name, Path(scratch) / name) for name in CONFIGS]
        results.append(check_preemption(Path(scratch) / "llama"))
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
