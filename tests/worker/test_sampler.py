# SPDX-License-Identifier: Apache-2.0
"""The sampler against a plain one-row reference: transformers' processors, and the noise in Python integers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mii_zmq.worker.plan import SamplingSpec
from mii_zmq.worker.random_draw import GUMBEL_MAX, GroupedLogits, gumbel, mix64, row_keys
from mii_zmq.worker.sampler import Sampler
from mii_zmq.worker.token_filters import Filters, draw_filtered

CPU = torch.device("cpu")
MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
INF = float("inf")
DRAWN = SamplingSpec(seed=7, temperature=1.0)

GOLDEN_KEYS = [12035550249420947055, 12935080325729570654, 14285143330637538260, 11759693977204951356]
GOLDEN_NOISE = [
    [-0.680758, 3.529359, -0.41687, -0.109353],
    [-0.52691, 0.755334, -0.530875, -0.290623],
    [4.719913, 0.974818, 0.220063, -0.064763],
    [0.031769, 1.553384, 2.24292, 2.435572],
]


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    """These tensors are too small for threads to pay, least of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def python_mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def python_key(seed: int, position: int) -> int:
    return python_mix64((python_mix64((seed + GAMMA) & MASK) + (position + 1) * GAMMA) & MASK)


def python_bits(seed: int, position: int, token_id: int) -> int:
    return python_mix64((python_key(seed, position) + (token_id + 1) * GAMMA) & MASK) >> 40


def reference_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    bits = [max(python_bits(seed, position, token_id), 1) for token_id in range(vocab_size)]
    uniform = torch.tensor(bits, dtype=torch.float32) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def reference_scores(logits: Tensor, spec: SamplingSpec, history: list[int], num_prompt_tokens: int) -> Tensor:
    """One row's logits after everything but the noise."""
    ids, scores = torch.tensor([history]), logits.clone().unsqueeze(0)
    if spec.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(spec.repetition_penalty)(ids, scores)
    for token_id, count in Counter(history[num_prompt_tokens:]).items():
        scores[0, token_id] -= spec.frequency_penalty * count + spec.presence_penalty
    for token_id, bias in spec.logit_bias:
        scores[0, token_id] += bias
    if spec.allowed_token_ids:
        is_allowed = torch.zeros(scores.shape[1], dtype=torch.bool)
        is_allowed[list(spec.allowed_token_ids)] = True
        scores[0, ~is_allowed] = -INF
    for word in spec.bad_words:
        prefix = list(word[:-1])
        if len(prefix) <= len(history) and history[len(history) - len(prefix) :] == prefix:
            scores[0, word[-1]] = -INF
    if len(history) - num_prompt_tokens < spec.min_new_tokens:
        scores[0, list(spec.stop_token_ids)] = -INF
    if spec.temperature == 0:
        return scores[0]
    scores = TemperatureLogitsWarper(spec.temperature)(ids, scores)
    if spec.top_k > 0:
        scores = TopKLogitsWarper(spec.top_k)(ids, scores)
    if spec.top_p < 1:
        scores = TopPLogitsWarper(spec.top_p)(ids, scores)
    if spec.min_p > 0:
        scores = MinPLogitsWarper(spec.min_p)(ids, scores)
    return scores[0]


def reference_draw(logits: Tensor, spec: SamplingSpec, history: list[int], num_prompt_tokens: int) -> int:
    scores = reference_scores(logits, spec, history, num_prompt_tokens)
    if spec.temperature != 0:
        scores = scores + reference_noise(spec.seed, len(history), len(logits))
    return int(scores.argmax())


