# SPDX-License-Identifier: Apache-2.0
"""`pipeline()` on a tiny random llama: greedy text equals transformers, whatever the batch, the budget and the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mii_zmq as mii

pytestmark = pytest.mark.slow

PROMPTS = [
    "The quick brown fox",
    "你好，世界！今天天气",
    "stop  STOP   stopping",
    "def f(x):\n    return",
    "👨‍👩‍👧‍👦 family",
    "naïve café über straße — and a prompt that is somewhat longer than the others, so that it is split into chunks",
    "a",
    "1 2 3 4 5 6 7 8 9 10",
]
NEW_TOKENS = 24
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[list[int]]:
    """Greedy continuations by transformers, and a check that none of them hangs on a rounding error."""
    import torch
    from transformers import AutoModelForCausalLM

    from mii_zmq.tokenizer import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = load_tokenizer(str(tiny_model))
    continuations = []
    for prompt in PROMPTS:
        token_ids = tokenizer.encode(prompt)
        output = model.generate(
            torch.tensor([token_ids]),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=None,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for logits in output.logits:
            best, second = logits[0].topk(2).values
            assert best - second > 1e-4
        continuations.append(output.sequences[0, len(token_ids) :].tolist())
    return continuations


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> Iterator[mii.Pipeline]:
    with mii.pipeline(str(tiny_model), kv_cache_gb=0.05) as pipe:
        yield pipe


def texts_of(pipe: mii.Pipeline, reference: list[list[int]]) -> list[str]:
    return [pipe.tokenizer.decode(token_ids) for token_ids in reference]


def test_alone(pipe: mii.Pipeline, reference: list[list[int]]) -> None:
    texts = [pipe(prompt, **GREEDY)[0].generated_text for prompt in PROMPTS]
    assert texts == texts_of(pipe, reference)


def test_together(pipe: mii.Pipeline, reference: list[list[int]]) -> None:
    responses = pipe(PROMPTS, **GREEDY)
    assert [response.generated_text for response in responses] == texts_of(pipe, reference)
    assert {response.generated_length for response in responses} == {NEW_TOKENS}


@pytest.mark.parametrize("settings", [{"token_budget": 8}, {"num_blocks": 8, "block_size": 16, "max_sequences": 4}])
def test_with_split_prompts_and_with_a_small_pool(
    tiny_model: Path, reference: list[list[int]], settings: dict[str, Any]
) -> None:
    with mii.pipeline(str(tiny_model), **settings) as pipe:
        responses = pipe(PROMPTS, **GREEDY)
        assert [response.generated_text for response in responses] == texts_of(pipe, reference)
        assert pipe.inference_engine.stats().num_used_blocks == 0


def test_a_seed_decides_the_text_in_any_batch(pipe: mii.Pipeline) -> None:
    options = {"max_new_tokens": 16, "temperature": 0.9, "top_k": 50, "ignore_eos": True}
    (alone,) = pipe(PROMPTS[0], seed=7, **options)
    in_a_batch = pipe([*PROMPTS[1:], PROMPTS[0]], seed=7, **options)[-1]
    (other,) = pipe(PROMPTS[0], seed=8, **options)
    choices = pipe(PROMPTS[0], seed=7, n=3, **options)
    assert alone.generated_text == in_a_batch.generated_text == choices[0].generated_text
    assert alone.generated_text != other.generated_text
    assert len({choice.generated_text for choice in choices}) == 3


def test_log_probabilities_equal_transformers(pipe: mii.Pipeline, tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    # The temperature of the draws does not change what the model says of them.
    responses = pipe(PROMPTS, logprobs=3, prompt_logprobs=3, temperature=2.0, seed=5, max_new_tokens=NEW_TOKENS)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert response.logprobs is not None
        assert response.prompt_logprobs is not None
        records = [*response.prompt_logprobs[1:], *response.logprobs]
        prompt_ids = pipe.tokenizer.encode(prompt)
        token_ids = [*prompt_ids[:1], *(record.chosen.token_id for record in records if record is not None)]
        assert token_ids[: len(prompt_ids)] == prompt_ids
        assert len(token_ids) == response.prompt_length + response.generated_length
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids])).logits[0, :-1]
        for record, row in zip(records, logits.log_softmax(-1), strict=True):
            assert record is not None
            for entry in (record.chosen, *record.top):
                assert abs(entry.logprob - row[entry.token_id].item()) < 1e-3
            assert abs(record.top[0].logprob - row.max().item()) < 1e-3


@pytest.mark.parametrize("options", [{}, {"stop": [" ", "a", "\n"]}, {"return_full_text": True}])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_joins_to_the_text(pipe: mii.Pipeline, prompt: str, options: dict[str, Any]) -> None:
    arguments = {"max_new_tokens": 32, "seed": 3, "temperature": 1.2, **options}
    (whole,) = pipe(prompt, **arguments)
    parts = list(pipe.stream(prompt, **arguments))
    assert "".join(map(str, parts)) == whole.generated_text
    assert (parts[-1].generated_length, parts[-1].finish_reason) == (whole.generated_length, whole.finish_reason)
    if options.get("return_full_text"):
        assert whole.generated_text.startswith(prompt)


def test_options_are_mixed_freely_in_one_engine(pipe: mii.Pipeline) -> None:
    from concurrent.futures import ThreadPoolExecutor

    mixed: list[dict[str, Any]] = [
        {"do_sample": False},
        {"temperature": 0.5, "top_p": 0.5, "seed": 1},
        {"top_k": 3, "seed": 2},
        {"min_p": 0.2, "repetition_penalty": 1.3, "seed": 3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "do_sample": False},
        {"bad_words": ["the"], "stop": ["zz", "qqq"], "seed": 4},
        {"min_new_tokens": 10, "stop_token_ids": [5, 6, 7], "seed": 5},
    ]

    def call(options: dict[str, Any]) -> str:
        return pipe(PROMPTS[0], max_new_tokens=20, **options)[0].generated_text

    alone = [call(options) for options in mixed]
    with ThreadPoolExecutor(len(mixed)) as threads:
        assert list(threads.map(call, mixed)) == alone


def test_a_repeated_prompt_takes_its_blocks_from_the_prefix_cache(pipe: mii.Pipeline) -> None:
    prompt = "".join(PROMPTS) * 2
    (first,) = pipe(prompt, **GREEDY)
    before = pipe.inference_engine.stats().num_prefix_hit_tokens
    (second,) = pipe(prompt, **GREEDY)
    assert pipe.inference_engine.stats().num_prefix_hit_tokens > before
    assert second.generated_text == first.generated_text


def test_a_prompt_that_is_too_long_is_refused_and_the_next_works(pipe: mii.Pipeline) -> None:
    with pytest.raises(mii.MiiError, match="512 tokens"):
        pipe("a b " * 2000)
    assert pipe("a", max_new_tokens=1)[0].generated_length == 1
