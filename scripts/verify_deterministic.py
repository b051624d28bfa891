# SPDX-License-Identifier: Apache-2.0
"""Checks of the deterministic mode on a GPU, for `verify_engine.py --deterministic`.

Bit by bit: rows of the GEMM alone and among others; logits and greedy tokens of random 8-layer models by graphs and
eagerly, in chunks and whole, alone and in a batch of 64; and 10,000 requests of mixed settings in a pool that is too
small for them, of which 200 are run again alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mixed_requests import LIMITS, mixed_requests
from torch import Tensor

from mii_zmq.config import EngineConfig
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.cuda_batch import row_order
from mii_zmq.worker.cuda_executor import CudaExecutor
from mii_zmq.worker.cuda_load import build_cuda_executor
from mii_zmq.worker.models.cuda_buffers import Card
from mii_zmq.worker.models.cuda_gemm import FEW, MANY
from mii_zmq.worker.models.cuda_invariant_linear import InvariantLinear
from mii_zmq.worker.models.cuda_linear import Scratch
from mii_zmq.worker.models.model_weights import DecoderWeights
from mii_zmq.worker.models.random_weights import SHAPES, random_weights
from mii_zmq.worker.models.spec import ModelConfig, RopeConfig
from mii_zmq.worker.plan import NewSequence, SamplingSpec, SequenceRequest, StepPlan, StepRow

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
MAX_LEN = 512
LLAMA = replace(
    SHAPES["8B"], vocab_size=32003, hidden_size=1024, intermediate_size=2816, num_layers=8, num_heads=8,
    num_kv_heads=2, windows=(None,) * 8, ropes=SHAPES["8B"].ropes[:8], max_position_embeddings=MAX_LEN,
)  # fmt: skip
QWEN3 = replace(
    SHAPES["0.6B"], vocab_size=32003, num_layers=8, num_heads=16, num_kv_heads=8, head_dim=64, scale=64**-0.5,
    windows=(None, 100) * 4, ropes=(RopeConfig(1e6, rotary_dim=64),) * 8, max_position_embeddings=MAX_LEN,
)  # fmt: skip
"""With a sliding window in every other layer, which the family does not have, to cover it."""
FAMILIES = {"llama": LLAMA, "qwen3": QWEN3}
NUM_PROMPTS, NUM_OUTPUTS = 64, 48
NUM_SOLO = 200
GEMMS = ((4096, 4096), (28672, 4096), (4096, 14336), (5003, 1088))
"""(N, K)."""
ROW_COUNTS = (1, 2, 63, 64, 65, 128, 200, 1000, 8192)

Tokens = dict[int, list[int]]
Logits = dict[tuple[int, int], Tensor]


class Wrong(Exception):
    """A run that did not end as it should."""


def make_executor(config: ModelConfig, use_graphs: bool = True, **fields: Any) -> CudaExecutor:
    engine_config = EngineConfig(model="random", deterministic=True, **fields)
    return build_cuda_executor(engine_config, config, lively_weights(config), MAX_LEN, use_graphs=use_graphs)


def lively_weights(config: ModelConfig) -> DecoderWeights:
    """Random ones, large enough that layers outweigh the embedding: the next token depends on all before it."""
    weights = random_weights(config, DTYPE, DEVICE)
    for layer in weights.layers:
        for affine in (layer.qkv, layer.out, layer.up, layer.down):
            if affine is not None:
                affine.weight.mul_(4.0)
    return weights


def run(core: EngineCore, requests: Iterable[SequenceRequest]) -> Tokens:
    """The tokens of every request, which must end with the length asked for."""
    wanted = {}
    for request in requests:
        core.add(request)
        wanted[request.seq_id] = request.max_new_tokens
    found: Tokens = {seq_id: [] for seq_id in wanted}
    num_ended = 0
    while core.has_work:
        for output in core.step():
            if output.finish_reason not in (None, "length"):
                raise Wrong(f"request {output.seq_id} ended with {output.finish_reason}: {output.error}")
            found[output.seq_id] += output.token_ids
            num_ended += output.finish_reason == "length"
    short = [seq_id for seq_id, count in wanted.items() if len(found[seq_id]) != count]
    if short or num_ended != len(wanted) or core.stats().num_used_blocks:
        raise Wrong(f"{len(short)} requests of the wrong length, {num_ended} ended, {core.stats()}")
    return found


def check_gemm() -> bool:
    """Rows among 8,192 others against the same rows in smaller batches, in both tile sizes."""
    ok = True
    card = Card.of(DEVICE)
    none = Scratch(*(torch.empty(0, device=DEVICE),) * 4)
    for num_out, width in GEMMS:
        weight = torch.randn(num_out, width, dtype=DTYPE, device=DEVICE)
        bias = torch.randn(num_out, dtype=DTYPE, device=DEVICE)
        linear = InvariantLinear(weight, bias, none, pdl=card.is_hopper, num_processors=card.num_processors)
        x = torch.randn(ROW_COUNTS[-1], width, dtype=DTYPE, device=DEVICE)
        whole = torch.full((len(x), num_out), float("nan"), dtype=DTYPE, device=DEVICE)
        linear.multiply(x, whole, MANY)
        exact = torch.addmm(bias.float(), x[:256].float(), weight.float().t())
        error = float((whole[:256].float() - exact).norm() / exact.norm())
        wrong = []
        for count in ROW_COUNTS:
            rows = torch.randperm(len(x), device=DEVICE)[:count]
            for tiles in (FEW, MANY):
                out = torch.full((count, num_out), float("nan"), dtype=DTYPE, device=DEVICE)
                linear.multiply(x[rows], out, tiles)
                if not torch.equal(out, whole[rows]):
                    wrong.append((count, tiles.tile_m))
        many = seconds(lambda linear=linear, x=x, whole=whole: linear.multiply(x, whole, MANY))
        one = seconds(lambda linear=linear, x=x, whole=whole: linear.multiply(x[:1], whole[:1], FEW))
        batch = seconds(
            lambda linear=linear, x=x, whole=whole: linear.multiply(x[:256], whole[:256], linear.tiles(256))
        )
        print(
            f"gemm {num_out} x {width}: error {error:.5f}; 8192 rows {2e-12 * num_out * width * len(x) / many:.0f} "
            f"TFLOP/s; 256 rows {1e6 * batch:.1f} us; 1 row {1e-12 * weight.nbytes / one:.2f} TB/s; "
            + (f"bits differ for (rows, tile) {wrong}: WRONG" if wrong else "all bits equal"),
            flush=True,
        )
        ok = ok and not wrong and error < 1e-2
    return ok


def seconds(work: Any, repeat: int = 20) -> float:
    """Of one call, in a graph of `repeat` calls, the fastest of three."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            work()
    best = float("inf")
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / repeat)
    return best