class Rows:
    """A sampler with sequences installed, and their histories on the "device"."""

    def __init__(self, vocab_size: int, max_sequences: int = 8, max_model_len: int = 64) -> None:
        self.sampler = Sampler(max_sequences, vocab_size, CPU)
        # Columns behind the history hold ids that would show if anything read them.
        self.token_ids = torch.full((max_sequences, max_model_len), 1, dtype=torch.int32)
        self.lengths: dict[int, int] = {}

    def install(self, slot: int, spec: SamplingSpec, history: list[int], num_prompt_tokens: int | None = None) -> None:
        self.sampler.install(slot, spec, history, num_prompt_tokens or len(history))
        self.token_ids[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)
        self.lengths[slot] = len(history)

    def sample(self, logits: Tensor, slots: list[int]) -> tuple[list[int], list[bool]]:
        positions = [self.lengths[slot] for slot in slots]
        drawn, is_finite = self.sampler.sample(logits.clone(), slots, positions, self.token_ids)
        assert drawn.dtype == torch.int64
        assert is_finite.dtype == torch.bool
        return drawn.tolist(), is_finite.tolist()

    def step(self, logits: Tensor, slots: list[int]) -> list[int]:
        """Sample and append, as the executor does."""
        drawn, is_finite = self.sample(logits, slots)
        assert all(is_finite)
        for slot, token_id in zip(slots, drawn, strict=True):
            self.token_ids[slot, self.lengths[slot]] = token_id
            self.lengths[slot] += 1
        return drawn


def solo(
    logits: Tensor, spec: SamplingSpec, history: list[int], num_prompt_tokens: int | None = None, slot: int = 0
) -> int:
    rows = Rows(len(logits))
    rows.install(slot, spec, history, num_prompt_tokens)
    return rows.sample(logits.unsqueeze(0), [slot])[0][0]


