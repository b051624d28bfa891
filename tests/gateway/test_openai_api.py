# SPDX-License-Identifier: Apache-2.0
"""OpenAI's door: bodies, chunks, defaults, the table of fields, models."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from mii_zmq.errors import InvalidRequest, PromptTooLong, WorkerLost
from mii_zmq.gateway.field_rules import Ignored, Refused
from mii_zmq.gateway.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from mii_zmq.gateway.openai_schemas import parse_chat, parse_completion
from mii_zmq.gateway.request_body import split_fields
from tests.gateway.fake_client import FakeClient, FakeGeneration
from tests.gateway.reading import post, read_chunks

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello you"}]}
TEXT = {"model": "fake", "prompt": "hello you"}


def cached(generation: FakeGeneration) -> None:
    generation.push("a", "b", "")
    generation.finish("stop", num_cached_tokens=1)


async def test_chat_body(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.answer = cached
    status, body = await post(http, "/v1/chat/completions", CHAT)
    assert status == 200
    assert isinstance(body.pop("created"), int)
    assert body.pop("id") == "chatcmpl-" + broker.sent[0].request_id.hex()
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "system_fingerprint": "mii_zmq",
    }


async def test_completion_body_counts_each_prompt_once(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    status, body = await post(http, "/v1/completions", {**TEXT, "prompt": ["a b", "c"], "n": 2})
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": index, "text": text, "logprobs": None, "finish_reason": "length"}
        for index, text in enumerate(["[a][b]", "[a][b]", "[c]", "[c]"])
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 6


async def test_chat_stream(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.answer = cached
    request = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/chat/completions", json=request) as response:
        chunks = await read_chunks(response)
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["id"] == "chatcmpl-" + broker.sent[0].request_id.hex()
        assert chunk["model"] == "fake"
        assert isinstance(chunk["created"], int)
        assert list(chunk)[-1] == "usage"
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 5
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in (
            ({"role": "assistant", "content": ""}, None),
            ({"content": "a"}, None),
            ({"content": "b"}, None),
            ({}, "stop"),
        )
    ]


async def test_chunks_tell_the_usage_so_far(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.answer = cached
    for include_usage in (False, True):
        options = {"continuous_usage_stats": True, "include_usage": include_usage}
        async with http.post(
            "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": options}
        ) as response:
            chunks = await read_chunks(response)
        if include_usage:
            assert chunks.pop()["choices"] == []
        assert [chunk["usage"] for chunk in chunks] == [
            {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2 + count} for count in (0, 1, 2, 3)
        ]


async def test_usage_so_far_is_of_each_choice(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    body = {"model": "fake", "prompt": ["a b c", "d"], "stream": True, "logprobs": 0}
    async with http.post("/v1/completions", json={**body, "stream_options": {"continuous_usage_stats": True}}) as found:
        chunks = await read_chunks(found)
    for index, prompt in ((0, 3), (1, 1)):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [*range(1, prompt + 1), prompt]
        assert [usage["completion_tokens"] for usage in usages] == counts
        assert {usage["prompt_tokens"] for usage in usages} == {prompt}


async def test_usage_so_far_where_the_prompt_is_not_counted(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.says_prompt_length = False
    body = {**TEXT, "stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": True}}
    async with http.post("/v1/completions", json=body) as response:
        *chunks, last = await read_chunks(response)
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert last["usage"]["total_tokens"] == 4


async def test_completion_stream_of_two_choices(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json={**TEXT, "stream": True, "n": 2}) as response:
        chunks = await read_chunks(response)
    assert all("usage" not in chunk and chunk["object"] == "text_completion" for chunk in chunks)
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [choice["text"] for choice in mine] == ["[hello]", "[you]", ""]
        assert [choice["finish_reason"] for choice in mine] == [None, None, "length"]
        assert set(mine[0]) == {"index", "text", "logprobs", "finish_reason"}


async def test_text_of_every_kind_survives(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    texts = ["中文", "👩‍👩‍👧", "  \n\n", '"\\', "\x00\x7f\u2028", "data: [DONE]\n\n", "é"]

    def answer(generation: FakeGeneration) -> None:
        generation.push(*texts)
        generation.finish()

    broker.answer = answer
    async with http.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        chunks = await read_chunks(response)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1]] == texts


def parse(fields: dict[str, Any], is_chat: bool = True) -> Any:
    raw = split_fields(msgspec.json.encode({**(CHAT if is_chat else TEXT), **fields}))
    return parse_chat(raw) if is_chat else parse_completion(raw)


def test_defaults_are_those_of_openai() -> None:
    chat = parse({}).params
    assert (chat.temperature, chat.top_p, chat.max_new_tokens, chat.n) == (1.0, 1.0, None, 1)
    assert chat.skip_special_tokens
    assert parse({}, is_chat=False).params.max_new_tokens == 16


def test_options_are_translated() -> None:
    params = parse(
        {
            "temperature": 0, "top_p": 0.5, "max_tokens": 9, "max_completion_tokens": 5, "stop": "x", "seed": -1,
            "presence_penalty": 1, "frequency_penalty": -1, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1,
            "stop_token_ids": [3], "ignore_eos": True, "min_tokens": 2, "bad_words": ["y"], "n": 3,
            "skip_special_tokens": False, "priority": 4,
        }
    )  # fmt: skip
    assert params.priority == 4
    assert params.params.is_greedy
    assert params.params.to_mapping() == {
        "temperature": 0.0, "top_p": 0.5, "max_new_tokens": 5, "stop": ["x"], "seed": 2**63 - 1,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "min_p": 0.1, "repetition_penalty": 1.1,
        "stop_token_ids": [3], "ignore_eos": True, "min_new_tokens": 2, "bad_words": ["y"], "n": 3,
    }  # fmt: skip
    assert parse({"top_k": 7}).params.top_k == 7
    assert parse({"top_k": 0}).params.top_k is None
    assert parse({"echo": True}, is_chat=False).params.return_full_text
    nulls = dict.fromkeys(("temperature", "top_p", "stop", "n", "seed", "max_tokens", "stream", "top_k", "user"))
    assert parse(nulls).params == parse({}).params
    assert not parse({"add_generation_prompt": False}).bodies()[0].add_generation_prompt
    assert not parse({"add_special_tokens": False}, is_chat=False).bodies()[0].add_special_tokens


@pytest.mark.parametrize(
    ("prompt", "texts", "token_ids"),
    [
        ("a", ["a"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([1, 2], [None], [[1, 2]]),
        ([[1], [2, 3]], [None, None], [[1], [2, 3]]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, texts: list[Any], token_ids: list[Any]) -> None:
    bodies = parse({"prompt": prompt}, is_chat=False).bodies()
    assert [body.prompt for body in bodies] == texts
    assert [body.prompt_token_ids for body in bodies] == token_ids


@pytest.mark.parametrize("prompt", [["a", 1], [1, "a"], [[1], "a"], [[]], [1, [2]], [-1], [2**31], ["a", ""], [[True]]])
def test_bad_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse({"prompt": prompt}, is_chat=False)
    assert (caught.value.param or "").startswith("prompt")


def test_what_is_too_much_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(InvalidRequest, match="the limit is 1024"):
        parse({"prompt": [[1]] * 1024 + [[]]}, is_chat=False)
    with pytest.raises(InvalidRequest, match="the limit is 4096"):
        parse({"messages": CHAT["messages"] * 4096 + [{"role": "king"}]})


def test_messages_become_plain_role_and_text() -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "reasoning_content": "hm"},
    ]
    assert parse({"messages": messages}).bodies()[0].messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "king", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1]"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content[0].type",
        ),
        ({"role": "user", "content": "x", "colour": "red"}, "messages[1]"),
        ({"role": "function", "content": "x", "name": "f"}, "messages[1]"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0]"),
    ],
)
def test_bad_messages_are_refused_by_place(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse({"messages": [*CHAT["messages"], message]})
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(("rules", "is_chat"), [(CHAT_FIELDS, True), (COMPLETION_FIELDS, False)])
def test_every_field_of_the_table(rules: dict[str, Any], is_chat: bool) -> None:
    for name, rule in rules.items():
        if isinstance(rule, Ignored):
            assert parse({name: {"any": ["thing"]}}, is_chat).ignored == [name]
        elif isinstance(rule, Refused):
            assert parse({name: None}, is_chat).ignored == [name]
            for value in rule.harmless:
                assert parse({name: msgspec.json.decode(value)}, is_chat).ignored == [name]
            for value in (1.5, "x", ["y"] * 50, {"type": "json_schema"}):
                with pytest.raises(InvalidRequest) as caught:
                    parse({name: value}, is_chat)
                assert caught.value.param == name


@pytest.mark.parametrize(
    "fields",
    [
        {"logprob_token_ids": [1]}, {"logprobs": 1}, {"top_logprobs": 21, "logprobs": True}, {"top_logprobs": 2},
        {"response_format": {"type": "json_schema"}},
        {"functions": [{}]}, {"best_of": 2}, {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"colour": 1}}, {"echo": True}, {"priority": 2**40},
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(fields)
    assert (caught.value.param or "").split(".")[0] in fields


async def test_ignored_fields_are_listed(http: aiohttp.ClientSession) -> None:
    extra = {"user": "u\r\nX-Evil: 1", "metadata": {"a": "b"}, "store": False, "prediction": {}}
    for stream in (False, True):
        async with http.post("/v1/chat/completions", json={**CHAT, **extra, "stream": stream}) as response:
            assert response.status == 200
            assert response.headers["x-ignored-fields"] == "user, metadata, store, prediction"
    async with http.post("/v1/chat/completions", json=CHAT) as response:
        assert "x-ignored-fields" not in response.headers


async def test_errors_have_the_envelope_of_openai(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    for model in ("no-such", "", "a b", "x" * 300):
        status, body = await post(http, "/v1/chat/completions", {**CHAT, "model": model})
        assert status == 404
        assert body["error"]["code"] == "model_not_found"
        assert body["error"]["param"] == "model"
    broker.answer = lambda generation: generation.fail(PromptTooLong("too long", param="messages"))
    status, body = await post(http, "/v1/chat/completions", CHAT)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    refusal = InvalidRequest("prompt_token_ids[0] is 9; max_new_tokens is 4", param="prompt_token_ids[0]")
    broker.answer = lambda generation: generation.fail(refusal)
    status, body = await post(http, "/v1/completions", {**TEXT, "prompt": [9]})
    assert (status, body["error"]["param"]) == (400, "prompt[0]")
    assert body["error"]["message"] == "prompt[0] is 9; max_tokens is 4"
    broker.answer = lambda generation: generation.fail(WorkerLost("gone"))
    status, body = await post(http, "/v1/completions", TEXT)
    assert status == 502
    assert body == {"error": {"message": "gone", "type": "server_error", "param": None, "code": "worker_lost"}}
    status, body = await post(http, "/v1/nothing", {})
    assert (status, body["error"]["code"]) == (404, "not_found")
    async with http.get("/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_models(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    async with http.get("/v1/models") as response:
        models = await response.json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["fake", "org/fake-7b"]
    assert models["data"][0]["max_model_len"] == 2048
    async with http.get("/v1/models/org/fake-7b") as response:
        assert await response.json() == models["data"][1]
    async with http.get("/v1/models/nobody") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_a_limit_that_another_one_replaces_is_checked_too(http: aiohttp.ClientSession) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 5}
    status, found = await post(http, "/v1/chat/completions", {**body, "max_tokens": 2**31})
    assert (status, found["error"]["param"]) == (400, "max_tokens")
