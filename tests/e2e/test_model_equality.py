# SPDX-License-Identifier: Apache-2.0
"""The demo model against transformers, over REST and `pipeline`: alone, together, split prompts, a tiny pool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mii_zmq.worker.models.demo_model import ensure_demo_model
from tests.equal_output import EqualOutput
from tests.stack import Stack, generate, http

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200), pytest.mark.filterwarnings("default")]

PROMPTS = [
    "DeepSpeed is",
    "Seattle is",
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village",
    "In physics, the speed of light",
    "Zürich, Genève und Köln sind",
    "import numpy as np\n\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "The three laws of robotics are: first,",
    "A recipe for bread: take flour, water,",
    "日本の首都は",
    "SELECT name FROM",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondria is the",
    "To be, or not to be,",
    "🙂 means",
    "<html><body>",
    "Q: What is 2+2?\nA:",
    " ".join(["The quick brown fox jumps over the lazy dog and runs away."] * 12),
]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 64, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = str(ensure_demo_model())
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model, AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def expected(reference: tuple[Any, Any]) -> list[list[int]]:
    """What transformers' generate says, alone and greedily."""
    model, tokenizer = reference
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt).input_ids
        answer = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=64)
        found.append(answer[0, len(ids) :].tolist())
    return found


@pytest.fixture(scope="module")
def wide() -> Iterator[Stack]:
    yield from _serve()


@pytest.fixture(scope="module")
def narrow() -> Iterator[Stack]:
    yield from _serve("--token-budget", "32")


@pytest.fixture(scope="module")
def ranked() -> Iterator[Stack]:
    """Two ranks that hold 6 and 3 of the 9 heads."""
    yield from _serve("--tensor-parallel", "2")


def _serve(*options: str) -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.start_group("g", str(ensure_demo_model()), "--kv-cache-gb", "1", *options)
        stack.start_gateway()
        yield stack
    finally:
        stack.close()


def _completion(stack: Stack, prompt: str) -> dict[str, Any]:
    return generate(stack.url, "m", prompt, **GREEDY)[0]


def _compare(reference: tuple[Any, Any], expected: list[list[int]], responses: list[dict[str, Any]]) -> str:
    model, tokenizer = reference
    equal = EqualOutput(model)
    for prompt, expected_ids, response in zip(PROMPTS, expected, responses, strict=True):
        ids = tokenizer(prompt).input_ids
        assert response["prompt_length"] == len(ids)
        if response["generated_text"] == tokenizer.decode(expected_ids):
            equal.num_tokens += 64
            continue
        ours = tokenizer(response["generated_text"], add_special_tokens=False).input_ids
        equal.compare(ids, ours)
    return equal.check()


def test_one_at_a_time(reference: tuple[Any, Any], expected: list[list[int]], wide: Stack) -> None:
    print(_compare(reference, expected, [_completion(wide, prompt) for prompt in PROMPTS]))


def test_all_at_once(reference: tuple[Any, Any], expected: list[list[int]], wide: Stack) -> None:
    print(_compare(reference, expected, generate(wide.url, "m", PROMPTS, **GREEDY)))


def test_split_prompts(reference: tuple[Any, Any], expected: list[list[int]], narrow: Stack) -> None:
    with ThreadPoolExecutor(20) as pool:
        print(_compare(reference, expected, list(pool.map(lambda prompt: _completion(narrow, prompt), PROMPTS))))


def test_two_ranks(reference: tuple[Any, Any], expected: list[list[int]], ranked: Stack) -> None:
    print(_compare(reference, expected, generate(ranked.url, "m", PROMPTS, **GREEDY)))


def test_pipeline(reference: tuple[Any, Any], expected: list[list[int]]) -> None:
    import mii_zmq

    pipe = mii_zmq.pipeline(str(ensure_demo_model()), kv_cache_gb=1)
    try:
        print(_compare(reference, expected, [response.to_msg_dict() for response in pipe(PROMPTS, **GREEDY)]))
    finally:
        pipe.destroy()


def test_pool_of_eight_blocks(reference: tuple[Any, Any]) -> None:
    """16 requests of 100 + 200 tokens share 512 cells: preempted, recomputed, and still the solo text."""
    model, tokenizer = reference
    stack = Stack()
    try:
        stack.start_group("g", str(ensure_demo_model()), "--num-blocks", "8", "--block-size", "64")
        url = stack.start_gateway()
        words = tokenizer("One two three four five six seven eight nine ten and so it goes. " * 20).input_ids
        prompts = [words[start : start + 100] for start in range(16)]
        params = {"model": "m", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

        def ask(prompt: list[int]) -> str:
            status, body = http(url + "/v1/completions", {**params, "prompt": prompt}, 900)
            assert status == 200, body
            answer = json.loads(body)
            assert answer["usage"]["completion_tokens"] == 200
            return str(answer["choices"][0]["text"])

        solo = [ask(prompt) for prompt in prompts]
        before = stack.groups_status()["g"]["load"]["num_preemptions"]
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(ask, prompts))
        stack.wait_for(lambda: stack.used_blocks() == 0, 5)
        preemptions = stack.groups_status()["g"]["load"]["num_preemptions"] - before
        assert preemptions > 0
        equal = EqualOutput(model)
        for prompt, alone, text in zip(prompts, solo, together, strict=True):
            if alone == text:
                equal.num_tokens += 200
            else:
                equal.compare(prompt, tokenizer(text, add_special_tokens=False).input_ids)
        print(f"{preemptions} preemptions; {equal.check()}")

        status, body = http(url + "/v1/completions", {**params, "prompt": words[:90] * 6})
        assert status == 400
        assert json.loads(body)["error"]["code"] == "context_length_exceeded"
        assert ask(prompts[0]) == solo[0]
    finally:
        stack.close()