def random_logits(seed: int, *shape: int, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# The generator


def test_mix64_gives_the_published_splitmix64_stream() -> None:
    state = torch.tensor([1234567]) + torch.arange(1, 6) * (GAMMA - 2**64)
    assert [value % 2**64 for value in mix64(state).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_keys_and_noise_have_their_golden_values() -> None:
    seeds, positions = torch.tensor([0, 0, 1, 2**63 - 1]), torch.tensor([0, 1, 5, 131071])
    keys = row_keys(seeds, positions)
    assert [key % 2**64 for key in keys.tolist()] == GOLDEN_KEYS
    noise = gumbel(keys.unsqueeze(1), torch.tensor([[0, 1, 49151, 151935]]))
    torch.testing.assert_close(noise, torch.tensor(GOLDEN_NOISE), rtol=0, atol=2e-6)


def test_noise_equals_the_integer_reference() -> None:
    for seed, position in ((0, 0), (3, 17), (2**62 + 11, 100000)):
        keys = row_keys(torch.tensor([seed]), torch.tensor([position]))
        assert keys.item() % 2**64 == python_key(seed, position)
        noise = gumbel(keys.unsqueeze(1), torch.arange(200).unsqueeze(0))[0]
        assert torch.equal(noise, reference_noise(seed, position, 200))


def test_noise_is_bounded_and_does_not_depend_on_where_it_is_computed() -> None:
    keys = row_keys(torch.arange(3), torch.arange(3)).unsqueeze(1)
    noise = gumbel(keys, torch.arange(100_000).unsqueeze(0))
    assert noise.isfinite().all()
    assert noise.max() <= -math.log(-math.log(1 - 2**-24)) + 1e-4 < GUMBEL_MAX
    some = torch.tensor([[99_999, 5, 63, 64, 77_777]])
    assert torch.equal(gumbel(keys[1:2], some)[0], noise[1][some[0]])


# Each option against the reference


OPTIONS = {
    "greedy": SamplingSpec(),
    "plain": DRAWN,
    "temperature": replace(DRAWN, temperature=0.3),
    "hot": replace(DRAWN, temperature=5.0),
    "top_k": replace(DRAWN, top_k=5),
    "top_k 1": replace(DRAWN, top_k=1),
    "wide top_k": replace(DRAWN, top_k=170),
    "top_k over the vocabulary": replace(DRAWN, top_k=10**6),
    "top_p": replace(DRAWN, top_p=0.9),
    "small top_p": replace(DRAWN, top_p=1e-6),
    "wide top_p": replace(DRAWN, top_p=0.9, temperature=5.0),
    "min_p": replace(DRAWN, min_p=0.1),
    "min_p 1": replace(DRAWN, min_p=1.0),
    "top_k, top_p": replace(DRAWN, top_k=20, top_p=0.8),
    "wide top_k, top_p": replace(DRAWN, top_k=200, top_p=0.95, temperature=5.0),
    "all filters": replace(DRAWN, top_k=40, top_p=0.95, min_p=0.02, temperature=1.5),
    "top_p, min_p, hot": replace(DRAWN, top_p=0.95, min_p=0.02, temperature=4.0),
    "repetition": SamplingSpec(repetition_penalty=1.8),
    "encouraged repetition": SamplingSpec(repetition_penalty=0.4),
    "presence": SamplingSpec(presence_penalty=2.5),
    "frequency": SamplingSpec(frequency_penalty=1.5),
    "biases": SamplingSpec(logit_bias=((5, 2.5), (3, -100.0), (299, 4.0))),
    "drawn with biases": replace(DRAWN, top_p=0.9, logit_bias=tuple((i, 1.5) for i in range(40)), presence_penalty=1.0),
    "allowed tokens": replace(DRAWN, top_k=5, allowed_token_ids=(0, 3, 9, 31, 64, 250), logit_bias=((9, 2.0),)),
    "all penalties": replace(
        DRAWN, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.4, top_p=0.9, temperature=0.8
    ),
}
VOCAB = 300


@pytest.mark.parametrize("spec", OPTIONS.values(), ids=OPTIONS.keys())
def test_option_equals_the_reference(spec: SamplingSpec) -> None:
    for case in range(8):
        logits = random_logits(case, VOCAB)
        top = logits.topk(6).indices.tolist()
        history = [3, top[0], 5, top[1], top[2], top[2], top[1], top[2], 9, top[5]][: 6 + case % 5]
        expected = reference_draw(logits, replace(spec, seed=case), history, 3)
        assert solo(logits, replace(spec, seed=case), history, 3, slot=case % 8) == expected


def test_penalties_change_exactly_the_reference_logits() -> None:
    """With temperature 1 the draw hides small errors; here every token's score is compared through its ranking."""
    spec = SamplingSpec(repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5)
    history = [1, 2, 2, 4, 2, 4, 7, 7, 7]
    for case in range(20):
        logits = random_logits(case, 10, scale=1.0)
        assert solo(logits, spec, history, 4) == reference_draw(logits, spec, history, 4)


def test_prompt_tokens_take_no_presence_or_frequency_penalty() -> None:
    logits = torch.tensor([0.0, 1.0, 0.9, 0.0])
    spec = SamplingSpec(presence_penalty=1.0, frequency_penalty=1.0)
    assert solo(logits, spec, [1, 1, 1]) == 1
    assert solo(logits, spec, [1, 1, 1], 2) == 2


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(0, 100)
    assert solo(logits, replace(DRAWN, temperature=1e-40), [1]) == int(logits.argmax())


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(200)
    logits[[70, 71, 150]] = 2.0
    assert solo(logits, SamplingSpec(), [1]) == 70


def test_top_p_at_a_tie_keeps_the_lowest_ids() -> None:
    logits, draws = torch.zeros(1000), set()
    logits[500:] = -20.0
    for position in range(1, 40):
        draws.add(solo(logits, replace(DRAWN, top_p=0.009), [1] * position))
    assert draws == {0, 1, 2, 3, 4}


def test_top_k_at_a_tie_keeps_all_of_it() -> None:
    logits = torch.zeros(200)
    logits[[3, 90, 130, 199]] = torch.tensor([9.0, 8.0, 8.0, 8.0])
    draws = {solo(logits, replace(DRAWN, top_k=2, temperature=5.0), [1] * position) for position in range(1, 60)}
    assert draws == {3, 90, 130, 199}


# Bad words, stop ids


def test_bad_words_match_the_end_of_the_history_only() -> None:
    logits = torch.zeros(50)
    logits[7], logits[8], logits[9] = 3.0, 2.0, 1.0
    spec = SamplingSpec(bad_words=((4, 5, 7), (8,)))
    assert solo(logits, spec, [4, 5]) == 9
    assert solo(logits, spec, [1, 4, 5]) == 9
    assert solo(logits, spec, [4, 5, 1]) == 7
    assert solo(logits, spec, [5, 4]) == 7
    assert solo(logits, spec, [5]) == 7


def test_a_token_in_a_matching_and_in_another_bad_word_is_masked() -> None:
    logits = torch.zeros(50)
    logits[7] = 3.0
    for words in (((4, 7), (5, 7)), ((5, 7), (4, 7))):
        assert solo(logits, SamplingSpec(bad_words=words), [4]) == 0
        assert solo(logits, SamplingSpec(bad_words=words), [6]) == 7


def test_bad_words_that_cannot_occur_are_ignored() -> None:
    logits = random_logits(0, 50)
    spec = SamplingSpec(
        bad_words=((), (50,), (-1, 3), (99, int(logits.argmax()))), stop_token_ids=(77,), min_new_tokens=4
    )
    assert solo(logits, spec, [1, 2]) == int(logits.argmax())


def test_stop_ids_are_masked_until_min_new_tokens() -> None:
    logits = torch.zeros(50)
    logits[3], logits[4], logits[5] = 3.0, 2.0, 1.0
    spec = SamplingSpec(stop_token_ids=(3, 4), min_new_tokens=2)
    rows = Rows(50)
    rows.install(2, spec, [3, 3])
    assert [rows.step(logits.unsqueeze(0), [2])[0] for _ in range(4)] == [5, 5, 3, 3]
    rows.install(2, spec, [3, 3, 5], 2)
    assert [rows.step(logits.unsqueeze(0), [2])[0] for _ in range(2)] == [5, 3]


def test_masks_of_grammars_equal_allowed_tokens_and_combine_with_all_options() -> None:
    """A mask is of one step; a row beside it is as without."""
    allowed, bits = (0, 3, 9, 31, 32, 64, 149), 0
    for token_id in allowed:
        bits |= 1 << token_id
    mask = bits.to_bytes(20, "little")
    logits = random_logits(77, 3, 150)
    for spec in (SamplingSpec(), DRAWN, replace(DRAWN, top_p=0.8, logit_bias=((9, 3.0),), bad_words=((64,),))):
        rows = Rows(150)
        for slot, options in enumerate((spec, replace(spec, allowed_token_ids=allowed), spec)):
            rows.install(slot, options, [1, 2, 3])
        positions = [rows.lengths[slot] for slot in range(3)]
        drawn, is_finite = rows.sampler.sample(logits[[0, 0, 0]], [0, 1, 2], positions, rows.token_ids, {0: mask})
        free, _ = rows.sampler.sample(logits[[0, 0, 0]], [0, 1, 2], positions, rows.token_ids)
        assert is_finite.all()
        assert drawn[0] == drawn[1] == free[1]
        assert drawn[2] == free[2] == free[0]


def test_a_mask_keeps_logits_that_are_not_finite() -> None:
    rows = Rows(40)
    rows.install(0, SamplingSpec(is_masked=True), [1])
    logits = random_logits(5, 1, 40)
    logits[0, 7] = float("nan")
    _, is_finite = rows.sampler.sample(logits, [0], [1], rows.token_ids, {0: b"\x0f" + bytes(7)})
    assert not is_finite[0]


def test_everything_masked_is_reported_and_touches_no_other_row() -> None:
    rows = Rows(5)
    words = tuple((token_id,) for token_id in range(5))
    for slot, temperature in enumerate((0.0, 1.0)):
        rows.install(slot, SamplingSpec(temperature=temperature, bad_words=words), [1])
    rows.install(2, SamplingSpec(temperature=1.0, bad_words=words, top_p=0.5), [1])
    rows.install(3, SamplingSpec(bad_words=words[:3] + words[4:]), [1])
    drawn, is_finite = rows.sample(torch.zeros(4, 5), [0, 1, 2, 3])
    assert is_finite == [False, False, False, True]
    assert drawn[3] == 3
    assert all(0 <= token_id < 5 for token_id in drawn)


# Batches


def specs() -> st.SearchStrategy[SamplingSpec]:
    token_id = st.integers(0, 149)
    return st.builds(
        SamplingSpec,
        seed=st.integers(0, 2**63 - 1),
        temperature=st.sampled_from([0.0, 0.5, 1.0, 1.0, 4.0]),
        top_k=st.sampled_from([0, 0, 1, 10, 140, 1000]),
        top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.999]),
        min_p=st.sampled_from([0.0, 0.0, 0.05]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
        min_new_tokens=st.integers(0, 6),
        stop_token_ids=st.lists(token_id, max_size=3).map(tuple),
        bad_words=st.lists(st.lists(token_id, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        logit_bias=st.dictionaries(token_id, st.floats(-9, 9, width=16), max_size=3).map(lambda d: tuple(d.items())),
        allowed_token_ids=st.just(()) | st.just(tuple(range(0, 150, 2))),
    )


@given(
    st.lists(
        st.tuples(specs(), st.lists(st.integers(0, 149), min_size=1, max_size=12), st.integers(1, 12)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 1000),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None, derandomize=True)
@pytest.mark.slow
def test_each_row_of_a_mixed_batch_equals_its_solo_run_and_the_reference(rows_, seed, random) -> None:
    logits = random_logits(seed, len(rows_), 150)
    rows, slots = Rows(150), random.sample(range(8), len(rows_))
    for slot, (spec, history, num_prompt) in zip(slots, rows_, strict=True):
        rows.install(slot, spec, history, min(num_prompt, len(history)))
    drawn, is_finite = rows.sample(logits, slots)
    assert all(is_finite)
    for row, (spec, history, num_prompt) in enumerate(rows_):
        num_prompt = min(num_prompt, len(history))
        assert drawn[row] == solo(logits[row], spec, history, num_prompt)
        assert drawn[row] == reference_draw(logits[row], spec, history, num_prompt)


@pytest.mark.slow
def test_batch_order_slots_and_company_change_no_draw_in_a_wide_vocabulary() -> None:
    """Narrow, wide and unfiltered rows at once, in a vocabulary in which all routes differ."""
    vocab_size, chosen = 5003, list(OPTIONS.values())
    logits = random_logits(0, len(chosen), vocab_size)
    rows = Rows(vocab_size, max_sequences=len(chosen))
    for slot, spec in enumerate(chosen):
        rows.install(slot, spec, [slot, 5, 6], 2)
    together, _ = rows.sample(logits, list(range(len(chosen))))
    backwards, _ = rows.sample(logits.flip(0), list(range(len(chosen)))[::-1])
    assert backwards[::-1] == together
    assert [solo(logits[row], spec, [row, 5, 6], 2) for row, spec in enumerate(chosen)] == together
    for row in range(0, len(chosen), 5):
        assert reference_draw(logits[row], chosen[row], [row, 5, 6], 2) == together[row]


@pytest.mark.slow
def test_the_number_of_threads_changes_no_draw() -> None:
    vocab_size = 40_000
    logits = random_logits(2, 5, vocab_size)
    rows = Rows(vocab_size)
    for slot, name in enumerate(("greedy", "plain", "top_p", "wide top_p", "all filters")):
        rows.install(slot, OPTIONS[name], [1, 2])
    expected, _ = rows.sample(logits, [0, 1, 2, 3, 4])
    torch.set_num_threads(2)
    try:
        assert rows.sample(logits, [0, 1, 2, 3, 4])[0] == expected
        assert [rows.sample(logits[slot : slot + 1], [slot])[0][0] for slot in range(5)] == expected
    finally:
        torch.set_num_threads(1)


def test_an_empty_batch_gives_empty_results() -> None:
    assert Rows(10).sample(torch.empty(0, 10), []) == ([], [])


@pytest.mark.parametrize(
    "spec", [SamplingSpec(), DRAWN, replace(DRAWN, top_k=3), replace(DRAWN, top_p=0.9), OPTIONS["all penalties"]]
)
@pytest.mark.parametrize("bad", ["nan", "all nan", "inf", "all -inf"])
def test_a_non_finite_row_is_reported_and_others_are_unaffected(spec: SamplingSpec, bad: str) -> None:
    logits = random_logits(1, 3, 500)
    rows = Rows(500)
    for slot in range(3):
        rows.install(slot, replace(spec, seed=slot), [3, 4, 5], 1)
    expected, _ = rows.sample(logits, [0, 1, 2])
    rows.install(0, replace(spec, seed=0), [3, 4, 5], 1)
    if bad.startswith("all"):
        logits[1] = -INF if "inf" in bad else float("nan")
    else:
        logits[1, 77] = float(bad)
    rows = Rows(500)
    for slot in range(3):
        rows.install(slot, replace(spec, seed=slot), [3, 4, 5], 1)
    drawn, is_finite = rows.sample(logits, [0, 1, 2])
    assert is_finite == [True, False, True]
    assert (drawn[0], drawn[2]) == (expected[0], expected[2])
    assert 0 <= drawn[1] < 500


def test_minus_infinity_from_the_model_is_a_masked_token() -> None:
    logits = torch.full((300,), -INF)
    logits[[10, 200]] = torch.tensor([1.0, 1.5])
    for spec in (
        SamplingSpec(),
        DRAWN,
        replace(DRAWN, top_k=50),
        replace(DRAWN, top_p=0.99),
        replace(DRAWN, top_k=150),
    ):
        rows = Rows(300)
        rows.install(0, spec, [1])
        drawn, is_finite = rows.sample(logits.unsqueeze(0), [0])
        assert is_finite == [True]
        assert drawn[0] == reference_draw(logits, spec, [1], 1)


# Routes: each gives what the plain computation gives


def filters_of(num_rows: int, vocab_size: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        top_k=torch.full((num_rows,), top_k or vocab_size),
        top_p=torch.full((num_rows,), top_p, dtype=torch.float64),
        log_min_p=torch.full((num_rows,), math.log(min_p) if min_p else -INF),
        needs_mass=not top_k,
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, 8.0])
@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_p": 0.9999, "min_p": 0.01},
        {"top_k": 20},
        {"top_k": 128},
        {"top_k": 500},
        {"top_k": 60, "top_p": 0.9},
        {"top_k": 400, "top_p": 0.5, "min_p": 0.01},
    ],
)
def test_candidates_and_rejection_equal_the_full_sort(options: dict[str, float], scale: float, is_tied: bool) -> None:
    num_rows, vocab_size = 8, 2500
    logits = random_logits(int(scale * 10), num_rows, vocab_size, scale=scale)
    if is_tied:  # what bfloat16 logits look like
        logits = logits.to(torch.bfloat16).float()
    keys = row_keys(torch.arange(num_rows), torch.arange(num_rows) + 9)
    filters = filters_of(num_rows, vocab_size, **options)
    plain = draw_filtered(GroupedLogits(logits), keys, filters, width=None)
    for width in (128, 16, 1):
        assert torch.equal(draw_filtered(GroupedLogits(logits), keys, filters, width=width), plain)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 1000, 8192])
