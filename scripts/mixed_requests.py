#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""10,000 requests of mixed settings for a pool that is too small for them, and what the scheduler makes of them.

    python scripts/mixed_requests.py        # counts steps and preemptions on a CPU, with a fake model

A sequence is preempted only when no other is about to end, for then its blocks are worth waiting for. So requests come
in groups that ask for equally many tokens: they start together, grow together, and find no room together.
"""

from __future__ import annotations

import argparse
import json
import random

from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.fake import FakeExecutor
from mii_zmq.worker.plan import EngineLimits, SamplingSpec, SequenceRequest

NUM_REQUESTS = 10_000
GROUP_SIZE = 200
VOCAB_SIZE = 151_936
LIMITS = EngineLimits(
    vocab_size=VOCAB_SIZE, max_model_len=512, num_blocks=192, block_size=64, max_sequences=256, token_budget=4096
)
"""256 sequences fill about 480 blocks."""


def mixed_requests(vocab_size: int, num_requests: int = NUM_REQUESTS) -> list[SequenceRequest]:
    """Greedy, sampled, filtered and penalised ones side by side."""
    draw = random.Random(5)
    requests = []
    num_tokens = 0
    for seq_id in range(num_requests):
        if seq_id % GROUP_SIZE == 0:
            num_tokens = draw.randint(8, 64)
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(16, 128))]
        sampling = draw.choice(
            [
                SamplingSpec(),
                SamplingSpec(seed=seq_id, temperature=0.8, top_k=50, top_p=0.9),
                SamplingSpec(seed=seq_id, temperature=1.0),
                SamplingSpec(seed=seq_id, temperature=0.7, min_p=0.05),
                SamplingSpec(seed=seq_id, temperature=0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3),
                SamplingSpec(frequency_penalty=0.5),
            ]
        )
        requests.append(SequenceRequest(seq_id, prompt, num_tokens, sampling=sampling))
    return requests


def simulate(limits: EngineLimits, requests: list[SequenceRequest], step_ms: float) -> dict[str, float]:
    """What the scheduler does with them when a step takes so long; no time passes."""
    executor = FakeExecutor(limits)
    steps = 0
    core = EngineCore(executor, prefix_cache=False, clock=lambda: steps * step_ms / 1e3)
    for request in requests:
        core.add(request)
    num_tokens = 0
    while core.has_work:
        steps += 1
        num_tokens += sum(len(output.token_ids) for output in core.step())
    stats = core.stats()
    core.close()
    wanted = sum(request.max_new_tokens for request in requests)
    if num_tokens != wanted or stats.num_used_blocks or executor.violations:
        raise SystemExit(f"{num_tokens} of {wanted} tokens came; {stats}; {executor.violations[:3]}")
    return {
        "requests": len(requests), "blocks": limits.num_blocks, "step_ms": step_ms, "steps": stats.step,
        "preemptions": stats.num_preemptions, "output_tokens": num_tokens,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--step-ms", type=float, nargs="*", default=[2.0, 5.0, 10.0], help="of the imagined device")
    args = parser.parse_args()
    requests = mixed_requests(VOCAB_SIZE, args.num_requests)
    for step_ms in args.step_ms:
        print(json.dumps(simulate(LIMITS, requests, step_ms)), flush=True)


if __name__ == "__main__":
    main()
