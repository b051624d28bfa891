# SPDX-License-Identifier: Apache-2.0
"""/tokenize and /detokenize, with the worker's part played by hand."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from tests.gateway.fake_client import FakeClient, FakeGeneration
from tests.gateway.reading import post

MESSAGES = [{"role": "user", "content": "hi there"}]


@pytest.mark.parametrize("asked", [{"prompt": "hi there", "add_special_tokens": False}, {"messages": MESSAGES}])
async def test_tokenize(http: aiohttp.ClientSession, broker: FakeClient, asked: dict[str, Any]) -> None:
    status, found = await post(http, "/tokenize", {"model": "fake", **asked})
    assert (status, found["count"], found["tokens"]) == (200, 2, [0, 1])
    assert found["max_model_len"] == 2048
    (sent,) = broker.sent
    assert (sent.body.task, sent.stream, sent.body.prompt) == ("tokenize", False, asked.get("prompt"))


async def test_detokenize(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    def answer(generation: FakeGeneration) -> None:
        generation.push("hi")
        generation.finish("stop")

    broker.answer = answer
    assert await post(http, "/detokenize", {"model": "fake", "tokens": [5, 6]}) == (200, {"prompt": "hi"})
    (sent,) = broker.sent
    assert (sent.body.task, sent.body.prompt_token_ids) == ("detokenize", [5, 6])


async def test_count_tokens(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    body = {"model": "fake", "system": "Be brief.", "messages": MESSAGES}
    assert await post(http, "/v1/messages/count_tokens", body) == (200, {"input_tokens": 4})
    (sent,) = broker.sent
    assert (sent.body.task, sent.stream) == ("tokenize", False)
    status, found = await post(http, "/v1/messages/count_tokens", {**body, "max_tokens": 3})
    assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "fake"}, "prompt"),
        ("/tokenize", {"prompt": "a"}, "model"),
        ("/tokenize", {"model": "fake", "prompt": ["a", "b"]}, "prompt"),
        ("/tokenize", {"model": "fake", "prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"model": "fake", "prompt": "a", "tokns": 1}, "tokns"),
        ("/detokenize", {"model": "fake", "tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"model": "fake"}, "tokens"),
        ("/detokenize", {"model": "fake", "tokens": [1], "text": ""}, "text"),
    ],
)
async def test_refused(http: aiohttp.ClientSession, broker: FakeClient, path: str, body: Any, param: str) -> None:
    status, found = await post(http, path, body)
    assert status == 400
    assert found["error"]["param"] == param
    assert not broker.sent
