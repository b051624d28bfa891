# SPDX-License-Identifier: Apache-2.0
"""At every door with conversations, the events of a stream add up to the unstreamed body, however the text was cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.client import Completion
from mii_zmq.gateway.anthropic_answers import MessagesAnswer
from mii_zmq.gateway.anthropic_schemas import parse_messages
from mii_zmq.gateway.openai_answers import ChatAnswer
from mii_zmq.gateway.openai_schemas import parse_chat
from mii_zmq.gateway.request_body import split_fields
from mii_zmq.gateway.responses_answers import ResponsesAnswer
from mii_zmq.gateway.responses_schemas import parse_responses
from mii_zmq.gateway.tool_formats import FORMATS
from mii_zmq.protocol import FinalBody, GenerateBody
from tests.gateway.fake_client import FakeGeneration

GENERATIONS: Any = [FakeGeneration("fake", GenerateBody(prompt="x"), stream=True)]
MESSAGES = [{"role": "user", "content": "x"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
FRAGMENTS = [
    "<think>", "</think>", "\n", " ", "word", "é", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "{", "<tool",
    '<tool_call>{"name": "f", "arguments": {"x": "\\n"}}</tool_call>', '[TOOL_CALLS]f[ARGS]{"y": [1]}', "</thi",
    "<function=f><parameter=x>1</parameter></function>", "<tool_call>f<arg_key>x</arg_key><arg_value>[1]</arg_value>",
]  # fmt: skip


def chat() -> ChatAnswer:
    fields = {"model": "fake", "messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]}
    return ChatAnswer(parse_chat(split_fields(msgspec.json.encode(fields))), GENERATIONS, FORMATS["any"])


def responses() -> ResponsesAnswer:
    fields = {"model": "fake", "input": "x", "tools": [{"type": "function", **FUNCTION}]}
    return ResponsesAnswer(parse_responses(split_fields(msgspec.json.encode(fields))), GENERATIONS, FORMATS["any"])


def messages() -> MessagesAnswer:
    fields = {"model": "fake", "messages": MESSAGES, "max_tokens": 9, "tools": [{"name": "f"}]}
    return MessagesAnswer(parse_messages(split_fields(msgspec.json.encode(fields))), GENERATIONS, FORMATS["any"])


def add_up_chat(events: Sequence[dict[str, Any]]) -> Any:
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for name, value in event["choices"][0]["delta"].items():
            if name == "tool_calls":
                found[name] += [{key: call[key] for key in ("id", "type", "function")} for call in value]
            elif name in found:
                found[name] += value
    return found, events[-1]["choices"][0]["finish_reason"]


def of_chat(body: dict[str, Any]) -> Any:
    [choice] = body["choices"]
    message = choice["message"]
    found = {name: message.get(name) or "" for name in ("content", "reasoning_content")}
    return {**found, "tool_calls": message.get("tool_calls", [])}, choice["finish_reason"]


def add_up_responses(events: Sequence[dict[str, Any]]) -> Any:
    texts = [""] * len(events[-1]["response"]["output"])
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    last = events[-1]["response"]
    return texts, last["output"], last["status"]


def of_responses(body: dict[str, Any]) -> Any:
    texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in body["output"]]
    return texts, body["output"], body["status"]


def add_up_messages(events: Sequence[dict[str, Any]]) -> Any:
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if "partial_json" in delta:
                block["input"] = json.loads(delta["partial_json"])
            elif block["type"] in delta:
                block[block["type"]] += delta[block["type"]]
    [stop] = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
    return blocks, stop


def of_messages(body: dict[str, Any]) -> Any:
    return body["content"], body["stop_reason"]


@pytest.mark.parametrize(
    ("make", "add_up", "of_body"),
    [
        (chat, add_up_chat, of_chat),
        (responses, add_up_responses, of_responses),
        (messages, add_up_messages, of_messages),
    ],
)
@settings(max_examples=100, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=8),
    reason=st.sampled_from(["stop", "length"]),
    size=st.integers(1, 20),
)
def test_the_events_add_up_to_the_body(
    make: Any, add_up: Any, of_body: Any, fragments: list[str], reason: str, size: int
) -> None:
    text = "".join(fragments)
    facts: dict[str, Any] = {"finish_reason": reason, "prompt_length": 1, "generated_length": len(text)}
    body = json.loads(make().body([Completion(text=text, token_ids=[], num_cached_tokens=0, **facts)]))
    answer, final = make(), FinalBody(**facts)
    stream = answer.first(0, 1)
    for at in range(0, len(text), size):
        stream += answer.delta(0, msgspec.json.encode(text[at : at + size]))
    stream += answer.last(0, final) + answer.end([final])
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert add_up(events) == of_body(body)