@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_the_pruned_draw_equals_the_argmax_over_all_noise(vocab_size: int, scale: float) -> None:
    logits = random_logits(vocab_size, 24, vocab_size, scale=scale)
    keys = row_keys(torch.arange(24), torch.arange(24))
    scores = logits + gumbel(keys.unsqueeze(1), torch.arange(vocab_size).unsqueeze(0))
    assert torch.equal(GroupedLogits(logits).draw(keys), scores.argmax(-1))
    floor = logits.amax(-1) - 2.0
    scores[logits < floor.unsqueeze(1)] = -INF
    assert torch.equal(GroupedLogits(logits).draw(keys, floor), scores.argmax(-1))


# Distribution


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def draws_of(logits: Tensor, spec: SamplingSpec, positions: list[int], seeds: list[int] | None = None) -> Tensor:
    num_rows = len(positions)
    sampler = Sampler(num_rows, len(logits), CPU)
    for slot in range(num_rows):
        sampler.install(slot, replace(spec, seed=seeds[slot] if seeds else spec.seed), [0], 1)
    history = torch.zeros(num_rows, 1, dtype=torch.int64)
    return sampler.sample(logits.repeat(num_rows, 1), list(range(num_rows)), positions, history)[0]


NUM_DRAWS = 4000


@pytest.mark.slow
@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("name", ["plain", "temperature", "top_k", "top_p", "min_p", "all filters"])
def test_frequencies_match_the_filtered_softmax(name: str, vary: str) -> None:
    logits = random_logits(3, 12, scale=1.0)
    spec = replace(OPTIONS[name], seed=11)
    probabilities = reference_scores(logits, spec, [0], 1).softmax(-1).double()
    count = range(1, NUM_DRAWS + 1)
    positions, seeds = (list(count), None) if vary == "position" else ([1] * NUM_DRAWS, list(count))
    drawn = draws_of(logits, spec, positions, seeds)
    counts = torch.bincount(drawn, minlength=12).double()
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    # 11 degrees of freedom at most: 31.3 is the 0.1 % quantile; seeds are fixed, so this cannot flake.
    assert chi_square(counts[kept], probabilities[kept] * NUM_DRAWS) < 31.3


