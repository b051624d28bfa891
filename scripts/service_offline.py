#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The requests of `bench_service` through the engine alone: what a worker's engine process runs, without sockets.

    python scripts/service_offline.py --model random:8B --tokenizer DIR --levels 64:512,256:1024

Loads the model with the settings that the worker gets, and keeps so many of a level's requests in the engine until all
are done. One JSON line per level; the process is `bench_service`'s child, so that the card is free afterwards.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mii_zmq.bench_datasets import RandomOptions, make_prompts
from mii_zmq.command_line import add_arguments, from_arguments
from mii_zmq.config import EngineConfig
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.engine_process import load_engine
from mii_zmq.worker.plan import SequenceRequest

WARM_UP_OUTPUTS = 4


def level_seed(concurrency: int) -> str:
    """Of a level's prompts, here and in the service."""
    return f"level {concurrency}"


def levels(text: str) -> list[tuple[int, int]]:
    """'64:512,256:1024' -> (concurrency, requests) of each level."""
    pairs = [part.split(":") for part in text.split(",")]
    return [(int(concurrency), int(count)) for concurrency, count in pairs]


def run_level(core: EngineCore, requests: list[SequenceRequest], concurrency: int) -> dict[str, float]:
    """A closed loop: as one request ends, the next one comes. Seconds from the first one's coming to the last end."""
    waiting = iter(requests)
    gc.collect()
    begin = time.perf_counter()
    first_step = core.stats().step
    for request in itertools.islice(waiting, concurrency):
        core.add(request)
    num_tokens = 0
    while core.has_work:
        for output in core.step():
            num_tokens += len(output.token_ids)
            if output.finish_reason is None:
                continue
            if output.finish_reason != "length":
                raise SystemExit(f"a sequence ended with {output.finish_reason}: {output.error}")
            following = next(waiting, None)
            if following is not None:
                core.add(following)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "output_tokens": num_tokens, "steps": core.stats().step - first_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser, EngineConfig)
    parser.add_argument("--levels", type=levels, required=True, help="as CONCURRENCY:REQUESTS,...")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, required=True, help="ids of prompts are below")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    begin = time.perf_counter()
    core, _ = load_engine(from_arguments(args, EngineConfig), lambda message: None)
    print(json.dumps({"test": "offline start", "seconds": round(time.perf_counter() - begin, 2)}), flush=True)
    gc.collect()
    gc.freeze()
    number = iter(range(1 << 60))
    for concurrency, count in args.levels:
        prompts = make_prompts(
            RandomOptions(args.input_len, args.output_len), count, level_seed(concurrency), args.vocab_size,
            as_text=False,
        )  # fmt: skip
        warm_ups = make_prompts(
            RandomOptions(args.input_len, WARM_UP_OUTPUTS), concurrency, "warm-up", args.vocab_size, as_text=False
        )
        batches = [
            [SequenceRequest(next(number), list(prompt.content), prompt.output_tokens) for prompt in batch]
            for batch in (warm_ups, prompts)
        ]
        run_level(core, batches[0], concurrency)
        found = run_level(core, batches[1], concurrency)
        line = {
            "test": f"offline {concurrency}", "concurrency": concurrency, "requests": count,
            "output_tokens_per_s": round(found["output_tokens"] / found["seconds"], 1),
            "seconds": round(found["seconds"], 3), "steps": found["steps"],
            "steps_per_s": round(found["steps"] / found["seconds"], 1),
            "tokens_per_step": round(found["output_tokens"] / found["steps"], 1),
        }  # fmt: skip
        print(json.dumps(line), flush=True)
    core.close()


if __name__ == "__main__":
    main()
