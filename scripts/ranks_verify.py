#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the GPU engine's numbers on two ranks against one rank and against transformers.

    python scripts/ranks_verify.py

A random llama of 8 layers in bfloat16: the error of two ranks' logits against transformers in float32 is at most 1.1
times that of transformers in bfloat16, over peer memory and over NCCL, for prompts, chunked prompts and decodes; graphs
give the bits of eager runs; both ranks draw the same tokens; and each greedy token is the exact model's best, or as
near to it as bfloat16 can tell. Prints one JSON line. `--dry-run` does it in float32, tiny, between two processes in
Triton's interpreter, on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import zlib
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from kernel_case import DTYPE, F32, IS_INTERPRETED
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.auto import AutoModelForCausalLM
from verify_engine import (
    CONFIGS,
    LENGTHS,
    MAX_LEN,
    WORST_RATIO,
    Driver,
    collect,
    load_reference,
    make_executor,
    reference_logits,
    relative,
)

from tests.worker.rank_processes import Place, run_on_ranks

TINY = LlamaConfig(
    vocab_size=301, hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
)  # fmt: skip
NUM_DECODES = 2 if IS_INTERPRETED else 12
NEAR = 6.0
"""A greedy token may lie so many standard deviations of bfloat16's error below the exact model's best logit."""
Logits = dict[tuple[int, int], Tensor]


def prompts() -> list[list[int]]:
    draw, vocab = random.Random(1), TINY.vocab_size if IS_INTERPRETED else 5000
    return [[draw.randrange(5, vocab) for _ in range(size)] for size in ((3, 17) if IS_INTERPRETED else LENGTHS)]


def run_engine(directory: Path, place: Place | None, use_graphs: bool, chunk: int, num_decodes: int) -> Driver:
    """On this rank of several, or on one rank alone."""
    fields: dict[str, Any] = {}
    if place is not None:
        fields = {"device": place.device, "rank": place.rank, "collectives": place.collectives}
    max_len = MAX_LEN
    if IS_INTERPRETED:
        fields |= {"block_size": 16, "num_blocks": 12, "max_sequences": 3, "kv_cache_gb": None}
        max_len, use_graphs = TINY.max_position_embeddings, False
    executor = make_executor(directory, use_graphs, max_len, **fields)
    driver = collect(executor, prompts(), chunk, num_decodes)
    executor.close()
    return driver


def work(place: Place, directory: Path) -> dict[str, Any]:
    """What each rank does: logits and drawn tokens by the way that they were computed."""
    if IS_INTERPRETED:
        replace_cuda()
    chunk = 16 if IS_INTERPRETED else 50
    runs = {
        "whole": run_engine(directory, place, True, 4096, NUM_DECODES),
        "chunked": run_engine(directory, place, True, chunk, 0),
    }
    if not IS_INTERPRETED:
        runs["eager"] = run_engine(directory, place, False, 4096, NUM_DECODES)
        fallback = getattr(place.collectives, "_fallback", None)
        if fallback is not None:
            over_nccl = Place(place.rank, place.device, fallback)
            runs["nccl"] = run_engine(directory, over_nccl, True, 4096, NUM_DECODES)
            runs["nccl_eager"] = run_engine(directory, over_nccl, False, 4096, NUM_DECODES)
    drawn = [token_id for run in runs.values() for ids in run.drawn.values() for token_id in ids]
    return {
        "runs": {name: (run.logits, run.drawn) for name, run in runs.items()},
        "ranks_agree": place.is_same(zlib.crc32(array("q", drawn).tobytes())),
        "collectives": type(place.collectives).__name__,
    }


def replace_cuda() -> None:
    from tests.worker import cuda_engine_on_cpu

    cuda_engine_on_cpu.adjust_interpreter()
    cuda_engine_on_cpu.replace_cuda()


def judge(found: dict[str, Any], alone: Driver, directory: Path) -> dict[str, Any]:
    exact, half = (load_reference(directory, dtype) for dtype in (F32, DTYPE))
    result: dict[str, Any] = {"test": "two ranks", "collectives": found["collectives"]}
    is_right: bool = found["ranks_agree"]
    for name in ("whole", "nccl"):
        if name not in found["runs"]:
            continue
        logits, drawn = found["runs"][name]
        figures = compare(logits, drawn, alone, exact, half)
        is_right = is_right and figures.pop("is_right")
        result |= {f"{name}_{key}": value for key, value in figures.items()}
    for name, eager in (("whole", "eager"), ("nccl", "nccl_eager")):
        if eager in found["runs"]:
            one, other = found["runs"][name][0], found["runs"][eager][0]
            result[f"{name}_graphs_equal_eager"] = all(torch.equal(one[key], other[key]) for key in one)
            is_right = is_right and result[f"{name}_graphs_equal_eager"]
    whole, chunked = found["runs"]["whole"][0], found["runs"]["chunked"][0]
    between = relative([chunked[key] for key in chunked], [whole[key] for key in chunked])
    result["chunked_against_whole"] = rounded(between)
    limit = 1e-4 if IS_INTERPRETED else 2.0 * result["whole_error"]
    is_right = is_right and result["chunked_against_whole"] <= limit
    return {**result, "ranks_agree": found["ranks_agree"], "passed": bool(is_right)}


def compare(logits: Logits, drawn: dict[int, list[int]], alone: Driver, exact: Any, half: Any) -> dict[str, Any]:
    """Two ranks' logits and tokens with transformers' behind the same tokens, and the tokens with one rank's."""
    driver = Driver.__new__(Driver)
    driver.logits, driver.drawn = logits, drawn
    wanted = reference_logits(exact, driver, prompts())
    theirs = reference_logits(half, driver, prompts())
    keys = list(wanted)
    reference = [wanted[key] for key in keys]
    error, their_error = (relative([found[key] for key in keys], reference) for found in (logits, theirs))
    spread = float(torch.stack([theirs[key] - wanted[key] for key in keys]).std())
    gaps = [
        float(wanted[slot, position].max() - wanted[slot, position][drawn[slot][position - len(prompts()[slot])]])
        for slot, position in keys
    ]
    ties = sum(gap > 0 for gap in gaps)
    different = sum(drawn[slot] != alone.drawn[slot] for slot in drawn)
    tolerance = 1e-4 if IS_INTERPRETED else NEAR * spread
    is_small = error < 1e-4 if IS_INTERPRETED else error <= WORST_RATIO * their_error
    return {
        "error": rounded(error), "transformers_error": rounded(their_error), "tokens": len(gaps), "near_ties": ties,
        "largest_gap": rounded(max(gaps)), "tolerance": rounded(tolerance),
        "sequences_unlike_one_rank": different, "is_right": is_small and max(gaps) <= tolerance,
    }  # fmt: skip


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny, in Triton's interpreter, without GPUs")
    args = parser.parse_args()
    if not args.dry_run and torch.cuda.device_count() < 2:
        sys.exit(f"two GPUs are needed, and torch finds {torch.cuda.device_count()} (--dry-run does without)")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "llama"
        torch.manual_seed(0)
        config = TINY if IS_INTERPRETED else CONFIGS["llama"]
        AutoModelForCausalLM.from_config(config).to(DTYPE).save_pretrained(directory)
        found = run_on_ranks(work, directory, on_gpu=not IS_INTERPRETED)
        if IS_INTERPRETED:
            replace_cuda()
        alone = run_engine(directory, None, True, 4096, NUM_DECODES)
        result = judge(found, alone, directory)
    print(json.dumps(result), flush=True)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