@pytest.mark.slow
def test_draws_at_neighbouring_positions_and_seeds_are_independent() -> None:
    logits = torch.zeros(4)
    positions = list(range(1, NUM_DRAWS + 1))
    first = draws_of(logits, DRAWN, positions)
    second = draws_of(logits, DRAWN, [position + 1 for position in positions])
    third = draws_of(logits, replace(DRAWN, seed=DRAWN.seed + 1), positions)
    for other in (second, third):
        pairs = torch.bincount(first * 4 + other, minlength=16).double()
        # 15 degrees of freedom: 37.7 is the 0.1 % quantile.
        assert chi_square(pairs, torch.full((16,), NUM_DRAWS / 16, dtype=torch.float64)) < 37.7


# State


@pytest.mark.parametrize("name", ["all penalties", "frequency", "plain", "all filters"])
def test_a_resumed_sequence_goes_on_as_if_never_interrupted(name: str) -> None:
    spec = replace(OPTIONS[name], bad_words=((3, 4), (9,)), stop_token_ids=(1, 2), min_new_tokens=15)
    prompt, logits = [5, 6, 7], random_logits(5, 24, 1, 40, scale=1.0)
    rows = Rows(40)
    rows.install(0, spec, prompt)
    whole = [rows.step(logits[index], [0])[0] for index in range(24)]
    for cut in (1, 10, 23):
        resumed = Rows(40)
        resumed.install(5, spec, prompt + whole[:cut], 3)
        assert [resumed.step(logits[index], [5])[0] for index in range(cut, 24)] == whole[cut:]
        # Preempted and installed again in the sampler that already held it.
        rows.install(0, spec, prompt + whole[:cut], 3)
        assert [rows.step(logits[index], [0])[0] for index in range(cut, 24)] == whole[cut:]


