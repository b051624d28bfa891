# SPDX-License-Identifier: Apache-2.0
"""Embeddings through all processes: the official `openai` package, groups that die, and transformers' hidden states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mii_zmq.client import AsyncClient, BackgroundLoop
from mii_zmq.embeddings import embed_all, embedding_bodies, values_of
from mii_zmq.worker.embedding import shape_vector
from mii_zmq.worker.fake_model import FakeModel
from mii_zmq.worker.fake_options import HIDDEN_SIZE
from tests.stack import PATIENCE_S, Stack, http

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.start_group("g", "fake:step_ms=1", "--pooling", "mean")
        stack.start_gateway()
        yield stack
    finally:
        stack.close()


def expected(text: str, pooling: str = "mean", dimensions: int | None = None) -> list[float]:
    return values_of(shape_vector(FakeModel().pool(list(text.encode()), pooling, HIDDEN_SIZE), dimensions, True))


def test_the_official_package(stack: Stack) -> None:
    """It asks for base64 unless it is told otherwise."""
    texts = ["hello", "wörld", "x" * 3000]
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="unused", max_retries=0) as client:
        found = client.embeddings.create(model="m", input=texts)
        assert [item.index for item in found.data] == [0, 1, 2]
        assert [item.embedding for item in found.data] == [expected(text) for text in texts]
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(len(text.encode()) for text in texts)
        numbers = client.embeddings.create(model="m", input="hello", encoding_format="float", dimensions=8)
        assert numbers.data[0].embedding == expected("hello", dimensions=8)
        ids = client.embeddings.create(model="m", input=[104, 105], extra_body={"pooling": "last"})
        assert ids.data[0].embedding == expected("hi", "last")
        with pytest.raises(openai.BadRequestError, match="input\\[1\\] has 9000 characters") as error:
            client.embeddings.create(model="m", input=["a", "b" * 9000])
        assert error.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="dimensions is 33, allowed: 1 to 32"):
            client.embeddings.create(model="m", input="a", dimensions=33)


def test_scores_and_rankings(stack: Stack) -> None:
    texts = ["red apples", "green pears", "red apple"]
    cosines = [sum(a * b for a, b in zip(expected("red apples"), expected(text), strict=True)) for text in texts]
    status, body = http(stack.url + "/score", {"model": "m", "text_1": "red apples", "text_2": texts})
    assert status == 200
    assert [item["score"] for item in json.loads(body)["data"]] == pytest.approx(cosines, abs=1e-6)
    asked = {"model": "m", "query": "red apples", "documents": texts, "top_n": 2}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        status, body = http(stack.url + path, asked)
        assert [item["index"] for item in json.loads(body)["results"]] == [0, 2]


def test_groups_say_what_they_give(stack: Stack) -> None:
    (group,) = stack.groups_status().values()
    assert (group["info"]["pooling"], group["info"]["hidden_size"]) == ("mean", HIDDEN_SIZE)


def test_a_group_that_dies_costs_no_embedding() -> None:
    """What it had goes to another one, and each request ends once."""
    stack = Stack()
    loop = BackgroundLoop()

    async def run(texts: list[str]) -> list[list[float]]:
        client = AsyncClient([stack.client_endpoint])
        try:
            await client.connect(PATIENCE_S)
            return [values_of(result.embedding) for result in await embed_all(client, "m", embedding_bodies(texts))]
        finally:
            await client.close()

    try:
        doomed = stack.start_group("doomed", "fake:step_ms=60000")
        texts = [f"text number {number}" for number in range(20)]
        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(loop.run, run(texts))
            stack.wait_for(lambda: any(group["num_requests"] == 20 for group in stack.groups_status().values()))
            stack.start_group("heir", "fake:")
            doomed.process.kill()
            found = future.result(PATIENCE_S)
        assert found == [expected(text, "last") for text in texts]
    finally:
        loop.close()
        stack.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_model_against_transformers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mii_zmq.worker.models.demo_model import resolve_model

    directory = resolve_model("demo", lambda text: None)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = ["The capital of France is Paris.", "Ein Satz mit Umlauten: äöü.", "Once upon a time. " * 120]
    stack = Stack()
    try:
        stack.start_group("g", "demo", "--dtype", "float32")
        stack.start_gateway()
        with openai.OpenAI(base_url=stack.url + "/v1", api_key="unused", max_retries=0) as client:
            for pooling in ("last", "mean", "first"):
                body: dict[str, Any] = {"pooling": pooling, "normalize": False}
                whole = client.embeddings.create(model="m", input=texts, extra_body=body)
                scaled = client.embeddings.create(model="m", input=texts, dimensions=8, extra_body={"pooling": pooling})
                for text, item, short in zip(texts, whole.data, scaled.data, strict=True):
                    with torch.inference_mode():
                        ids = tokenizer(text, return_tensors="pt").input_ids
                        states = model.base_model(ids).last_hidden_state[0]
                    wanted = {"last": states[-1], "first": states[0], "mean": states.mean(0)}[pooling]
                    torch.testing.assert_close(torch.tensor(item.embedding), wanted, rtol=1e-3, atol=1e-3)
                    cut = wanted[:8] / wanted[:8].norm()
                    torch.testing.assert_close(torch.tensor(short.embedding), cut, rtol=1e-3, atol=1e-3)
    finally:
        stack.close()
