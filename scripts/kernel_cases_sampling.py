# SPDX-License-Identifier: Apache-2.0
"""Cases of `bench_kernels`: whole calls of the GPU sampler, checked against the CPU sampler id by id."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from kernel_case import (
    DEVICE,
    HAS_PDL,
    I32,
    IS_INTERPRETED,
    SHAPE,
    Builds,
    Case,
    Check,
    ints,
    num_sets,
    pick,
    poisoned,
    randn,
)
from sampling_mixes import MIXES

from mii_zmq.worker.cuda_sampler import CudaSampler, SamplerTuning
from mii_zmq.worker.sampler import Sampler

SMALL_TUNING = SamplerTuning(
    argmax_tile=64, draw_tile=64, filter_tile=64, num_candidates=512, num_held=128, chunk=64, history_tile=32,
    history_programs=2, mask_tile=16,
)  # fmt: skip
NUM_CHECKED = 48


def sampling_cases() -> Builds:
    for name, specs in MIXES.items():
        for rows in pick((1, 64, 256), (3,)):
            if rows > 1 or len(specs) <= 2:
                yield f"sampling {name} {rows}", partial(sampling_case, name, rows)


def sampling_case(name: str, rows: int) -> Case:
    vocab, length = SHAPE.vocab, pick((1024,), (40,))[0]
    sets = num_sets(rows * vocab * 2, 8)
    # Real logits are heavy at the top; the rest is far below.
    logits = torch.stack([randn(rows, vocab, scale=2.5) for _ in range(sets)])
    logits[:, :, torch.randperm(vocab, device=DEVICE)[:40]] += 8.0
    sampler = CudaSampler(rows, vocab, DEVICE, tuning=SMALL_TUNING if IS_INTERPRETED else None, pdl=HAS_PDL)
    oracle = Sampler(rows, vocab, torch.device("cpu"))
    history = torch.randint(0, vocab, (rows, length + 8), dtype=I32)
    history[:, : length // 2] %= vocab // 40 + 1
    num_checked = min(rows, NUM_CHECKED)
    for slot in range(rows):
        spec = replace(MIXES[name][slot % len(MIXES[name])], seed=slot)
        tokens = history[slot, :length].tolist()
        sampler.install(slot, spec, tokens, length // 4)
        if slot < num_checked:
            oracle.install(slot, spec, tokens, length // 4)
    variant = sampler.prepare(list(range(rows)))
    slots, positions, count = ints(torch.arange(rows)), ints([length] * rows), ints([rows])
    device_history = history.to(DEVICE)
    ids, finite = poisoned(rows, dtype=I32), poisoned(rows, dtype=I32)

    def launch(index: int) -> None:
        sampler.sample(variant, logits[index], slots, positions, count, device_history, ids, finite)

    def check() -> Check:
        ids.fill_(-9)
        finite.fill_(-9)
        launch(0)
        chosen = list(range(num_checked))
        want, _ = oracle.sample(logits[0, :num_checked].float().cpu(), chosen, [length] * num_checked, history)
        wrong = int((ids[:num_checked].cpu() != want).sum()) + int((finite != 1).sum())
        wrong += int(((ids < 0) | (ids >= vocab)).sum()) + int((device_history[:, length] != ids).sum())
        return Check(wrong / rows)

    return Case("sampling", f"{name} {rows} x {vocab}", launch, sets, check, rows * vocab * logits.element_size())
