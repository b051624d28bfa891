# SPDX-License-Identifier: Apache-2.0
"""Structured output through the real worker, on a tiny random model: every answer has its form, others are untouched.

A random model draws any token, so that the form of an answer comes from its grammar alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mii_zmq as mii
from mii_zmq.errors import InvalidRequest
from tests.e2e.structured_schemas import SCHEMAS
from tests.stack import Stack, http

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.slow

ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_gb": 0.05}
ANSWER: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 480}
PLAIN: dict[str, Any] = {"seed": 5, "max_new_tokens": 60, "ignore_eos": True}
PLAIN_PROMPTS = ["The quick brown fox", "1 2 3 4 5", "naïve café", "a"]
NUM_THREADS = 24


def grammar(kind: str, value: str = "") -> dict[str, str]:
    return {"kind": kind, "value": value}


def answer(pipe: mii.Pipeline, number: int) -> mii.Response:
    """To schema `number`, counted on behind the last one."""
    schema = json.dumps(SCHEMAS[number % len(SCHEMAS)])
    (response,) = pipe(f"answer {number}:", seed=number, structured_output=grammar("json_schema", schema), **ANSWER)
    return response


def check(number: int, response: mii.Response) -> None:
    schema, text = SCHEMAS[number % len(SCHEMAS)], response.generated_text
    assert response.finish_reason == "stop", text
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def plain(pipe: mii.Pipeline, prompt: str) -> str:
    return pipe(prompt, **PLAIN)[0].generated_text


def mixed(pipe: mii.Pipeline, numbers: range, expected: dict[str, str]) -> None:
    """Answers to schemas and plain requests side by side."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        answers = {number: threads.submit(answer, pipe, number) for number in numbers}
        others = [(prompt, threads.submit(plain, pipe, prompt)) for prompt in PLAIN_PROMPTS * (len(numbers) // 8)]
        for number, future in answers.items():
            check(number, future.result())
        for prompt, other in others:
            assert other.result() == expected[prompt]


def grammar_processes() -> list[int]:
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return [int(pid) for pid in children if "grammar_process" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_every_answer_has_its_form_and_plain_requests_are_as_without(tiny_model: Path) -> None:
    """One engine for all of it, since its grammar process takes seconds to start."""
    with mii.pipeline(str(tiny_model), **ENGINE) as pipe:
        expected = {prompt: plain(pipe, prompt) for prompt in PLAIN_PROMPTS}
        assert grammar_processes() == []
        mixed(pipe, range(len(SCHEMAS)), expected)
        assert len(grammar_processes()) == 1
        other_kinds(pipe)
        other_options(pipe)
        refusals(pipe)
        assert pipe.inference_engine.stats().num_used_blocks == 0


def other_kinds(pipe: mii.Pipeline) -> None:
    tag = {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": SCHEMAS[15]},
        "end": "</call>",
    }
    kinds = {
        "regex": ("[a-c]{3}-[0-9]{2,4}", "[a-c]{3}-[0-9]{2,4}"),
        "choice": ('["yes", "no", "perhaps"]', "yes|no|perhaps"),
        "ebnf": ('root ::= "x" item{1,3}\nitem ::= [0-9] ","', "x([0-9],){1,3}"),
        "structural_tag": (json.dumps({"type": "structural_tag", "format": tag}), r"<call>\s*\{.*\}\s*</call>"),
        "json_object": ("", None),
    }
    for kind, (value, pattern) in kinds.items():
        (response,) = pipe("go on:", seed=3, structured_output=grammar(kind, value), **ANSWER)
        if pattern is not None:
            assert re.fullmatch(pattern, response.generated_text, re.DOTALL), (kind, response.generated_text)
            assert response.finish_reason == "stop"
        elif response.finish_reason == "stop":
            assert isinstance(json.loads(response.generated_text), dict)


def other_options(pipe: mii.Pipeline) -> None:
    choice = grammar("choice", '["yes", "no"]')
    options: list[dict[str, Any]] = [
        {"do_sample": False},
        {"ignore_eos": True},
        {"min_new_tokens": 30},
        {"top_k": 3, "repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {5: 50.0}},
        {"bad_words": ["no"]},
        {"n": 3},
    ]
    for more in options:
        for response in pipe("well:", structured_output=choice, max_new_tokens=40, seed=1, **more):
            assert response.generated_text in ("yes", "no"), more
            assert response.finish_reason == "stop"
    (cut,) = pipe("well:", structured_output=grammar("regex", "a{50}"), max_new_tokens=5)
    assert cut.finish_reason == "length"
    parts = list(pipe.stream("well:", structured_output=choice, max_new_tokens=40, seed=1))
    assert "".join(map(str, parts)) in ("yes", "no")


def refusals(pipe: mii.Pipeline) -> None:
    for kind, value, reason in (
        ("regex", "(a", "not closed"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "/uniqueItems"),
        ("json_schema", "{", "no JSON"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            pipe("hello", structured_output=grammar(kind, value))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_five_hundred_answers_among_plain_requests(tiny_model: Path) -> None:
    """With a pool that preempts, and a grammar process that is killed at the end."""
    with mii.pipeline(str(tiny_model), **{**ENGINE, "kv_cache_gb": None, "num_blocks": 160, "block_size": 16}) as pipe:
        expected = {prompt: plain(pipe, prompt) for prompt in PLAIN_PROMPTS}
        mixed(pipe, range(500), expected)
        (pid,) = grammar_processes()
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            answers = {number: threads.submit(answer, pipe, number) for number in range(100, 110)}
            os.kill(pid, signal.SIGKILL)
            for number, future in answers.items():
                check(number, future.result())
        assert grammar_processes() != [pid]
        assert pipe.inference_engine.stats().num_used_blocks == 0


@pytest.mark.long
def test_ranks_draw_alike(tiny_model: Path) -> None:
    """Ranks that drew differently would end the engine."""
    with mii.pipeline(str(tiny_model), **ENGINE, tensor_parallel=2) as pipe:
        expected = {prompt: plain(pipe, prompt) for prompt in PLAIN_PROMPTS}
        mixed(pipe, range(len(SCHEMAS)), expected)


@pytest.mark.long
def test_http_answers_have_their_form_and_wrong_grammars_are_400() -> None:
    """Through gateway, broker and actor, with several requests at once."""
    stack = Stack()
    try:
        stack.start_group("one", "fake:step_ms=1")
        url = stack.start_gateway() + "/v1/chat/completions"

        def ask(number: int) -> tuple[int, bytes]:
            schema = {"name": "answer", "strict": True, "schema": SCHEMAS[15]}
            body = {"model": "m", "messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 300}
            return http(url, body | {"response_format": {"type": "json_schema", "json_schema": schema}})

        with ThreadPoolExecutor(8) as threads:
            for status, answer in threads.map(ask, range(24)):
                assert status == 200, answer
                choice = json.loads(answer)["choices"][0]
                assert choice["finish_reason"] == "stop"
                jsonschema.Draft202012Validator(SCHEMAS[15]).validate(json.loads(choice["message"]["content"]))
        wrong = {"model": "m", "messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "(a"}}
        status, answer = http(url, wrong)
        assert status == 400
        assert "not closed" in json.loads(answer)["error"]["message"]
    finally:
        stack.close()