class LogitsDriver:
    """Feeds an executor by hand and keeps the logits of every sampled token by (sequence, position)."""

    def __init__(self, executor: CudaExecutor, prompts: list[list[int]]) -> None:
        self._executor, self._prompts = executor, prompts
        self._step = 0
        self._blocks = -(-MAX_LEN // executor.limits.block_size)

    def collect(self, chunk: int, num_decodes: int = 6, alone: bool = False) -> Logits:
        """Prompts `chunk` tokens at a time, all sequences in one batch or one after the other, then decodes."""
        everyone = list(range(len(self._prompts)))
        logits: Logits = {}
        for sequences in [[seq] for seq in everyone] if alone else [everyone]:
            self._run(sequences, chunk, num_decodes, logits)
        return logits

    def _run(self, sequences: list[int], chunk: int, num_decodes: int, logits: Logits) -> None:
        sizes = [len(self._prompts[seq]) for seq in sequences]
        new = [
            NewSequence(slot, self._prompts[seq], sizes[slot], self._table(slot), SamplingSpec())
            for slot, seq in enumerate(sequences)
        ]
        done = [0] * len(sequences)
        ends = [size + num_decodes for size in sizes]
        while done != ends:
            rows = []
            for slot, size in enumerate(sizes):
                left = size - done[slot]
                count = min(chunk, left) if left > 0 else min(1, ends[slot] - done[slot])
                if count:
                    rows.append(StepRow(slot, done[slot], count, left <= count))
                    done[slot] += count
            self._submit(rows, new)
            new = []
            sampled = [row for row in sorted(rows, key=row_order) if row.sample]
            for row, values in zip(sampled, self._executor.logits(len(sampled)), strict=True):
                logits[sequences[row.slot], row.start + row.num_tokens] = values
        self._submit([], freed=list(range(len(sequences))))

    def _table(self, slot: int) -> list[int]:
        return list(range(slot * self._blocks, (slot + 1) * self._blocks))

    def _submit(
        self, rows: list[StepRow], new: list[NewSequence] | None = None, freed: list[int] | None = None
    ) -> None:
        self._step += 1
        result = self._executor.submit(StepPlan(self._step, rows, new or [], freed or [])).result()
        if result.failed:
            raise Wrong(f"step {self._step}: {result.failed}")


def check_family(name: str, config: ModelConfig) -> bool:
    draw = random.Random(1)
    prompts = [[draw.randrange(config.vocab_size) for _ in range(draw.randint(32, 400))] for _ in range(NUM_PROMPTS)]
    requests = [SequenceRequest(index, prompt, NUM_OUTPUTS) for index, prompt in enumerate(prompts)]
    sizes: dict[str, Any] = {"max_sequences": 64, "kv_cache_gb": 2.0}
    large = {**sizes, "token_budget": 4096}
    some = [prompts[index] for index in (0, 7, 20, 33, 41, 63)]
    driver = LogitsDriver(make_executor(config, **large), some)
    expected = driver.collect(4096)
    logits = {
        "eager": LogitsDriver(make_executor(config, use_graphs=False, **large), some).collect(4096),
        "in chunks": driver.collect(37),
        "alone": driver.collect(4096, alone=True),
    }
    bits = {route: same_bits(expected, other) for route, other in logits.items()}
    core = EngineCore(make_executor(config, **large), prefix_cache=False)
    whole = run(core, requests)
    tokens: dict[str, Tokens] = {
        "eager": run(EngineCore(make_executor(config, use_graphs=False, **large)), requests),
        "in chunks": run(EngineCore(make_executor(config, token_budget=64, **sizes)), requests),
        "alone": {},
    }
    for request in requests:
        tokens["alone"] |= run(core, [request])
    equal = {route: sum(found[index] == whole[index] for index in whole) for route, found in tokens.items()}
    distinct = sum(len(set(found)) for found in whole.values()) / len(whole)
    ok = all(bits.values()) and set(equal.values()) == {NUM_PROMPTS}
    print(
        f"{name}: bits of logits equal {bits}; sequences of {NUM_PROMPTS} with equal tokens {equal}, "
        f"{distinct:.0f} of {NUM_OUTPUTS} tokens distinct; {'ok' if ok else 'WRONG'}",
        flush=True,
    )
    return ok


def same_bits(one: Logits, other: Logits) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key].view(torch.int16), other[key].view(torch.int16)) for key in one
    )


