# SPDX-License-Identifier: Apache-2.0
"""Sampling cases of `bench_kernels`: whole calls of the GPU sampler, checked against the CPU sampler id by id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from kernel_case import DEVICE, I32, VOCAB, Case, ints, randn, sets_for

from mii_zmq.worker.cuda_sampler import CudaSampler, SamplerTuning
from mii_zmq.worker.plan import SamplingSpec
from mii_zmq.worker.sampler import Sampler

DRAWN = SamplingSpec(temperature=1.0)
MIXES: dict[str, list[SamplingSpec]] = {
    "greedy": [SamplingSpec()],
    "drawn": [SamplingSpec(temperature=0.7), DRAWN],
    "top_p": [SamplingSpec(temperature=1.0, top_p=0.9)],
    "filters": [
        SamplingSpec(),
        SamplingSpec(temperature=0.7, top_p=0.9),
        SamplingSpec(temperature=1.0, top_k=50),
        SamplingSpec(temperature=1.3, top_p=0.95, min_p=0.02),
        SamplingSpec(temperature=1.0, top_k=40, top_p=0.9),
        SamplingSpec(temperature=0.8, min_p=0.05),
        DRAWN,
        SamplingSpec(temperature=1.0, top_k=1000, top_p=0.99),
    ],
}
MIXES["mixed"] = [
    *MIXES["filters"],
    SamplingSpec(temperature=0.8, top_p=0.9, repetition_penalty=1.2),
    SamplingSpec(temperature=1.0, top_k=50, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingSpec(repetition_penalty=1.1, frequency_penalty=0.2),
    SamplingSpec(temperature=1.0, top_p=0.95, bad_words=((3, 4), (7,)), stop_token_ids=(1, 2), min_new_tokens=5000),
]


def sampling_cases() -> Iterator[Case]:
    for name, specs in MIXES.items():
        for rows in (1, 64, 256):
            if rows > 1 or len(specs) <= 2:
                yield sampling_case(name, rows)


def sampling_case(name: str, rows: int, length: int = 1024, tuning: SamplerTuning | None = None) -> Case:
    sets = sets_for(rows * VOCAB * 2, 8)
    # Real logits are heavy at the top; the rest is far below.
    logits = torch.cat([randn(rows, VOCAB, scale=2.5)[None] for _ in range(sets)])
    logits[:, :, torch.randperm(VOCAB, device=DEVICE)[:40]] += 8.0
    device_sampler, oracle = CudaSampler(rows, VOCAB, DEVICE, tuning=tuning), Sampler(rows, VOCAB, torch.device("cpu"))
    history = torch.randint(0, VOCAB, (rows, length + 8), dtype=I32)
    history[:, : length // 2] %= 3000
    num_checked = min(rows, 48)
    for slot in range(rows):
        spec = replace(MIXES[name][slot % len(MIXES[name])], seed=slot)
        tokens = history[slot, :length].tolist()
        device_sampler.install(slot, spec, tokens, length // 4)
        if slot < num_checked:
            oracle.install(slot, spec, tokens, length // 4)
    variant = device_sampler.prepare(list(range(rows)))
    slots, positions, count = torch.arange(rows, dtype=I32, device=DEVICE), ints([length] * rows), ints([rows])
    device_history = history.to(DEVICE)
    ids, finite = torch.empty(rows, dtype=I32, device=DEVICE), torch.empty(rows, dtype=I32, device=DEVICE)

    def launch(index: int) -> None:
        device_sampler.sample(variant, logits[index], slots, positions, count, device_history, ids, finite)

    def check() -> tuple[float, None]:
        ids.fill_(-9)
        finite.fill_(-9)
        launch(0)
        chosen = list(range(num_checked))
        want, _ = oracle.sample(logits[0, :num_checked].float().cpu(), chosen, [length] * num_checked, history)
        wrong = int((ids[:num_checked].cpu() != want).sum()) + int((finite != 1).sum())
        wrong += int(((ids < 0) | (ids >= VOCAB)).sum()) + int((device_history[:, length] != ids).sum())
        return wrong / rows, None

    return Case("sampling", f"{name} {rows} x {VOCAB}", "read", rows * VOCAB * 2, launch, sets, check)
