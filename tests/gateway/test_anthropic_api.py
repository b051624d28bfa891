# SPDX-License-Identifier: Apache-2.0
"""Anthropic's door: bodies, events, conversations, the table of fields, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest

from mii_zmq.errors import InvalidRequest, Overloaded, WorkerLost
from mii_zmq.gateway.anthropic_fields import MESSAGES_FIELDS
from mii_zmq.gateway.anthropic_schemas import MessagesRequest, parse_messages
from mii_zmq.gateway.field_rules import Ignored, Refused
from mii_zmq.gateway.request_body import split_fields
from tests.gateway.fake_client import FakeClient, FakeGeneration
from tests.gateway.reading import post, read_named_events

PATH = "/v1/messages"
CHAT = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "hello you"}]}
SCHEMA = {"type": "object", "properties": {"x": {}}}
TOOLS = {**CHAT, "tools": [{"name": "f", "description": "does it", "input_schema": SCHEMA}]}
CALL = '<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'
ANSWER = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}{CALL}"


def saying(
    broker: FakeClient, text: str, finish_reason: str = "stop", size: int = 3, matched_stop: str | None = None
) -> None:
    def answer(generation: FakeGeneration) -> None:
        generation.push(*(text[at : at + size] for at in range(0, len(text), size)))
        generation.finish(finish_reason, num_cached_tokens=1, matched_stop=matched_stop)

    broker.answer = answer


def parse(fields: dict[str, Any]) -> MessagesRequest:
    return parse_messages(split_fields(msgspec.json.encode({**CHAT, **fields})))


async def test_body(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    saying(broker, "Hello!")
    status, body = await post(http, PATH, CHAT)
    assert status == 200
    assert body == {
        "id": "msg_" + broker.sent[0].request_id.hex(),
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 2,
        },
    }


async def test_reasoning_and_calls_are_blocks(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    saying(broker, ANSWER)
    _, body = await post(http, PATH, TOOLS)
    ids = [block.pop("id") for block in body["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == 2
    call = {"type": "tool_use", "name": "f", "input": {"x": "é"}}
    assert body["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Let me see."},
        call,
        call,
    ]
    assert body["stop_reason"] == "tool_use"
    for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        _, body = await post(http, PATH, {**TOOLS, "thinking": thinking})
        assert body["content"][0]["type"] == "text"
        assert broker.sent[-1].body.chat_template_kwargs == {"enable_thinking": thinking["type"] == "adaptive"}


@pytest.mark.parametrize(
    ("text", "finish_reason", "matched_stop", "expected"),
    [
        ("a", "stop", None, ("end_turn", None)),
        ("a", "length", None, ("max_tokens", None)),
        ("a", "stop", "END", ("stop_sequence", "END")),
        ("", "stop", None, ("end_turn", None)),
        (CALL, "stop", None, ("tool_use", None)),
    ],
)
@pytest.mark.parametrize("size", [1, 100])
async def test_a_stream_adds_up_to_the_body(
    http: aiohttp.ClientSession,
    broker: FakeClient,
    text: str,
    finish_reason: str,
    matched_stop: str | None,
    expected: tuple[str, str | None],
    size: int,
) -> None:
    saying(broker, text, finish_reason, size, matched_stop)
    _, body = await post(http, PATH, TOOLS)
    assert (body["stop_reason"], body["stop_sequence"]) == expected
    async with http.post(PATH, json={**TOOLS, "stream": True}) as response:
        start, *events, end, stop = await read_named_events(response)
    assert (start["type"], end["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    assert start["message"]["usage"]["input_tokens"] == broker.sent[-1].prompt_length > 0
    assert start["message"]["content"] == []
    assert end["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}
    assert end["usage"] == body["usage"]
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("content_block_start", "content_block_stop")
    assert set(kinds[1:-1]) == {"content_block_delta"}
    if finish_reason == "tool_use":
        assert events[0]["content_block"] == {**body["content"][0], "input": {}}


async def test_blocks_of_a_stream_follow_each_other(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    saying(broker, ANSWER)
    async with http.post(PATH, json={**TOOLS, "stream": True}) as response:
        events = await read_named_events(response)
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert [start["index"] for start in starts] == [0, 1, 2, 3]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    assert "".join(delta.get("text", "") for delta in deltas) == "Let me see."
    assert [delta["partial_json"] for delta in deltas if "partial_json" in delta] == ['{"x": "é"}'] * 2


def test_conversations_become_messages_of_the_template() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "so", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "system", "content": "Hurry."},
    ]
    asked = parse({"messages": messages, "system": [{"type": "text", "text": "Be kind."}], "tools": TOOLS["tools"]})
    [body] = asked.bodies()
    assert body.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
        {"role": "tool", "content": "", "tool_call_id": "c2"},
        {"role": "user", "content": "and?"},
        {"role": "system", "content": "Hurry."},
    ]
    function = {"name": "f", "description": "does it", "parameters": SCHEMA}
    assert body.tools == [{"type": "function", "function": function}]
    assert body.add_generation_prompt
    assert not body.continue_final_message


def test_the_assistants_last_words_are_gone_on_with() -> None:
    [body] = parse({"messages": [*CHAT["messages"], {"role": "assistant", "content": "So"}]}).bodies()  # type: ignore[misc]
    assert body.continue_final_message
    assert not body.add_generation_prompt


def test_options_are_translated() -> None:
    asked = parse({"stop_sequences": ["x"], "temperature": 0, "top_p": 0.5, "top_k": 4, "stream": True})
    assert asked.params.to_mapping() == {
        "temperature": 0.0, "top_p": 0.5, "top_k": 4, "stop": ["x"], "max_new_tokens": 50,
        "skip_special_tokens": True,
    }  # fmt: skip
    assert asked.stream
    asked = parse({**TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert asked.tools is not None
    assert not asked.tools.is_parallel
    assert parse({**TOOLS, "tool_choice": {"type": "none"}}).bodies()[0].tools is None
    asked = parse({"thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}})
    assert asked.bodies()[0].chat_template_kwargs == {"enable_thinking": True}
    assert asked.ignored == ["metadata", "thinking.budget_tokens"]


def test_every_field_of_the_table() -> None:
    for name, rule in MESSAGES_FIELDS.items():
        if isinstance(rule, Ignored):
            assert parse({name: {"any": ["thing"]}}).ignored == [name]
        elif isinstance(rule, Refused):
            for value in (b"null", *rule.harmless):
                assert parse({name: msgspec.json.decode(value)}).ignored == [name]
            with pytest.raises(InvalidRequest) as caught:
                parse({name: "x"})
            assert caught.value.param == name


def one(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": CHAT["messages"] * 5000}, "messages"),  # type: ignore[operator]
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({**TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({**TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({**TOOLS, "tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f", "input_schema": {"a": 2**80}}]}, "tools[0]"),
        ({"seed": 1}, "seed"),
        (one("user"), "messages[0].content"),
        (one("user", {"type": "image", "source": {}}), "messages[0].content[0].type"),
        (one("user", {"type": "text"}), "messages[0].content[0].text"),
        (one("user", {"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (one("user", {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
         "messages[0].content[0].content[0].type"),
        (one("assistant", {"type": "tool_use", "id": "1"}), "messages[0].content[0]"),
        (one("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 2**80}}),
         "messages[0].content[0].input"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(fields)
    assert caught.value.param == param
    assert param in caught.value.message


async def test_errors_have_anthropics_form(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    status, body = await post(http, PATH, {**CHAT, "model": "nobody"})
    assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    broker.answer = lambda generation: generation.fail(Overloaded("full", retry_after_ms=3000))
    async with http.post(PATH, json=CHAT) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "3")
        assert (await response.json())["error"] == {"type": "overloaded_error", "message": "full"}
    refusal = InvalidRequest("max_new_tokens is 9", param="max_new_tokens")
    broker.answer = lambda generation: generation.fail(refusal)
    status, body = await post(http, PATH, CHAT)
    assert (status, body["error"]["message"]) == (400, "max_tokens is 9")
    status, body = await post(http, PATH + "/nothing", CHAT)
    assert (status, body["error"]["type"]) == (404, "not_found_error")


async def test_an_error_within_a_stream_is_its_last_event(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.answer = lambda generation: None
    opening = asyncio.create_task(http.post(PATH, json={**CHAT, "stream": True}).__aenter__())
    generation = await broker.next_generation()
    generation.push("x")
    async with await opening as response:
        generation.fail(WorkerLost("the group is gone"))
        *_, last = await read_named_events(response)
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the group is gone"}}
