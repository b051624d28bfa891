# SPDX-License-Identifier: Apache-2.0
"""The GPU sampler against the CPU sampler: in Triton's interpreter on tiny shapes, on a GPU on real ones.

The interpreter must be switched on before the kernels are imported, so those tests run in a process of their own,
which `test_in_the_interpreter` starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.interpreter import INTERPRETED, adjust_interpreter

pytest.importorskip("triton")
from mii_zmq.worker.cuda_sampler import CudaSampler, SamplerTuning
from mii_zmq.worker.cuda_sampling_slots import SamplingVariant
from mii_zmq.worker.plan import SamplingSpec
from mii_zmq.worker.sampler import Sampler

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if IS_INTERPRETED:
    adjust_interpreter()
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="test_in_the_interpreter runs it")
not_interpreted = pytest.mark.skipif(IS_INTERPRETED, reason="needs no interpreter")

CPU = torch.device("cpu")
INF = float("inf")
TINY = SamplerTuning(
    argmax_tile=128, draw_tile=64, filter_tile=128, num_candidates=256, num_held=128, chunk=64, mask_tile=4
)  # fmt: skip
"""Several tiles and chunks at a vocabulary of 300; wide kept sets overflow the registers, then the list."""
DRAWN = SamplingSpec(seed=7, temperature=1.0)
EDITED = SamplingSpec(seed=3, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.4)
SPECS = [
    SamplingSpec(),
    DRAWN,
    replace(DRAWN, temperature=0.3),
    replace(DRAWN, temperature=1e-40),
    replace(DRAWN, top_k=5),
    replace(DRAWN, top_k=1),
    replace(DRAWN, top_k=170),
    replace(DRAWN, top_k=10**6),
    replace(DRAWN, top_p=0.9),
    replace(DRAWN, top_p=1e-6),
    replace(DRAWN, top_p=0.9, temperature=5.0),
    replace(DRAWN, min_p=0.1),
    replace(DRAWN, min_p=1.0),
    replace(DRAWN, top_k=20, top_p=0.8),
    replace(DRAWN, top_k=280, top_p=0.95, temperature=5.0),
    replace(DRAWN, top_k=40, top_p=0.95, min_p=0.02, temperature=1.5),
    EDITED,
    replace(EDITED, temperature=0.8, top_p=0.9),
    replace(EDITED, temperature=1.0, top_k=30, presence_penalty=0.0, frequency_penalty=0.0),
    replace(EDITED, logit_bias=((4, 60.0), (299, -100.0)), bad_words=((4, 9),)),
    replace(DRAWN, logit_bias=tuple((token_id, token_id / 100 - 1) for token_id in range(0, 300, 7)), top_k=9),
    replace(DRAWN, allowed_token_ids=(0, 31, 32, 63, 100, 299), logit_bias=((32, 5.0), (40, 90.0)), bad_words=((0,),)),
    SamplingSpec(bad_words=((4, 5, 7), (8,), (9, 7), (1, 2, 3, 4, 5)), stop_token_ids=(3, 299), min_new_tokens=40),
]


class Rows:
    """Both samplers with the same sequences; sequence i is in slot i."""

    def __init__(self, vocab_size: int, specs: list[SamplingSpec], histories: Tensor, lengths: list[int]) -> None:
        num_slots = len(histories)
        self.vocab_size, self.lengths, self.num_rows = vocab_size, list(lengths), len(specs)
        self.tested, self.oracle = (
            CudaSampler(num_slots, vocab_size, CPU, tuning=TINY),
            Sampler(num_slots, vocab_size, CPU),
        )
        self.token_ids = histories.int()
        self.specs = specs
        for slot in range(len(specs)):
            self.install(slot)

    def install(self, slot: int, num_prompt_tokens: int = 3) -> None:
        for sampler in (self.tested, self.oracle):
            history = self.token_ids[slot, : self.lengths[slot]].tolist()
            sampler.install(slot, self.specs[slot], history, num_prompt_tokens)

    def step(self, logits: Tensor, order: list[int] | None = None, masks: dict[int, bytes] | None = None) -> list[int]:
        """Draw with both, compare, append; two padding rows of NaN stand behind the real ones."""
        slots = order or list(range(self.num_rows))
        positions = [self.lengths[slot] for slot in slots]
        before = self.token_ids.clone()
        want, is_finite = self.oracle.sample(logits.clone(), slots, positions, before, masks)
        if masks:
            self.tested.set_masks(masks)
        variant = self.tested.prepare(slots)
        padded = torch.cat([logits, torch.full((2, self.vocab_size), float("nan"))])
        kept = padded.clone()
        ids, finite, log_probs = (
            torch.full((len(slots) + 2,), -7, dtype=t) for t in (torch.int32, torch.uint8, torch.float)
        )
        device_slots, device_positions = (torch.tensor([*x, 0, 0], dtype=torch.int32) for x in (slots, positions))
        num_rows = torch.tensor([len(slots)], dtype=torch.int32)
        self.tested.sample(
            variant, padded, device_slots, device_positions, num_rows, self.token_ids, ids, finite,
            out_log_probs=log_probs,
        )  # fmt: skip
        assert torch.equal(padded.nan_to_num(1e9), kept.nan_to_num(1e9))
        assert finite.tolist() == [*is_finite.int().tolist(), 249, 249]
        assert ids[-2:].tolist() == [-7, -7]
        assert all(0 <= token_id < self.vocab_size for token_id in ids[:-2].tolist())
        for row, slot in enumerate(slots):
            if is_finite[row]:
                assert ids[row] == want[row], (slot, self.specs[slot])
                expected = logits[row].log_softmax(-1)[want[row]]
                torch.testing.assert_close(log_probs[row], expected, rtol=1e-5, atol=1e-5)
            before[slot, positions[row]] = ids[row]
            self.lengths[slot] += 1
        assert torch.equal(self.token_ids, before)
        return ids[:-2].tolist()


def random_histories(seed: int, num_slots: int, vocab_size: int, length: int = 64) -> Tensor:
    return torch.randint(0, vocab_size, (num_slots, length), generator=torch.Generator().manual_seed(seed))


def random_logits(seed: int, *shape: int, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.slow
@pytest.mark.timeout(300)
@not_interpreted
def test_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, **INTERPRETED},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@interpreted
@pytest.mark.parametrize("step", [0, 0.25], ids=["distinct", "ties"])
def test_every_option_equals_the_cpu_sampler(step: float) -> None:
    """All options side by side; logits on a grid make ties at nearly every edge."""
    specs = [replace(spec, seed=31 * row + 5) for row, spec in enumerate(SPECS)]
    rows = Rows(300, specs, random_histories(1, len(specs), 12), [4 + row % 20 for row in range(len(specs))])
    for case in range(2):
        logits = random_logits(case, len(specs), 300)
        order = torch.randperm(len(specs), generator=torch.Generator().manual_seed(case)).tolist()
        rows.step((logits / step).round() * step if step else logits, order)


@interpreted
def test_equal_logits_overflow_every_list_and_keep_the_lowest_ids() -> None:
    specs = [replace(DRAWN, top_p=0.1), replace(DRAWN, top_p=0.5, top_k=200), replace(DRAWN, top_k=3)]
    rows = Rows(600, specs, random_histories(2, 3, 600), [5, 6, 7])
    for _ in range(3):
        drawn = rows.step(torch.zeros(3, 600))
        assert drawn[0] < 60
        assert drawn[1] < 300


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_that_are_not_finite_are_flagged_and_touch_no_other() -> None:
    words = tuple((token_id,) for token_id in range(40))
    specs = [SamplingSpec(), DRAWN, replace(DRAWN, top_p=0.5, top_k=7), EDITED, replace(DRAWN, bad_words=words), DRAWN]
    specs += [SamplingSpec(bad_words=words[:3] + words[4:]), replace(DRAWN, top_p=0.8)]
    rows = Rows(40, specs, random_histories(3, len(specs), 40), [5] * len(specs))
    logits = random_logits(4, len(specs), 40)
    logits[0, 39] = logits[1, 7] = logits[2, 33] = logits[3, 1] = float("nan")
    logits[5, 2] = INF
    logits[7, 4:] = -INF
    drawn = rows.step(logits)
    assert drawn[6] == 3
    assert drawn[7] < 4


@interpreted
def test_sequences_go_on_after_a_resumption_and_slots_are_reused() -> None:
    specs = [replace(EDITED, temperature=0.9, top_p=0.9), SamplingSpec(stop_token_ids=(1, 2), min_new_tokens=2)]
    rows = Rows(40, specs, random_histories(5, 2, 40), [3, 3])
    for case in range(3):
        rows.step(random_logits(10 + case, 2, 40, scale=1.0))
    for slot in (0, 1):
        rows.install(slot)
    rows.step(random_logits(20, 2, 40, scale=1.0))
    rows.specs[1] = DRAWN
    rows.install(1)
    rows.step(random_logits(21, 2, 40, scale=1.0))


def random_mask(seed: int, vocab_size: int, share: float = 0.1) -> bytes:
    """Some ids of a vocabulary, at least its last one, as `StepPlan.masks` has them."""
    allowed = torch.rand(vocab_size, generator=torch.Generator().manual_seed(seed)) < share
    allowed[-1] = True
    words = -(-vocab_size // 32)
    return sum(1 << index for index in allowed.nonzero().flatten().tolist()).to_bytes(4 * words, "little")


MASKED = [
    SamplingSpec(is_masked=True),
    replace(DRAWN, is_masked=True),
    replace(DRAWN, is_masked=True, top_p=0.9),
    replace(DRAWN, is_masked=True, top_k=5, logit_bias=((299, 9.0),)),
    replace(EDITED, is_masked=True, temperature=0.8, bad_words=((7,),)),
    replace(DRAWN, is_masked=True, allowed_token_ids=tuple(range(150, 300))),
]
"""Between them stand rows without a mask."""


@interpreted
def test_masks_of_grammars_change_every_step_and_touch_no_other_row() -> None:
    specs = [spec for masked in MASKED for spec in (masked, replace(masked, is_masked=False))]
    rows = Rows(300, specs, random_histories(8, len(specs), 24), [5 + row for row in range(len(specs))])
    for case in range(3):
        masks = {slot: random_mask(10 * case + slot, 300) for slot, spec in enumerate(specs) if spec.is_masked}
        drawn = rows.step(random_logits(30 + case, len(specs), 300), masks=masks)
        for slot, mask in masks.items():
            assert mask[drawn[slot] // 8] >> (drawn[slot] % 8) & 1
        assert drawn[10] >= 150
    # A slot whose next sequence has no grammar is free of the old one's mask.
    del masks[0]
    rows.specs[0] = SamplingSpec(allowed_token_ids=(3, 4))
    rows.install(0)
    assert rows.step(random_logits(40, len(specs), 300), masks=masks)[0] in (3, 4)


@not_interpreted
def test_the_variant_is_what_the_batch_needs() -> None:
    sampler = CudaSampler(4, 100, CPU)
    specs = [SamplingSpec(top_p=0.5), DRAWN, replace(DRAWN, min_p=0.1), SamplingSpec(bad_words=((1,),))]
    for slot, spec in enumerate(specs):
        sampler.install(slot, spec, [1], 1)
    assert sampler.prepare([0]) == SamplingVariant()
    assert sampler.prepare([0, 1]) == SamplingVariant(is_sampled=True)
    assert sampler.prepare([2]) == SamplingVariant(is_sampled=True, is_filtered=True)
    assert sampler.prepare([0, 3]) == SamplingVariant(is_edited=True)
    sampler.install(3, SamplingSpec(is_masked=True), [1], 1)
    assert sampler.prepare([3]) == SamplingVariant(is_edited=True)
    assert sampler.prepare([0]) == SamplingVariant()
    sampler.install(1, replace(DRAWN, top_k=100, bad_words=((200,), ())), [1], 1)
    assert sampler.prepare([1]) == SamplingVariant(is_sampled=True)
    sampler.release([1, 1])
    with pytest.raises(KeyError):
        sampler.prepare([1])


@not_interpreted
def test_scratch_memory_is_reserved_once_per_need() -> None:
    sampler = CudaSampler(4, 1000, CPU)
    greedy = sampler.reserve(SamplingVariant())
    filtered = sampler.reserve(SamplingVariant(is_sampled=True, is_filtered=True))
    edited = sampler.reserve(SamplingVariant(is_edited=True))
    assert greedy < filtered < edited
    assert edited - filtered == 4 * 1000 * 4
    assert sampler.reserve(SamplingVariant()) == edited


@not_interpreted
def test_install_refuses_what_it_cannot_hold() -> None:
    sampler = CudaSampler(2, 10, CPU)
    for slot, token_ids, num_prompt_tokens, words in (
        (2, [1], 1, "slot is 2"),
        (-1, [1], 1, "slot is -1"),
        (0, [1], 2, "num_prompt_tokens is 2"),
        (0, [], 0, "num_prompt_tokens is 0"),
        (0, [1, 10], 1, "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=words):
            sampler.install(slot, SamplingSpec(), token_ids, num_prompt_tokens)


@pytest.mark.gpu
@not_interpreted
@pytest.mark.parametrize(("vocab_size", "dtype"), [(128256, torch.bfloat16), (50257, torch.float32)])
def test_a_captured_graph_equals_the_cpu_sampler(vocab_size: int, dtype: torch.dtype) -> None:
    device, num_rows, length = torch.device("cuda"), 64, 200
    histories = random_histories(6, num_rows, vocab_size, length + 8)
    tested, oracle = CudaSampler(num_rows, vocab_size, device), Sampler(num_rows, vocab_size, CPU)
    for slot in range(num_rows):
        spec = replace((SPECS + MASKED)[slot % (len(SPECS) + len(MASKED))], seed=slot)
        for sampler in (tested, oracle):
            sampler.install(slot, spec, histories[slot, :length].tolist(), 50)
    slots = list(range(num_rows))
    masked = [slot for slot in slots if slot % (len(SPECS) + len(MASKED)) >= len(SPECS)]
    tested.set_masks({slot: random_mask(slot, vocab_size) for slot in masked})
    variant = tested.prepare(slots)
    tested.reserve(variant)
    logits = torch.zeros(num_rows, vocab_size, dtype=dtype, device=device)
    token_ids = histories.int().to(device)
    device_slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    positions = torch.full((num_rows,), length, dtype=torch.int32, device=device)
    count = torch.tensor([num_rows], dtype=torch.int32, device=device)
    ids, finite = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))

    def launch() -> None:
        tested.sample(variant, logits, device_slots, positions, count, token_ids, ids, finite)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    host_ids = histories.int()
    for step in range(3):
        fresh = random_logits(step, num_rows, vocab_size).to(dtype)
        logits.copy_(fresh)
        positions.fill_(length + step)
        masks = {slot: random_mask(100 * step + slot, vocab_size, 0.9) for slot in masked}
        tested.set_masks(masks)
        graph.replay()
        want, is_finite = oracle.sample(fresh.float(), slots, [length + step] * num_rows, host_ids, masks)
        assert is_finite.all()
        assert finite.all()
        assert ids.tolist() == want.tolist()
        host_ids[:, length + step] = want
