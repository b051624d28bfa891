# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses: bodies, events, conversations, the table of fields, errors."""

from __future__ import annotations

import asyncio
from itertools import zip_longest
from typing import Any

import aiohttp
import msgspec
import pytest

from mii_zmq.errors import InvalidRequest, WorkerLost
from mii_zmq.gateway.field_rules import Ignored, Refused
from mii_zmq.gateway.request_body import split_fields
from mii_zmq.gateway.responses_fields import RESPONSES_FIELDS
from mii_zmq.gateway.responses_schemas import ResponsesRequest, parse_responses
from mii_zmq.logprobs import encode_record
from tests.gateway.fake_client import FakeClient, FakeGeneration
from tests.gateway.reading import post, read_named_events

PATH = "/v1/responses"
ASK = {"model": "fake", "input": "hello you"}
FUNCTION = {"type": "function", "name": "f", "description": "does it", "parameters": {"type": "object"}, "strict": True}
TOOLS = {**ASK, "tools": [FUNCTION]}
CALL = '<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'
ANSWER = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}{CALL}"


def saying(broker: FakeClient, text: str, finish_reason: str = "stop", size: int = 3) -> None:
    def answer(generation: FakeGeneration) -> None:
        generation.push(*(text[at : at + size] for at in range(0, len(text), size)))
        generation.finish(finish_reason, num_cached_tokens=1)

    broker.answer = answer


def parse(fields: dict[str, Any]) -> ResponsesRequest:
    return parse_responses(split_fields(msgspec.json.encode({**ASK, **fields})))


