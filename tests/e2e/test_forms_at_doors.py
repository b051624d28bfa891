# SPDX-License-Identifier: Apache-2.0
"""Forms of answers and forced calls through a whole deployment: gateway, broker, actor, engine, grammar process."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.stack import Stack

pytest.importorskip("xgrammar")

pytestmark = [pytest.mark.long]

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}, "y": {"enum": ["a", "b"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
TEXT = {"model": "m", "prompt": "hi", "max_tokens": 200}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    stack = Stack()
    try:
        stack.start_group("group", "fake:eos_every=20,max_model_len=2048")
        yield stack.start_gateway()
    finally:
        stack.close()


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def is_good(value: Any) -> bool:
    return list(value) == ["x", "y"] and isinstance(value["x"], bool) and value["y"] in ("a", "b")


def test_forms_of_answers(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    _, body = post(f"{url}/v1/chat/completions", {**CHAT, "response_format": form, "seed": 1})
    assert is_good(json.loads(body["choices"][0]["message"]["content"]))
    assert body["choices"][0]["finish_reason"] == "stop"
    _, body = post(f"{url}/v1/completions", {**TEXT, "structured_outputs": {"choice": ["ja", "nein"]}})
    assert body["choices"][0]["text"] in ("ja", "nein")
    _, body = post(f"{url}/v1/completions", {**TEXT, "guided_regex": "[0-9]{3}"})
    assert len(body["choices"][0]["text"]) == 3
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    _, body = post(f"{url}/v1/responses", {"model": "m", "input": "hi", "max_output_tokens": 200, "text": text})
    assert is_good(json.loads(body["output"][0]["content"][0]["text"]))
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    _, body = post(f"{url}/v1/messages", {**CHAT, "output_config": config})
    assert is_good(json.loads(body["content"][0]["text"]))
    wanted = {"kind": "json_schema", "value": json.dumps(SCHEMA)}
    _, body = post(f"{url}/mii/m", {"prompts": "hi", "max_new_tokens": 200, "structured_output": wanted})
    assert is_good(json.loads(body[0]["generated_text"]))


def test_forced_calls(url: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    for choice, reason in (("required", "tool_calls"), ({"type": "function", "function": {"name": "f"}}, "stop")):
        asked = {**CHAT, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        _, body = post(f"{url}/v1/chat/completions", asked)
        assert body["choices"][0]["finish_reason"] == reason
        [call] = body["choices"][0]["message"]["tool_calls"]
        assert is_good(json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "nothing"}}}, "response_format"),
    ],
)
def test_what_the_compiler_refuses_bears_the_name_of_the_field(url: str, fields: dict[str, Any], param: str) -> None:
    status, body = post(f"{url}/v1/completions", {**TEXT, **fields})
    assert (status, body["error"]["param"]) == (400, param)
    assert body["error"]["message"].startswith(param)
