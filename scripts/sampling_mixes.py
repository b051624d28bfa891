# SPDX-License-Identifier: Apache-2.0
"""Batches of sampling settings that are measured, by the kernels' benchmark and by the engine's."""

from __future__ import annotations

from mii_zmq.worker.plan import SamplingSpec

DRAWN = SamplingSpec(temperature=1.0)
FILTERS = (
    SamplingSpec(),
    SamplingSpec(temperature=0.7, top_p=0.9),
    SamplingSpec(temperature=1.0, top_k=50),
    SamplingSpec(temperature=1.3, top_p=0.95, min_p=0.02),
    SamplingSpec(temperature=1.0, top_k=40, top_p=0.9),
    SamplingSpec(temperature=0.8, min_p=0.05),
    DRAWN,
    SamplingSpec(temperature=1.0, top_k=1000, top_p=0.99),
)
MIXED = (
    *FILTERS,
    SamplingSpec(temperature=0.8, top_p=0.9, repetition_penalty=1.2),
    SamplingSpec(temperature=1.0, top_k=50, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingSpec(repetition_penalty=1.1, frequency_penalty=0.2),
    # Never ends early: its stop ids stay masked.
    SamplingSpec(temperature=1.0, top_p=0.95, bad_words=((3, 4), (7,)), stop_token_ids=(1, 2), min_new_tokens=5000),
)
MIXES: dict[str, tuple[SamplingSpec, ...]] = {
    "greedy": (SamplingSpec(),),
    "drawn": (SamplingSpec(temperature=0.7), DRAWN),
    "top_p": (SamplingSpec(temperature=1.0, top_p=0.9),),
    "filters": FILTERS,
    "mixed": MIXED,
}