def test_a_reused_slot_keeps_nothing_of_its_former_sequence() -> None:
    logits = random_logits(6, 1, 40, scale=1.0)
    rows = Rows(40)
    rows.install(1, replace(OPTIONS["all penalties"], bad_words=((int(logits.argmax()),),)), [1, 2])
    for _ in range(6):
        rows.step(logits, [1])
    rows.sampler.release([1])
    for spec in (SamplingSpec(), OPTIONS["frequency"], DRAWN):
        rows.install(1, spec, [3])
        assert rows.sample(logits, [1])[0] == [reference_draw(logits[0], spec, [3], 1)]
    rows.sampler.release([1, 1, 6])
    with pytest.raises(KeyError):
        rows.sample(logits, [1])


def test_count_tables_grow_and_are_reused() -> None:
    spec, logits = OPTIONS["frequency"], random_logits(7, 11, 60, scale=1.0)
    rows = Rows(60, max_sequences=11)
    for turn in range(3):
        for slot in range(11):
            rows.install(slot, spec, [slot, turn], 1)
        slots = list(range(turn, 11))
        for _ in range(3):
            before = {slot: rows.token_ids[slot, : rows.lengths[slot]].tolist() for slot in slots}
            drawn = rows.step(logits[slots], slots)
            assert drawn == [reference_draw(logits[slot], spec, before[slot], 1) for slot in slots]
        rows.sampler.release(list(range(11)))


def test_install_refuses_what_it_cannot_hold() -> None:
    sampler = Sampler(2, 10, CPU)
    for slot, token_ids, num_prompt_tokens, words in (
        (2, [1], 1, "slot is 2"),
        (-1, [1], 1, "slot is -1"),
        (0, [1], 2, "num_prompt_tokens is 2"),
        (0, [], 0, "num_prompt_tokens is 0"),
        (0, [1, 10], 1, "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=words):
            sampler.install(slot, OPTIONS["frequency"], token_ids, num_prompt_tokens)
