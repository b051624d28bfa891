# SPDX-License-Identifier: Apache-2.0
"""What other people's benchmarks send, and what they read from the answers, against real processes with a fake engine.

The bodies are those of vLLM (`vllm bench serve`), SGLang, guidellm, aiperf, genai-perf and llmperf; answers are read as
these tools read them: which chunks count as tokens, where the usage is looked for, what must not be there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.stack import Stack

pytestmark = pytest.mark.slow

PROMPT = "Lorem ipsum dolor sit amet"
NUM_TOKENS = 40
"""The engine ends an answer after 5 tokens unless it is told to ignore that."""
HEADERS = {"Authorization": "Bearer key", "x-request-id": "bench-0"}
PARTS = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
PLAIN = [{"role": "user", "content": PROMPT}]
USAGE = {"stream_options": {"include_usage": True}}
RUNNING_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
Event = dict[str, Any]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    stack = Stack()
    try:
        stack.start_group("g", "fake:eos_every=5,alphabet=letters")
        yield stack.start_gateway()
    finally:
        stack.close()


async def stream(url: str, path: str, body: dict[str, Any], ignored: str = "") -> list[Event]:
    """The events of a stream that ended well; `ignored` are the fields that ask for what is done anyway."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json={"model": "m", "stream": True, **body}, headers=HEADERS) as response,
    ):
        assert response.status == 200, await response.text()
        assert response.headers.get("x-ignored-fields", "") == ignored
        lines = [line.strip().decode() async for line in response.content]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(event: Event) -> str:
    """As every tool finds it: in the first choice, under the name of the door."""
    choice = event["choices"][0]
    return (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""


VLLM_SAMPLING = {
    "temperature": 0.0, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "frequency_penalty": 0.1, "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
}  # fmt: skip
VLLM_TEXT = {
    "prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": NUM_TOKENS, "logprobs": None, **USAGE,
    "ignore_eos": True, "temperature": 0.0,
}  # fmt: skip
VLLM_CHAT = {"messages": PARTS, "max_completion_tokens": NUM_TOKENS, **USAGE, "ignore_eos": True, "temperature": 0.0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", VLLM_TEXT),
        ("/v1/completions", {**VLLM_TEXT, "prompt": list(range(32, 60))}),
        ("/v1/completions", {**VLLM_TEXT, **VLLM_SAMPLING}),
        ("/v1/completions", {**VLLM_TEXT, "logprobs": 3}),
        ("/v1/chat/completions", VLLM_CHAT),
        ("/v1/chat/completions", {**VLLM_CHAT, **VLLM_SAMPLING}),
        ("/v1/chat/completions", {**VLLM_CHAT, "messages": PLAIN}),
    ],
)
async def test_vllm(url: str, path: str, body: dict[str, Any]) -> None:
    *chunks, last = await stream(url, path, body)
    # A chunk with choices is a token; the usage is looked for where there are none.
    assert all(chunk["choices"] for chunk in chunks)
    assert not last["choices"]
    assert last["usage"]["completion_tokens"] == NUM_TOKENS
    assert last["usage"]["prompt_tokens"] > 0
    assert len("".join(map(text_of, chunks))) == NUM_TOKENS


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/v1/completions", {"prompt": PROMPT, "best_of": 1}, "best_of"),
        ("/v1/chat/completions", {"messages": PLAIN}, ""),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": ""}, *PLAIN]}, ""),
    ],
)
async def test_sglang_and_llmperf(url: str, path: str, body: dict[str, Any], ignored: str) -> None:
    """Both take the first choice of every event, so that there must not be one without; they ask for no usage."""
    asked = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **body}
    events = await stream(url, path, asked, ignored)
    assert all(event["choices"] and "error" not in event for event in events)
    assert len("".join(map(text_of, events))) == NUM_TOKENS


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": NUM_TOKENS}),
        ("/v1/chat/completions", {"messages": PARTS, "max_completion_tokens": NUM_TOKENS}),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}, *PARTS], "max_tokens": NUM_TOKENS}),
    ],
)
async def test_guidellm_and_aiperf_read_usage_from_every_chunk(url: str, path: str, body: dict[str, Any]) -> None:
    events = await stream(url, path, {**body, **RUNNING_USAGE, "ignore_eos": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == NUM_TOKENS
    prompt_lengths = {event["usage"]["prompt_tokens"] for event in events}
    assert len(prompt_lengths) == 1
    assert prompt_lengths.pop() > 0
    # An interrupted stream is counted by what its last chunk says.
    shown = 0
    for event in events[:-1]:
        shown += len(text_of(event))
        assert shown <= event["usage"]["completion_tokens"]


async def test_guidellm_and_aiperf_on_responses(url: str) -> None:
    body = {
        "model": "m", "stream": True, "max_output_tokens": NUM_TOKENS, "ignore_eos": True,
        "input": [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}],
    }  # fmt: skip
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/responses", json=body) as response:
        assert response.status == 200, await response.text()
        lines = [line.strip().decode() async for line in response.content]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert len(text) == NUM_TOKENS
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert events[-1]["response"]["usage"]["output_tokens"] == NUM_TOKENS


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": [PROMPT], "max_tokens": NUM_TOKENS}, "text_completion"),
        ("/v1/chat/completions", {"messages": PLAIN, "max_tokens": NUM_TOKENS}, "chat.completion.chunk"),
        ("/v1/chat/completions", {"messages": PARTS, "max_completion_tokens": NUM_TOKENS}, "chat.completion.chunk"),
    ],
)
@pytest.mark.parametrize("usage", [{}, USAGE])
async def test_genai_perf_and_aiperf(
    url: str, path: str, body: dict[str, Any], kind: str, usage: dict[str, Any]
) -> None:
    """They tell chunks by `object`, and pass --extra-inputs on: these force the length of answers."""
    extra = {"min_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    events = await stream(url, path, {**body, **extra, **usage})
    assert {event["object"] for event in events} == {kind}
    assert len("".join(text_of(event) for event in events if event["choices"])) == NUM_TOKENS
    if usage:
        assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": PLAIN})],
)
async def test_whole_answers(url: str, path: str, body: dict[str, Any]) -> None:
    """As genai-perf without --streaming and load generators like locust, hey or k6 ask."""
    asked = {"model": "m", "max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "stream": False, **body}
    async with aiohttp.ClientSession() as session, session.post(url + path, json=asked) as response:
        assert response.status == 200
        answer = await response.json()
    choice = answer["choices"][0]
    assert len(choice["message"]["content"] if "message" in choice else choice["text"]) == NUM_TOKENS
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS


async def test_what_is_asked_before_the_first_request(url: str) -> None:
    """Readiness and the name of the model."""
    async with aiohttp.ClientSession() as session:
        async with session.get(url + "/health") as response:
            assert response.status == 200
        async with session.get(url + "/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["m"]
        async with session.get(url + "/metrics") as response:
            assert "vllm:num_requests_running" in await response.text()
