# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii_zmq.bench_datasets import (
    FIRST_TOKEN_ID,
    BenchPrompt,
    DatasetOptions,
    PrefixOptions,
    RandomOptions,
    ShareGPTOptions,
    arrival_times,
    make_prompts,
)
from mii_zmq.errors import ConfigError

seeds = st.integers(0, 1000).map(str)


def token_ids(prompt: BenchPrompt) -> list[int]:
    assert isinstance(prompt.content, list)
    return prompt.content


@given(seeds, st.integers(1, 60), st.integers(1, 60), st.floats(0, 0.99), st.integers(0, 20), st.integers(64, 300))
def test_random_prompts_keep_to_their_bounds(
    seed: str, mean_in: int, mean_out: int, ratio: float, prefix: int, vocab_size: int
) -> None:
    options = RandomOptions(mean_in, mean_out, prefix, ratio)
    prompts = make_prompts(options, 10, seed, vocab_size, as_text=False)
    assert len(prompts) == 10
    assert len({tuple(token_ids(prompt)[:prefix]) for prompt in prompts}) == 1
    for prompt in prompts:
        assert prompt.num_tokens == len(prompt.content)
        assert math.floor(mean_in * (1 - ratio)) <= prompt.num_tokens - prefix <= math.ceil(mean_in * (1 + ratio))
        assert prompt.num_tokens > prefix
        assert max(1, math.floor(mean_out * (1 - ratio))) <= prompt.output_tokens <= math.ceil(mean_out * (1 + ratio))
        assert all(FIRST_TOKEN_ID <= token_id < vocab_size for token_id in token_ids(prompt))


def test_the_same_seed_makes_the_same_prompts() -> None:
    options = RandomOptions(50, 10, 5, 0.5)
    first, again, other = (make_prompts(options, 20, seed, 256, as_text=False) for seed in ("a", "a", "b"))
    assert first == again
    assert first != other


def test_normal_lengths_have_their_mean_and_are_cut_where_asked() -> None:
    options = RandomOptions(260, 60, 40, 0.3, "normal", max_input_tokens=340)
    prompts = make_prompts(options, 400, "0", 256, as_text=False)
    lengths = [prompt.num_tokens - 40 for prompt in prompts]
    assert sum(lengths) / 400 == pytest.approx(247, abs=8)  # the mean of what is cut at 300
    assert max(prompt.num_tokens for prompt in prompts) == 340
    assert min(lengths) >= 1
    assert len(set(lengths)) > 50


def test_text_has_one_word_per_token() -> None:
    (prompt,) = make_prompts(RandomOptions(30), 1, "0", 256, as_text=True)
    assert isinstance(prompt.content, str)
    assert len(prompt.content.split()) == prompt.num_tokens == 30


@given(st.integers(1, 40), st.integers(1, 12))
def test_prefixes_are_used_equally_often(num_prompts: int, num_prefixes: int) -> None:
    options = PrefixOptions(6, 4, num_prefixes, 3)
    prompts = make_prompts(options, num_prompts, "0", 10_000, as_text=False)
    assert {(prompt.num_tokens, prompt.output_tokens) for prompt in prompts} == {(10, 3)}
    uses = Counter(tuple(token_ids(prompt)[:6]) for prompt in prompts)
    assert len(uses) == min(num_prompts, num_prefixes)
    assert max(uses.values()) - min(uses.values()) <= 1


@given(st.integers(0, 50), st.floats(0.1, 1000), st.floats(0.05, 20), seeds)
def test_arrivals_ascend_and_take_as_long_as_the_rate_says(num: int, rate: float, burstiness: float, seed: str) -> None:
    times = arrival_times(num, rate, burstiness, seed)
    assert len(times) == num
    assert times == sorted(times)
    if num:
        assert times[-1] == pytest.approx(num / rate)


def test_arrivals_at_once_and_at_even_gaps() -> None:
    assert arrival_times(3, math.inf, 1.0, "0") == [0.0, 0.0, 0.0]
    assert arrival_times(4, 2.0, math.inf, "0") == pytest.approx([0.5, 1.0, 1.5, 2.0])


def spread(burstiness: float) -> float:
    """The deviation of the gaps over their mean."""
    times = arrival_times(4000, 1.0, burstiness, "0")
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    assert [spread(shape) for shape in (0.25, 1.0, 4.0)] == pytest.approx([2.0, 1.0, 0.5], rel=0.1)


def conversation(*texts: Any) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}


def from_file(path: Path, entries: Any, num: int, output_tokens: int | None = None) -> list[BenchPrompt]:
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return make_prompts(ShareGPTOptions(path, output_tokens), num, "0", 256, as_text=True)


def test_sharegpt_takes_the_first_two_turns_of_usable_conversations(tmp_path: Path) -> None:
    usable = [conversation("question " * 10, "an answer " * 4, "more"), conversation("w" * 400, "v" * 401)]
    useless = [
        conversation("only a question"), conversation("short", "x" * 80), conversation("x" * 80, "short"),
        conversation("x" * 4200, "y" * 80), conversation("x" * 4000, "y" * 4400), conversation(None, "y" * 80), {}, "x",
    ]  # fmt: skip
    prompts = from_file(tmp_path / "s.json", [*useless, *usable], 2)
    assert sorted((prompt.content[0], prompt.num_tokens, prompt.output_tokens) for prompt in prompts) == [
        ("q", 23, 10),
        ("w", 100, 101),
    ]
    prompts = from_file(tmp_path / "s.json", [*useless, *usable], 3, output_tokens=50)
    assert {prompt.output_tokens for prompt in prompts} == {50}
    with pytest.raises(ConfigError, match="holds 2 conversations of usable length, but 3"):
        from_file(tmp_path / "s.json", [*useless, *usable], 3)


@pytest.mark.parametrize(("content", "error"), [("{", "is not JSON"), ("{}", "not a JSON list"), ("[]", "holds 0")])
def test_a_wrong_sharegpt_file_is_one_clear_error(tmp_path: Path, content: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        from_file(tmp_path / "s.json", content, 1)


def test_a_missing_sharegpt_file_is_named(tmp_path: Path) -> None:
    options: DatasetOptions = ShareGPTOptions(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"cannot read the dataset .*none\.json"):
        make_prompts(options, 1, "0", 256, as_text=True)
