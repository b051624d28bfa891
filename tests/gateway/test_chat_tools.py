# SPDX-License-Identifier: Apache-2.0
"""Chat completions with tools, reasoning and template variables, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import msgspec
import pytest

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.openai_schemas import OpenAIRequest, parse_chat
from mii_zmq.gateway.request_body import split_fields
from tests.gateway.fake_client import FakeClient, FakeGeneration
from tests.gateway.reading import post, read_chunks

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello you"}]}
FUNCTION = {"name": "f", "description": "does it", "parameters": {"type": "object", "properties": {"x": {}}}}
TOOLS = {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]}
ANSWER = '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
PATH = "/v1/chat/completions"


def saying(broker: FakeClient, text: str, size: int = 3) -> None:
    def answer(generation: FakeGeneration) -> None:
        generation.push(*(text[at : at + size] for at in range(0, len(text), size)))
        generation.finish("stop")

    broker.answer = answer


def parse(fields: dict[str, Any]) -> OpenAIRequest:
    return parse_chat(split_fields(msgspec.json.encode({**CHAT, **fields})))


async def test_body_with_reasoning_and_a_call(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    saying(broker, ANSWER)
    status, body = await post(http, PATH, TOOLS)
    assert status == 200
    [choice] = body["choices"]
    call_id = choice["message"]["tool_calls"][0].pop("id")
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert len(call_id) == 9
    generation = broker.sent[0]
    assert generation.body.tools == TOOLS["tools"]
    assert generation.body.return_reasoning_start
    assert not generation.body.params.get("skip_special_tokens", False)


@pytest.mark.parametrize("size", [1, 3, 50, 1000])
async def test_a_stream_adds_up_to_the_body(http: aiohttp.ClientSession, broker: FakeClient, size: int) -> None:
    saying(broker, ANSWER, size)
    async with http.post(PATH, json={**TOOLS, "stream": True}) as response:
        chunks = await read_chunks(response)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    [[call]] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (call["index"], call["type"], call["function"]["name"]) == (0, "function", "f")
    assert json.loads(call["function"]["arguments"]) == {"x": "é"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("tool_format", "num_calls"), [("mistral", 1), ("hermes", 0), (None, 1), ("from the future", 1)]
)
async def test_the_deployments_format_decides(
    http: aiohttp.ClientSession, broker: FakeClient, tool_format: str | None, num_calls: int
) -> None:
    broker.tool_format = tool_format
    saying(broker, '[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    _, body = await post(http, PATH, TOOLS)
    assert len(body["choices"][0]["message"].get("tool_calls", ())) == num_calls


async def test_the_schema_gives_bare_text_its_types(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.tool_format = "qwen3_coder"
    saying(broker, "<function=f><parameter=x>5</parameter><parameter=y>5</parameter></function>")
    properties = {"x": {"type": "integer"}, "y": {"type": "string"}}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    _, body = await post(http, PATH, {**CHAT, "tools": [{"type": "function", "function": function}]})
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"x": 5, "y": "5"}'}


async def test_what_is_no_call_is_content(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": </tool_call>'
    saying(broker, text)
    _, body = await post(http, PATH, TOOLS)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    saying(broker, ANSWER)
    for fields in ({}, {**TOOLS, "tool_choice": "none"}):
        _, body = await post(http, PATH, {**CHAT, **fields})
        assert body["choices"][0]["message"]["content"].endswith("</tool_call>")
        assert broker.sent[-1].body.tools is None


async def test_each_choice_is_read_for_itself(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    saying(broker, ANSWER)
    _, body = await post(http, PATH, {**TOOLS, "n": 2, "include_reasoning": False})
    messages = [choice["message"] for choice in body["choices"]]
    assert messages[0]["tool_calls"][0]["id"] != messages[1]["tool_calls"][0]["id"]
    assert "reasoning" not in messages[0]
    async with http.post(PATH, json={**TOOLS, "n": 2, "stream": True, "include_reasoning": False}) as response:
        chunks = await read_chunks(response)
    calls = [chunk["choices"][0] for chunk in chunks if "tool_calls" in chunk["choices"][0]["delta"]]
    assert sorted(choice["index"] for choice in calls) == [0, 1]
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks)


def test_conversations_with_calls_are_handed_to_the_template() -> None:
    messages = [
        *CHAT["messages"],
        {
            "role": "assistant",
            "reasoning": "hm",
            "tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
    ]  # fmt: skip
    assert parse({"messages": messages}).bodies()[0].messages == [
        *CHAT["messages"],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
    ]


def test_template_variables_and_a_message_to_continue() -> None:
    body = parse({"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}).bodies()[0]
    assert body.chat_template_kwargs == {"enable_thinking": False}
    assert body.continue_final_message
    assert not body.add_generation_prompt


def test_choices_of_tools() -> None:
    for fields in ({"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": [], "tool_choice": None}):
        assert parse(fields).tools is None
    asked = parse({**TOOLS, "tool_choice": "auto", "parallel_tool_calls": False})
    assert asked.tools is not None
    assert not asked.tools.is_parallel
    strict = {"type": "function", "function": {"name": "g", "strict": True}}
    asked = parse({"tools": [strict]})
    assert asked.tools is not None
    assert asked.tools.strict == {"g"}
    parameters = {"type": "object", "properties": {}}
    assert asked.bodies()[0].tools == [{"type": "function", "function": {"name": "g", "parameters": parameters}}]


def named(name: str, kind: str = "function") -> dict[str, Any]:
    return {"type": kind, "function": {"name": name}}


def allowed(mode: str, *names: str, kind: str = "function") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name, kind) for name in names]}}


def test_forced_and_allowed_tools() -> None:
    tools = [*TOOLS["tools"], {"type": "function", "function": {"name": "g"}}]  # type: ignore[misc]
    expected = [
        ("required", True, False, ["f", "g"], ["f", "g"]),
        (named("g"), True, True, ["g"], ["f", "g"]),
        (allowed("auto", "g"), False, False, ["g"], ["g"]),
        (allowed("required", "g", "f"), True, False, ["f", "g"], ["f", "g"]),
    ]
    for choice, is_forced, is_named, callable_, shown in expected:
        asked = parse({"tools": tools, "tool_choice": choice})
        assert asked.tools is not None
        assert (asked.tools.is_forced, asked.tools.is_named) == (is_forced, is_named)
        assert list(asked.tools.tools) == callable_
        assert [tool["function"]["name"] for tool in asked.bodies()[0].tools or ()] == shown
        assert asked.tools.is_parallel != is_named
    assert parse({"tools": tools, "tool_choice": allowed("auto")}).bodies()[0].tools is None


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


def call_with(arguments: str) -> dict[str, Any]:
    return {"id": "1", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({**TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": named("f")}, "tool_choice"),
        ({**TOOLS, "tool_choice": named("g")}, "tool_choice.function.name"),
        ({**TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({**TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({**TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({**TOOLS, "tool_choice": allowed("perhaps", "f")}, "tool_choice.allowed_tools.mode"),
        ({**TOOLS, "tool_choice": allowed("auto", "g")}, "tool_choice.allowed_tools.tools"),
        ({**TOOLS, "tool_choice": allowed("required")}, "tool_choice.allowed_tools.tools"),
        ({**TOOLS, "tool_choice": allowed("auto", "f", kind="mcp")}, "tool_choice.allowed_tools.tools[0]"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"tools": TOOLS["tools"] * 2}, "tools[1]"),  # type: ignore[operator]
        ({"tools": [{"type": "function", "function": {"name": "f", "colour": 1}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(200)}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 2**70}}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)]}, "tools"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": 2**70}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]},
            "messages[0].tool_calls[0]",
        ),
        *(
            (
                {"messages": [{"role": "assistant", "tool_calls": [call_with(a)]}]},
                "messages[0].tool_calls[0].function.arguments",
            )
            for a in ("{", "[]", "5", "[" * 10_000, '{"a":' * 200 + "1" + "}" * 200, '{"a":' + "9" * 30 + "}")
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(fields)
    assert (caught.value.param or "").startswith(param)
    assert param in caught.value.message
    assert len(caught.value.message) < 300
