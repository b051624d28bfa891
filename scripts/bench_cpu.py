# SPDX-License-Identifier: Apache-2.0
"""Engine against transformers' `generate` on this CPU: same model, same threads, float32, greedy, taken in turns.

    python scripts/bench_cpu.py [--model demo] [--threads 2] [--repeats 5] [--only decode batch prefix]

Cases: `decode` (one request, time per token after the first), `batch` (16 requests at once, prompts uniform 32-512,
outputs uniform 16-128 tokens, seed 0; transformers pads them into one batch), `prefix` (time to the first token of a
prompt of 1,000 tokens seen before plus 8 new ones, against one never seen). One JSON line per repeat, then a table
of medians. `--random` uses an untrained checkpoint of SmolLM2-135M's shape. Speed on a shared machine drifts; only
the ratios of one run mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria
from transformers.models.auto import AutoModelForCausalLM

from mii_zmq.config import EngineConfig
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.loading import load_executor
from mii_zmq.worker.models.demo_model import resolve_model
from mii_zmq.worker.plan import SamplingSpec, SequenceRequest

DECODE_PROMPT, DECODE_TOKENS = 64, 64
NUM_REQUESTS = 16
PREFIX_TOKENS, SUFFIX_TOKENS = 1000, 8


class Clock(StoppingCriteria):
    """Notes when transformers has each token; never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Bench:
    """Both engines over one checkpoint."""

    def __init__(self, directory: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.reference.generation_config.eos_token_id = None
        self.reference.generation_config.pad_token_id = 0
        config = EngineConfig(model=directory, dtype="float32", device="cpu", num_threads=threads)
        self.core = EngineCore(load_executor(config))
        self._vocab_size = self.core.limits.vocab_size
        self._next_id = 0
        self._random = random.Random(0)

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(10, self._vocab_size) for _ in range(length)]

    def run(self, requests: list[tuple[list[int], int]]) -> list[list[float]]:
        """Per request, the time of each token since all were handed in."""
        begin = time.perf_counter()
        times: dict[int, list[float]] = {}
        for token_ids, num_tokens in requests:
            times[self._next_id] = []
            self.core.add(SequenceRequest(self._next_id, token_ids, num_tokens, SamplingSpec()))
            self._next_id += 1
        while self.core.has_work:
            for output in self.core.step():
                now = time.perf_counter() - begin
                if output.error:
                    raise SystemExit(f"sequence {output.seq_id} failed: {output.error}")
                times[output.seq_id] += [now] * len(output.token_ids)
        assert [len(t) for t in times.values()] == [n for _, n in requests]
        return list(times.values())

    @torch.inference_mode()
    def run_reference(self, prompts: list[list[int]], num_tokens: int) -> list[float]:
        """The time of each token of a left-padded batch."""
        begin = time.perf_counter()
        width = max(map(len, prompts))
        input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, token_ids in enumerate(prompts):
            input_ids[row, width - len(token_ids) :] = torch.tensor(token_ids)
            mask[row, width - len(token_ids) :] = 1
        clock = Clock()
        self.reference.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            stopping_criteria=[clock],
        )
        return [moment - begin for moment in clock.times]

    def decode(self) -> tuple[float, float]:
        """(ours, theirs) in seconds per token."""
        token_ids = self.prompt(DECODE_PROMPT)
        (ours,) = self.run([(token_ids, DECODE_TOKENS)])
        theirs = self.run_reference([token_ids], DECODE_TOKENS)
        return tuple((t[-1] - t[0]) / (DECODE_TOKENS - 1) for t in (ours, theirs))  # type: ignore[return-value]

    def batch(self) -> tuple[float, float]:
        """(ours, theirs) in seconds for all 16 requests."""
        lengths = random.Random(0)
        requests = [(self.prompt(lengths.randint(32, 512)), lengths.randint(16, 128)) for _ in range(NUM_REQUESTS)]
        ours = max(times[-1] for times in self.run(requests))
        theirs = self.run_reference([token_ids for token_ids, _ in requests], max(n for _, n in requests))[-1]
        return ours, theirs

    def prefix(self) -> tuple[float, float]:
        """Seconds to the first token behind a (known, unknown) prefix; both are ours."""
        prefix = self.prompt(PREFIX_TOKENS)
        unknown, known = (self.run([(prefix + self.prompt(SUFFIX_TOKENS), 1)])[0][0] for _ in range(2))
        return known, unknown


def random_checkpoint(directory: str) -> None:
    """An untrained model of SmolLM2-135M's shape."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--only", nargs="+", choices=["decode", "batch", "prefix"], default=["decode", "batch", "prefix"]
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.random:
            random_checkpoint(scratch)
        bench = Bench(scratch if options.random else resolve_model(options.model), options.threads)
        try:
            run_cases(bench, options.only, options.repeats)
        finally:
            bench.core.close()


def run_cases(bench: Bench, names: list[str], repeats: int) -> None:
    cases: dict[str, Callable[[], tuple[float, float]]] = {
        "decode": bench.decode, "batch": bench.batch, "prefix": bench.prefix,
    }  # fmt: skip
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for name in names:
        cases[name]()
    for repeat in range(repeats):
        for name in names:
            ours, other = cases[name]()
            results[name].append((ours, other))
            line = {"case": name, "repeat": repeat, "ours_s": round(ours, 5), "other_s": round(other, 5)}
            print(json.dumps({**line, "speedup": round(other / ours, 3)}), flush=True)
    print(f"{'case':8} {'ours s':>9} {'other s':>9} {'median speedup':>15} {'range':>15}")
    for name, pairs in results.items():
        ours, other = (statistics.median(values) for values in zip(*pairs, strict=True))
        ratios = [theirs / mine for mine, theirs in pairs]
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        print(f"{name:8} {ours:9.4f} {other:9.4f} {statistics.median(ratios):15.2f} {spread:>15}")


if __name__ == "__main__":
    main()
