# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings, /score and /rerank, with a worker's vectors behind them."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from typing import Any

import aiohttp
import pytest

from mii_zmq import embeddings
from mii_zmq.errors import PromptTooLong
from mii_zmq.protocol import GenerateBody
from tests.gateway.fake_client import FakeClient, FakeGeneration, embedding_of
from tests.gateway.reading import post

PATH = "/v1/embeddings"


def vector_of(prompt: str | list[int], **fields: Any) -> list[float]:
    form: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    return array("f", embedding_of(GenerateBody(task="embed", **form, **fields))).tolist()


def cosine(left: str, right: str, **fields: Any) -> float:
    return sum(a * b for a, b in zip(vector_of(left, **fields), vector_of(right, **fields), strict=True))


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab c", ["ab c"]),
        (["ab", "c"], ["ab", "c"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_form_of_input(
    http: aiohttp.ClientSession, broker: FakeClient, given: Any, prompts: list[Any]
) -> None:
    status, found = await post(http, PATH, {"model": "fake", "input": given})
    assert (status, found["object"], found["model"]) == (200, "list", "fake")
    assert found["id"].startswith("embd-")
    assert [(item["object"], item["index"]) for item in found["data"]] == [
        ("embedding", index) for index in range(len(prompts))
    ]
    for item, prompt in zip(found["data"], prompts, strict=True):
        assert item["embedding"] == vector_of(prompt)
        assert math.isclose(math.hypot(*item["embedding"]), 1.0, rel_tol=1e-6)
    num_tokens = sum(len(prompt) if isinstance(prompt, list) else len(prompt.split()) for prompt in prompts)
    assert found["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert all(sent.body.task == "embed" and not sent.stream and not sent.body.params for sent in broker.sent)


async def test_base64_holds_the_same_numbers(http: aiohttp.ClientSession) -> None:
    status, found = await post(http, PATH, {"model": "fake", "input": "ab", "encoding_format": "base64"})
    assert status == 200
    assert array("f", base64.b64decode(found["data"][0]["embedding"])).tolist() == vector_of("ab")


async def test_options_reach_the_worker(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    body = {
        "model": "fake", "input": "ab", "dimensions": 4, "pooling": "mean", "normalize": False, "user": "me",
        "add_special_tokens": False, "priority": 3, "encoding_format": None, "truncate_prompt_tokens": -1,
    }  # fmt: skip
    async with http.post(PATH, json=body, headers={"X-MII-Tenant": "t"}) as response:
        assert response.status == 200
        assert sorted(response.headers["x-ignored-fields"].split(", ")) == ["truncate_prompt_tokens", "user"]
        assert len((await response.json())["data"][0]["embedding"]) == 4
    (sent,) = broker.sent
    asked = sent.body
    assert (asked.dimensions, asked.pooling, asked.normalize, asked.add_special_tokens) == (4, "mean", False, False)
    assert (sent.priority, sent.tenant) == (3, "t")


async def test_only_so_many_are_under_way_at_once(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    waiting: list[FakeGeneration] = []
    broker.answer = waiting.append
    request = asyncio.ensure_future(post(http, PATH, {"model": "fake", "input": ["ab"] * 300}))
    for _ in range(embeddings.MAX_CONCURRENT_PROMPTS):
        await broker.next_generation()
    assert len(waiting) == embeddings.MAX_CONCURRENT_PROMPTS
    for number in range(300):
        if number >= embeddings.MAX_CONCURRENT_PROMPTS:
            await broker.next_generation()
        waiting[number].embedding = embedding_of(waiting[number].body)
        waiting[number].finish("stop")
    status, found = await request
    assert (status, len(found["data"])) == (200, 300)


async def test_the_first_failure_ends_all_and_names_its_place(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    def answer(generation: FakeGeneration) -> None:
        if generation.body.prompt == "bad":
            generation.fail(PromptTooLong("prompt has 9 tokens", param="prompt"))

    broker.answer = answer
    status, found = await post(http, PATH, {"model": "fake", "input": ["a", "b", "bad", "c"]})
    assert (status, found["error"]["param"], found["error"]["code"]) == (400, "input[2]", "context_length_exceeded")
    assert found["error"]["message"] == "input[2] has 9 tokens"
    assert [sent.is_cancelled.is_set() for sent in broker.sent] == [True, True, False, True]


async def test_a_client_that_leaves_cancels(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.answer = lambda generation: None
    request = asyncio.ensure_future(post(http, PATH, {"model": "fake", "input": ["a", "b"]}))
    generations = [await broker.next_generation() for _ in range(2)]
    request.cancel()
    for generation in generations:
        await generation.is_cancelled.wait()


async def test_vectors_of_one_request_are_bounded(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    def answer(generation: FakeGeneration) -> None:
        generation.embedding = bytes(embeddings.MAX_VECTOR_BYTES // 2 + 4)
        generation.finish("stop")

    broker.answer = answer
    status, found = await post(http, PATH, {"model": "fake", "input": ["a", "b"]})
    assert (status, found["error"]["param"]) == (400, None)
    assert "send fewer at a time" in found["error"]["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores(http: aiohttp.ClientSession, path: str) -> None:
    for left, right, pairs in (
        ("ab", "ax", [("ab", "ax")]),
        ("ab", ["ab", "xyz"], [("ab", "ab"), ("ab", "xyz")]),
        (["ab"], ["xyz"], [("ab", "xyz")]),
        (["ab", "cd"], ["ax", "cdd"], [("ab", "ax"), ("cd", "cdd")]),
    ):
        status, found = await post(http, path, {"model": "fake", "text_1": left, "text_2": right})
        assert (status, found["object"]) == (200, "list")
        assert [(item["index"], item["object"]) for item in found["data"]] == [(i, "score") for i in range(len(pairs))]
        assert [item["score"] for item in found["data"]] == pytest.approx([cosine(*pair) for pair in pairs], abs=1e-6)
        assert found["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_ranking(http: aiohttp.ClientSession, path: str) -> None:
    documents: list[Any] = ["hello", "xyz", {"text": "hello there"}, "hello", "well, hello"]
    asked = {"model": "fake", "query": "hello", "documents": documents}
    status, found = await post(http, path, asked)
    assert status == 200
    texts = [item["text"] if isinstance(item, dict) else item for item in documents]
    wanted = [cosine("hello", text) for text in texts]
    order = [item["index"] for item in found["results"]]
    assert order[:2] == [0, 3], "equal ones stay in order"
    assert sorted(order) == [0, 1, 2, 3, 4]
    scores = [item["relevance_score"] for item in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([wanted[index] for index in order], abs=1e-6)
    assert [item["document"] for item in found["results"]] == [{"text": texts[index]} for index in order]
    assert found["usage"].keys() == {"prompt_tokens", "total_tokens"}
    status, found = await post(http, path, {**asked, "top_n": 2, "return_documents": False, "pooling": "mean"})
    assert [sorted(item) for item in found["results"]] == [["index", "relevance_score"]] * 2
    best = [item["relevance_score"] for item in found["results"]]
    assert best == pytest.approx(
        sorted((cosine("hello", text, pooling="mean") for text in texts), reverse=True)[:2], abs=1e-6
    )
    status, found = await post(http, path, {**asked, "top_n": 99})
    assert len(found["results"]) == 5


async def test_groups_that_serve_different_models(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    def answer(generation: FakeGeneration) -> None:
        generation.embedding = bytes(4 * len(broker.sent))
        generation.finish("stop")

    broker.answer = answer
    status, found = await post(http, "/score", {"model": "fake", "text_1": "a", "text_2": "b"})
    assert (status, "different lengths" in found["error"]["message"]) == (503, True)


GOOD: dict[str, dict[str, Any]] = {
    PATH: {"model": "fake", "input": "a"},
    "/score": {"model": "fake", "text_1": "a", "text_2": "b"},
    "/v2/rerank": {"model": "fake", "query": "a", "documents": ["b"]},
}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {"input": []}, "input"),
        (PATH, {"input": ["a", ""]}, "input"),
        (PATH, {"input": ["a", [1]]}, "input"),
        (PATH, {"input": [1, -1]}, "input"),
        (PATH, {"input": [[1, 2**31]]}, "input"),
        (PATH, {"input": [[True]]}, "input[0][0]"),
        (PATH, {"input": {"text": "a"}}, "input"),
        (PATH, {"input": None}, "input"),
        (PATH, {"input": ["a"] * 2049}, "input"),
        (PATH, {"encoding_format": "int8"}, "encoding_format"),
        (PATH, {"dimensions": 0}, "dimensions"),
        (PATH, {"dimensions": 2**40}, "dimensions"),
        (PATH, {"dimensions": 1.5}, "dimensions"),
        (PATH, {"pooling": "sum"}, "pooling"),
        (PATH, {"normalize": "yes"}, "normalize"),
        (PATH, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (PATH, {"embed_dtype": "float16"}, "embed_dtype"),
        (PATH, {"temperature": 1}, "temperature"),
        (PATH, {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        (PATH, {"model": None}, "model"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_2": []}, "text_2"),
        ("/score", {"text_2": ["a", ""]}, "text_2"),
        ("/score", {"text_2": ["a"] * 2048}, "text_2"),
        ("/score", {"text_1": [[1]]}, "text_1[0]"),
        ("/score", {"queries": "a"}, "queries"),
        ("/v2/rerank", {"documents": []}, "documents"),
        ("/v2/rerank", {"documents": [{"title": "a"}]}, "documents[0]"),
        ("/v2/rerank", {"query": ""}, "query"),
        ("/v2/rerank", {"top_n": -1}, "top_n"),
        ("/v2/rerank", {"rank_fields": ["title"]}, "rank_fields"),
        ("/v2/rerank", {"documents": ["a"] * 2048}, "documents"),
    ],
)
async def test_refused(
    http: aiohttp.ClientSession, broker: FakeClient, path: str, fields: dict[str, Any], param: str
) -> None:
    status, found = await post(http, path, {**GOOD[path], **fields})
    assert status == 400, found
    assert found["error"]["param"] == param
    assert not broker.sent


@pytest.mark.parametrize("path", GOOD)
async def test_what_is_missing_is_named(http: aiohttp.ClientSession, path: str) -> None:
    for name in GOOD[path]:
        body = {key: value for key, value in GOOD[path].items() if key != name}
        status, found = await post(http, path, body)
        assert (status, found["error"]["param"]) == (400, name)


async def test_unknown_models(http: aiohttp.ClientSession) -> None:
    for path, good in GOOD.items():
        for model in ("nobody", "not a name"):
            status, found = await post(http, path, {**good, "model": model})
            assert (status, found["error"]["code"], found["error"]["param"]) == (404, "model_not_found", "model")