def check_many() -> bool:
    config = SHAPES["0.6B"]
    executor = make_executor(config, max_sequences=LIMITS.max_sequences, num_blocks=LIMITS.num_blocks)
    core = EngineCore(executor, prefix_cache=False)
    requests = mixed_requests(config.vocab_size)
    begin = time.perf_counter()
    found = run(core, requests)
    middle = time.perf_counter()
    stats = core.stats()
    picked = random.Random(6).sample(requests, NUM_SOLO)
    wrong = [request.seq_id for request in picked if run(core, [request])[request.seq_id] != found[request.seq_id]]
    end = time.perf_counter()
    ok = not wrong and stats.num_preemptions > 0 and stats.num_used_blocks == 0
    print(
        f"{len(requests)} requests: {sum(map(len, found.values()))} tokens in {middle - begin:.1f} s, all as long as "
        f"asked for, {stats.num_preemptions} preemptions, {stats.num_used_blocks} blocks used at the end; of "
        f"{NUM_SOLO} run again alone in {end - middle:.1f} s {len(wrong)} differ {wrong[:5]}; "
        f"{'ok' if ok else 'WRONG'}",
        flush=True,
    )
    return ok


def check_deterministic() -> bool:
    results = []
    checks: dict[str, Callable[[], bool]] = {"gemm": check_gemm}
    checks |= {name: partial(check_family, name, config) for name, config in FAMILIES.items()}
    checks["many"] = check_many
    for name, check in checks.items():
        begin = time.perf_counter()
        try:
            results.append(check())
        except Wrong as error:
            print(f"{name}: {error}: WRONG", flush=True)
            results.append(False)
        torch.cuda.empty_cache()
        print(f"{name} took {time.perf_counter() - begin:.1f} s", flush=True)
    return all(results)
