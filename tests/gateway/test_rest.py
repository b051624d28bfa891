# SPDX-License-Identifier: Apache-2.0
"""MII's door: exact bytes, order, choices, events, errors."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from mii_zmq.errors import Overloaded, PromptTooLong
from mii_zmq.gateway.state import Gateway
from tests.gateway.fake_client import FakeClient, FakeGeneration
from tests.gateway.reading import post, read_chunks


async def test_success_bytes_are_those_of_the_original(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    def answer(generation: FakeGeneration) -> None:
        generation.push("hé", " 😀", '"\n')
        generation.finish("length")

    broker.answer = answer
    async with http.post("/mii/fake", json={"prompts": "a b c"}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "application/json"
        assert await response.read() == (
            b'[{"finish_reason":"length","generated_length":3,'
            b'"generated_text":"h\\u00e9 \\ud83d\\ude00\\"\\n","prompt_length":3}]\n'
        )


async def test_prompts_and_choices_keep_their_order(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.answer = lambda generation: None
    answer = asyncio.create_task(post(http, "/mii/org/fake-7b", {"prompts": ["one", "two"], "n": 2, "seed": 5}))
    sent = [await broker.next_generation() for _ in range(4)]
    for number, generation in reversed(list(enumerate(sent))):
        generation.push(str(number))
        generation.finish("stop")
    _, body = await answer
    assert [entry["generated_text"] for entry in body] == ["0", "1", "2", "3"]
    assert [generation.body.prompt for generation in sent] == ["one", "one", "two", "two"]
    seeds = [generation.body.params["seed"] for generation in sent]
    assert seeds[0] == 5
    assert seeds[0] != seeds[1]
    assert seeds[:2] == seeds[2:]
    assert {generation.deployment for generation in sent} == {"org/fake-7b"}


async def test_options_reach_the_engine_unchanged(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    options = {"max_new_tokens": 7, "do_sample": False, "stop": "x", "top_k": 3, "ignore_eos": True}
    async with http.post("/mii/fake", json={"prompts": "a", "prompt_length": 9, **options}) as response:
        assert response.status == 200
    assert broker.sent[0].body.params == {**options, "stop": ["x"]}


async def test_stream_has_one_event_per_token_and_a_last_one(http: aiohttp.ClientSession) -> None:
    async with http.post("/mii/fake", json={"prompts": "a b", "stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Encoding" not in response.headers
        chunks = await read_chunks(response)
    assert chunks == [
        {"finish_reason": "none", "generated_text": "[a]", "index": 0},
        {"finish_reason": "none", "generated_text": "[b]", "index": 0},
        {"finish_reason": "length", "generated_text": "", "index": 0, "generated_length": 2, "prompt_length": 2},
    ]


async def test_stream_of_several_prompts_carries_their_index(http: aiohttp.ClientSession) -> None:
    prompts = [f"p{number} x" for number in range(20)]
    async with http.post("/mii/fake", json={"prompts": prompts, "stream": True}) as response:
        chunks = await read_chunks(response)
    texts = [""] * 20
    ends = []
    for chunk in chunks:
        texts[chunk["index"]] += chunk["generated_text"]
        if chunk["finish_reason"] != "none":
            ends.append(chunk["index"])
    assert texts == [f"[p{number}][x]" for number in range(20)]
    assert sorted(ends) == list(range(20))


async def test_one_failed_prompt_ends_the_others(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    def answer(generation: FakeGeneration) -> None:
        if generation.body.prompt == "long":
            generation.fail(PromptTooLong("prompts has 9 tokens", param="prompt"))

    broker.answer = answer
    async with http.post("/mii/fake", json={"prompts": ["a", "long", "b"]}) as response:
        assert response.status == 400
        assert await response.read() == b'{"message": "prompts has 9 tokens"}\n'
    assert [generation.is_cancelled.is_set() for generation in broker.sent] == [True, False, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_overload_says_when_to_come_back(http: aiohttp.ClientSession, broker: FakeClient, stream: bool) -> None:
    broker.answer = lambda generation: generation.fail(Overloaded("full", retry_after_ms=2300))
    async with http.post("/mii/fake", json={"prompts": "a", "stream": stream}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "3"
        assert response.headers["Content-Type"] == "application/json"


async def test_unknown_deployment_is_404(http: aiohttp.ClientSession) -> None:
    for name in ("nobody", "a/b/c", "with%20space", "x" * 300, "%ff", "fake/"):
        async with http.post(f"/mii/{name}", json={"prompts": "a"}) as response:
            assert response.status == 404, name
            assert list(await response.json()) == ["message"]


async def test_other_methods_are_405_with_allow(http: aiohttp.ClientSession) -> None:
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH"):
        async with http.request(method, "/mii/fake") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert "message" in await response.json()


async def test_no_broker_is_503_at_once(http: aiohttp.ClientSession, broker: FakeClient, gateway: Gateway) -> None:
    broker.is_connected = False
    async with http.post("/mii/fake", json={"prompts": "a"}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
    assert gateway.metrics.num_in_flight == 0