async def test_body(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    saying(broker, "Hello!")
    status, body = await post(http, PATH, {**ASK, "instructions": "Be kind.", "max_output_tokens": 9})
    assert status == 200
    assert body["id"] == "resp_" + broker.sent[0].request_id.hex()
    assert (body["object"], body["status"], body["model"], body["store"]) == ("response", "completed", "fake", False)
    assert (body["instructions"], body["max_output_tokens"], body["tools"]) == ("Be kind.", 9, [])
    [item] = body["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}],
    }
    assert body["usage"] == {
        "input_tokens": 4,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 6,
    }


async def test_reasoning_and_calls_are_items(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    saying(broker, ANSWER)
    _, body = await post(http, PATH, TOOLS)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert len({item["id"] for item in body["output"]}) == 4
    assert len({item["call_id"] for item in body["output"][2:]}) == 2
    assert (body["output"][2]["name"], body["output"][2]["arguments"]) == ("f", '{"x": "é"}')
    assert body["tools"] == TOOLS["tools"]
    _, body = await post(http, PATH, {**TOOLS, "include_reasoning": False})
    assert body["output"][0]["type"] == "message"


@pytest.mark.parametrize("text", ["Hello!", ANSWER, CALL, "", "<think>hm"])
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize("size", [1, 200])
async def test_a_stream_adds_up_to_the_body(
    http: aiohttp.ClientSession, broker: FakeClient, text: str, finish_reason: str, size: int
) -> None:
    saying(broker, text, finish_reason, size)
    _, body = await post(http, PATH, TOOLS)
    async with http.post(PATH, json={**TOOLS, "stream": True}) as response:
        events = await read_named_events(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{body['status']}"
    last = events[-1]["response"]
    assert last["usage"] == body["usage"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert last["output"] == done
    assert strip(done) == strip(body["output"])
    for kind, field in (("output_text", "text"), ("reasoning_text", "text"), ("function_call_arguments", "arguments")):
        deltas = "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
        assert deltas == "".join(event[field] for event in events if event["type"] == f"response.{kind}.done")


def strip(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without ids, which come from the request's."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_items_become_messages_of_the_template() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "43"}]},
        {"type": "reasoning", "summary": []},
    ]
    [body] = parse({"input": items, "instructions": "Be kind."}).bodies()
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for call_id, arguments in (("c1", {"x": 1}), ("c2", {}))
    ]
    assert body.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
        {"role": "tool", "content": "43", "tool_call_id": "c2", "name": "f"},
    ]


def test_options_are_translated() -> None:
    asked = parse({**TOOLS, "temperature": 0, "top_p": 0.5, "max_output_tokens": 9, "parallel_tool_calls": False})
    assert asked.params.to_mapping() == {"temperature": 0.0, "top_p": 0.5, "max_new_tokens": 9}
    assert parse({}).params.skip_special_tokens
    assert asked.tools is not None
    assert not asked.tools.is_parallel
    assert asked.tools.strict == {"f"}
    assert parse({**TOOLS, "tool_choice": "none"}).bodies()[0].tools is None
    assert parse({"stream": True, "stream_options": {"include_obfuscation": False}}).stream


def test_every_field_of_the_table() -> None:
    for name, rule in RESPONSES_FIELDS.items():
        if isinstance(rule, Ignored):
            assert parse({name: {"any": ["thing"]}}).ignored == [name]
        elif isinstance(rule, Refused):
            for value in (b"null", *rule.harmless):
                assert parse({name: msgspec.json.decode(value)}).ignored == [name]
            with pytest.raises(InvalidRequest) as caught:
                parse({name: "x"})
            assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 5000}, "input"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({**TOOLS, "include": ["message.output_text.logprobs"]}, "include"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({**TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({**TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({**TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        (
            {
                **TOOLS,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            },
            "tool_choice.tools",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(fields)
    assert caught.value.param == param
    assert param in caught.value.message


def record(text: str, token_id: int = 1) -> bytes:
    """Of a token, with a more probable one beside it."""
    entries = [(token_id, 2, -1.5, text.encode()), (9, 1, -0.25, b"x"), (8, 2, -1.5, text.encode())]
    return encode_record(False, entries)


def measured(broker: FakeClient, texts: list[str], tokens: list[str]) -> None:
    """Says texts beside the records of tokens, which need not be the same."""

    def answer(generation: FakeGeneration) -> None:
        for text, token in zip_longest(texts, tokens):
            generation.push(text or "", logprobs=b"" if token is None else record(token))
        generation.finish("stop")

    broker.answer = answer


LOGPROBS = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 1}


@pytest.mark.parametrize(
    ("texts", "tokens", "shown"),
    [
        (["Hel", "lo", ""], ["Hel", "lo", "<eos>"], ["Hel", "lo", "<eos>"]),
        # The text of the first tokens is held back, by a stop string or an incomplete character.
        (["", "", "Hello"], ["Hel", "lo", "<eos>"], ["Hel", "lo", "<eos>"]),
        (["<thi", "s>"], ["<thi", "s>"], ["<thi", "s>"]),
        (["<", ""], ["<", "<eos>"], ["<", "<eos>"]),
        ([""], ["<eos>"], ["<eos>"]),
        (["<thi", "nk>hm</think", ">\n", "\nyes"], ["<thi", "nk>hm</think", ">\n", "\nyes", "!"], ["\nyes", "!"]),
        # The chat template has opened the block.
        (["<think>\nhm", "</think>", "yes"], ["hm", "</think>", "yes"], ["yes"]),
        (["<think>\n", "", "", "hm</think>yes"], ["hm", "</think>", "yes"], ["yes"]),
        (["<think>\nhm", ""], ["hm", "<eos>"], []),
    ],
)  # fmt: skip
async def test_log_probabilities_of_the_message(
    http: aiohttp.ClientSession, broker: FakeClient, texts: list[str], tokens: list[str], shown: list[str]
) -> None:
    measured(broker, texts, tokens)
    _, body = await post(http, PATH, {**ASK, **LOGPROBS})
    messages = [item for item in body["output"] if item["type"] == "message"]
    entries = messages[0]["content"][0]["logprobs"] if messages else []
    assert [entry["token"] for entry in entries] == shown
    for entry in entries:
        assert (entry["logprob"], entry["bytes"]) == (-1.5, list(entry["token"].encode()))
        assert entry["top_logprobs"] == [{"token": "x", "logprob": -0.25, "bytes": [120]}]
    assert body["top_logprobs"] == 1
    async with http.post(PATH, json={**ASK, **LOGPROBS, "stream": True}) as response:
        events = await read_named_events(response)
    assert strip(events[-1]["response"]["output"]) == strip(body["output"])
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta] == entries
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.done"] == [entries] * len(
        messages
    )
    added = [event["part"] for event in events if event["type"] == "response.content_part.added"]
    assert all(part.get("logprobs", []) == [] for part in added)


def test_what_is_asked_of_the_engine_for_log_probabilities() -> None:
    assert parse({"include": LOGPROBS["include"]}).params.logprobs == 0
    assert parse(LOGPROBS).params.logprobs == 1
    assert parse({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}).params.logprobs is None


async def test_errors(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    status, body = await post(http, PATH, {**ASK, "store": True})
    assert (status, body["error"]["param"]) == (400, "store")
    assert "stored" in body["error"]["message"]
    refusal = InvalidRequest("messages holds 5; max_new_tokens is 9", param="messages")
    broker.answer = lambda generation: generation.fail(refusal)
    status, body = await post(http, PATH, ASK)
    assert (status, body["error"]["message"]) == (400, "input holds 5; max_output_tokens is 9")


async def test_an_error_within_a_stream_is_its_last_event(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.answer = lambda generation: None
    opening = asyncio.create_task(http.post(PATH, json={**ASK, "stream": True}).__aenter__())
    generation = await broker.next_generation()
    generation.push("x")
    async with await opening as response:
        generation.fail(WorkerLost("the group is gone"))
        *_, last = await read_named_events(response)
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the group is gone"}
