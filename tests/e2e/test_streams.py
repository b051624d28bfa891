# SPDX-License-Identifier: Apache-2.0
"""With the demo model: a joined stream equals the unstreamed text, whatever characters, stops or sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mii_zmq.worker.models.demo_model import ensure_demo_model
from tests.stack import Stack, generate, http, stream_events

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

TEXTS = [
    "Repeat after me: 日本語のテキストと中文字符。 日本語のテキストと中文字符。 日本語の",
    "Family emoji: 👨‍👩‍👧‍👦 👩‍🚀 🏳️‍🌈 👨‍👩‍👧‍👦 👩‍🚀 🏳️‍🌈 👨‍👩‍👧‍👦",
    "def f():\n        return 1\n\n\ndef g():\n        return 2\n\n\ndef h():\n",
    "Columns:    a        b            c    a        b            c   ",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
]
STOPS: list[list[str]] = [[], ["\n\n"], ["lazy dog", "return 2"], ["e q", "語の"], [" brown fox jumps"]]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.start_group("g", str(ensure_demo_model()), "--kv-cache-gb", "1")
        stack.start_gateway()
        yield stack
    finally:
        stack.close()


def cases() -> list[dict[str, Any]]:
    found = []
    for index in range(50):
        sampled = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": index} if index % 2 else {"do_sample": False}
        found.append({"prompts": TEXTS[index % 5], "stop": STOPS[(index // 5) % 5], "max_new_tokens": 32} | sampled)
    return found


def test_fifty_joined_streams_equal_the_unstreamed_texts(stack: Stack) -> None:
    """Each pair runs alone on the server, so that float32 rounding is the same; the streams then run all at once."""
    for case in cases():
        events = list(stream_events(stack.url, "/mii/m", case))
        prompts = case["prompts"]
        whole = generate(stack.url, "m", prompts, **{key: value for key, value in case.items() if key != "prompts"})[0]
        assert "".join(event["generated_text"] for event in events) == whole["generated_text"], case
        assert "\ufffd" not in "".join(event["generated_text"] for event in events[:-2])
        for stop in case["stop"]:
            assert stop not in whole["generated_text"]
        assert events[-1]["finish_reason"] == whole["finish_reason"]


def test_streams_together(stack: Stack) -> None:
    """In a batch of 50 float32 sums round differently, which may flip a near tie; nearly all texts are the same."""

    def join(case: dict[str, Any]) -> str:
        return "".join(event["generated_text"] for event in stream_events(stack.url, "/mii/m", case))

    alone = [join(case) for case in cases()]
    with ThreadPoolExecutor(50) as pool:
        together = list(pool.map(join, cases()))
    assert sum(one == other for one, other in zip(alone, together, strict=True)) >= 45
    for case, text in zip(cases(), together, strict=True):
        assert not any(stop in text for stop in case["stop"])


def test_plain_text_has_one_event_per_token(stack: Stack) -> None:
    body = {"prompts": "The capital of France is", "max_new_tokens": 60, "do_sample": False, "ignore_eos": True}
    events = list(stream_events(stack.url, "/mii/m", body))
    assert events[-1]["generated_length"] == 60
    # Every token but those that end inside a character has its own event.
    assert sum(bool(event["generated_text"]) for event in events) >= 58


def test_chat_answers_and_stops(stack: Stack) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    status, body = http(
        stack.url + "/v1/chat/completions",
        {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 40},
    )
    answer = json.loads(body)
    assert status == 200
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
