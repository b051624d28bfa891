# SPDX-License-Identifier: Apache-2.0
"""The one grammar that is sent: made of the form demanded, the tools, the deployment's habits; and what it may lack."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.answers import ToolUse
from mii_zmq.gateway.broker_status import BrokerStatus
from mii_zmq.gateway.call_formats import either, schema_format
from mii_zmq.gateway.call_grammars import behind_reasoning, forced_calls, guarded_calls
from mii_zmq.gateway.constraints import constrain
from mii_zmq.gateway.openai_schemas import OpenAIRequest, parse_chat, parse_completion
from mii_zmq.gateway.request_body import split_fields
from mii_zmq.gateway.state import MAX_KNOWN, Gateway
from mii_zmq.gateway.tool_formats import FORMATS, ToolFormat
from tests.gateway.fake_client import FakeClient, FakeGeneration
from tests.gateway.reading import post, read_chunks, read_named_events

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
JSON_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
G = {"type": "function", "function": {"name": "g"}}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}, G]}
STRICT = {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}, G]}
USE = ToolUse({"f": SCHEMA, "g": None})
ONE = ToolUse({"f": SCHEMA}, is_parallel=False)
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
PATH = "/v1/chat/completions"


def saying(broker: FakeClient, text: str, finish_reason: str = "stop") -> None:
    def answer(generation: FakeGeneration) -> None:
        generation.push(*(text[at : at + 3] for at in range(0, len(text), 3)))
        generation.finish(finish_reason)

    broker.answer = answer


def constrained(
    fields: dict[str, Any], tool_format: ToolFormat = FORMATS["hermes"], groups: int = 1, **info: Any
) -> OpenAIRequest:
    """A chat or completion as it goes to a deployment whose groups say `info` of themselves."""
    group = {"group": "g", "state": "ready", "info": {"structured_output": ["structural_tag"], **info}}
    status = BrokerStatus.parse({"deployments": {"fake": {"is_ready": True, "groups": [group] * groups}}})
    parse = parse_chat if "messages" in fields else parse_completion
    asked = parse(split_fields(json.dumps(fields).encode()))
    return constrain(asked, status.deployments["fake"], tool_format)


def form_of(asked: OpenAIRequest) -> Any:
    """The format of its structural tag; the kind and the text of other grammars."""
    form = asked.params.structured_output
    if form is None:
        return None
    if form.kind != "structural_tag":
        return form.kind, form.value
    value = json.loads(form.value)
    assert list(value) == ["type", "format"]
    return value["format"]


def test_a_form_goes_on_as_it_is() -> None:
    asked = {**CHAT, **JSON_SCHEMA}
    expected = ("json_schema", json.dumps(SCHEMA, separators=(",", ":")))
    assert form_of(constrained(asked)) == expected
    assert form_of(constrained({**asked, **TOOLS, "tool_choice": "none"})) == expected
    assert form_of(constrained({**CHAT, "guided_regex": "a"})) == ("regex", "a")
    assert form_of(constrained({**CHAT, **TOOLS})) is None


@pytest.mark.parametrize(
    ("demand", "form"),
    [
        ({"regex": "a"}, {"type": "regex", "pattern": "a"}),
        (
            {"choice": ["a", "b"]},
            {"type": "or", "elements": [{"type": "const_string", "value": word} for word in "ab"]},
        ),
        ({"choice": ["a"]}, {"type": "const_string", "value": "a"}),
        ({"json": SCHEMA}, {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 12}),
        ({"json_object": True}, {"type": "json_schema", "json_schema": {"type": "object"}, "max_whitespace_cnt": 12}),
        ({"grammar": "root ::= x"}, {"type": "grammar", "grammar": "root ::= x"}),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}}, {"type": "any_text"}),
    ],
)
def test_reasoning_stays_free_where_the_model_reasons(demand: dict[str, Any], form: dict[str, Any]) -> None:
    asked = {**CHAT, "structured_outputs": demand}
    assert form_of(constrained(asked, reasoning=True)) == behind_reasoning(form)
    assert form_of(constrained({**asked, **TOOLS}, reasoning=True)) == behind_reasoning(
        either([forced_calls("hermes", USE) or {}, form])
    )
    # Neither a message that is gone on with nor a prompt begins with reasoning.
    messages = [*CHAT["messages"], {"role": "assistant", "content": "x"}]
    for fields in ({"messages": messages, "continue_final_message": True}, {"messages": None, "prompt": "x"}):
        plain = {name: value for name, value in {**asked, **fields}.items() if value is not None}
        assert constrained(plain, reasoning=True) == constrained(plain)


def test_tools_and_reasoning() -> None:
    forced = constrained({**CHAT, **TOOLS, "tool_choice": "required"}, reasoning=True)
    assert form_of(forced) == behind_reasoning(forced_calls("hermes", USE) or {})
    strict = ToolUse({"f": SCHEMA, "g": None}, strict=frozenset({"f"}))
    guarded = constrained({**CHAT, **STRICT}, reasoning=True)
    assert form_of(guarded) == behind_reasoning(guarded_calls("hermes", strict) or {})
    assert form_of(constrained({**CHAT, **TOOLS}, reasoning=True)) is None


@pytest.mark.parametrize("tool_format", ["hermes", "llama3", "mistral", "any"])
def test_forced_calls_are_in_the_deployments_format(tool_format: str) -> None:
    def form(**fields: Any) -> Any:
        return form_of(constrained({**CHAT, **TOOLS, **fields}, FORMATS[tool_format]))

    assert form(tool_choice="required") == forced_calls(tool_format, USE)
    # The form demanded is that of text, of which there is none.
    assert form(tool_choice="required", **JSON_SCHEMA) == forced_calls(tool_format, USE)
    assert form(tool_choice="required", parallel_tool_calls=False) == forced_calls(
        tool_format, ToolUse(USE.tools, is_parallel=False)
    )
    assert form(tool_choice=NAMED) == forced_calls(tool_format, ONE)


def test_a_model_with_tools_calls_them_or_answers_in_the_form() -> None:
    found = form_of(constrained({**CHAT, **TOOLS, **JSON_SCHEMA}))
    assert found == either([forced_calls("hermes", USE) or {}, schema_format(SCHEMA)])


@pytest.mark.parametrize("tool_format", ["hermes", "llama3", "mistral"])
def test_strict_functions_are_guarded(tool_format: str) -> None:
    asked = constrained({**CHAT, **STRICT}, FORMATS[tool_format])
    assert form_of(asked) == guarded_calls(tool_format, ToolUse(USE.tools, strict=frozenset({"f"})))
    assert asked.ignored == []


def test_where_calls_cannot_be_guarded_strict_is_ignored_by_name() -> None:
    for tool_format, offers in ((FORMATS["any"], True), (FORMATS["hermes"], False), (ToolFormat("later", ()), True)):
        asked = constrained({**CHAT, **STRICT, "user": "u"}, tool_format, structured_output=["regex"] if offers else [])
        assert asked.params.structured_output is None
        assert asked.headers == {"x-ignored-fields": "user, tools.strict"}


def test_calls_that_cannot_be_prescribed_are_refused() -> None:
    for fields, param in (({"tool_choice": "required"}, "tool_choice"), (JSON_SCHEMA, "response_format")):
        with pytest.raises(InvalidRequest, match="'later'") as caught:
            constrained({**CHAT, **TOOLS, **fields}, ToolFormat("later", ()))
        assert caught.value.param == param


def test_a_deployment_of_which_nothing_is_known_is_left_to_its_workers() -> None:
    asked = {**CHAT, **TOOLS, "tool_choice": "required"}
    assert form_of(constrained(asked, groups=0)) == forced_calls("hermes", USE)
    assert constrain(constrained({**CHAT, **JSON_SCHEMA}), None, FORMATS["any"]) == constrained({**CHAT, **JSON_SCHEMA})


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (PATH, {**CHAT, **JSON_SCHEMA}, "response_format"),
        (PATH, {**CHAT, "guided_regex": "a"}, "guided_regex"),
        (PATH, {**CHAT, **TOOLS, "tool_choice": "required"}, "tool_choice"),
        ("/v1/completions", {"model": "fake", "prompt": "x", **JSON_SCHEMA}, "response_format"),
        ("/v1/responses", {"model": "fake", "input": "x", "text": {"format": {"type": "json_object"}}}, "text.format"),
        (
            "/v1/messages",
            {**CHAT, "max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format",
        ),
        ("/mii/fake", {"prompts": "x", "structured_output": {"kind": "json_object"}}, "structured_output"),
    ],
)
async def test_a_deployment_that_has_no_compiler_says_what_to_install(
    http: aiohttp.ClientSession, broker: FakeClient, path: str, fields: dict[str, Any], field: str
) -> None:
    broker.offers_grammars = False
    status, body = await post(http, path, fields)
    error = body.get("error", body)
    assert status == 400
    assert error["message"].startswith(field)
    assert "mii_zmq[structured]" in error["message"]
    assert error.get("param", field) == field
    assert broker.sent == []
    # What is not there is missed by its own name.
    nobody = {**fields, "model": "nobody"} if "model" in fields else fields
    status, _ = await post(http, path.replace("fake", "nobody"), nobody)
    assert status == 404


async def test_errors_of_the_grammar_bear_the_request_s_names(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    refusal = InvalidRequest("structured_output: /not cannot be enforced", param="structured_output")
    broker.answer = lambda generation: generation.fail(refusal)
    for fields, name in (
        (JSON_SCHEMA, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({**TOOLS, "tool_choice": "required"}, "tools"),
        ({**TOOLS, **JSON_SCHEMA}, "response_format"),
    ):
        status, body = await post(http, PATH, {**CHAT, **fields})
        assert (status, body["error"]["param"]) == (400, name)
        assert body["error"]["message"] == f"{name}: /not cannot be enforced"


async def test_schemas_that_are_too_long_together_are_refused(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    tools = [{"type": "function", "function": {**FUNCTION, "name": f"f{i}"}} for i in range(1000)]
    status, body = await post(http, PATH, {**CHAT, "tools": tools, "tool_choice": "required"})
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "characters" in body["error"]["message"]
    assert broker.sent == []


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop"), ("auto", "tool_calls")])
async def test_finish_reasons_are_openai_s(
    http: aiohttp.ClientSession, broker: FakeClient, choice: Any, reason: str
) -> None:
    broker.tool_format = "hermes"
    saying(broker, CALL)
    asked = {**CHAT, **TOOLS, "tool_choice": choice}
    _, body = await post(http, PATH, asked)
    assert body["choices"][0]["finish_reason"] == reason
    assert [call["function"]["name"] for call in body["choices"][0]["message"]["tool_calls"]] == ["f"]
    async with http.post(PATH, json={**asked, "stream": True}) as response:
        chunks = await read_chunks(response)
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    saying(broker, CALL[:20], "length")
    _, body = await post(http, PATH, asked)
    assert body["choices"][0]["finish_reason"] == "length"


async def test_the_other_doors_force_calls_too(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    broker.tool_format = "hermes"
    saying(broker, CALL)
    of_messages = {**CHAT, "max_tokens": 50, "tools": [{"name": "f", "input_schema": SCHEMA}, {"name": "g"}]}
    functions = [{"type": "function", **FUNCTION}, {"type": "function", "name": "g"}]
    of_responses = {"model": "fake", "input": "x", "tools": functions}
    named = {"type": "function", "name": "f"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for path, asked, choice, use in (
        ("/v1/messages", of_messages, {"type": "any"}, USE),
        ("/v1/messages", of_messages, {"type": "tool", "name": "f"}, ONE),
        ("/v1/responses", of_responses, "required", USE),
        ("/v1/responses", of_responses, named, ONE),
        ("/v1/responses", {**of_responses, "parallel_tool_calls": False}, allowed, ONE),
    ):
        status, body = await post(http, path, {**asked, "tool_choice": choice})
        assert status == 200
        form = broker.sent[-1].body.params["structured_output"]
        assert json.loads(form["value"])["format"] == forced_calls("hermes", use)
        if path == "/v1/messages":
            assert (body["stop_reason"], body["content"][0]["type"]) == ("tool_use", "tool_use")
        else:
            assert (body["tool_choice"], body["output"][0]["type"]) == (choice, "function_call")
    async with http.post("/v1/responses", json={**of_responses, "tool_choice": named, "stream": True}) as response:
        events = await read_named_events(response)
    assert events[-1]["response"]["tool_choice"] == named


async def test_responses_repeat_the_format(http: aiohttp.ClientSession) -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    _, body = await post(http, "/v1/responses", {"model": "fake", "input": "x", "text": {"format": form}})
    assert body["text"] == {"format": form}
    _, body = await post(http, "/v1/responses", {"model": "fake", "input": "x"})
    assert body["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize("lost", ["answers_status", "has_groups"])
async def test_groups_that_are_away_for_a_moment_are_remembered(
    http: aiohttp.ClientSession, gateway: Gateway, broker: FakeClient, lost: str
) -> None:
    gateway.status_max_age_s = 0.0
    broker.tool_format, broker.reasons = "hermes", True
    for _ in range(2):
        assert (await post(http, PATH, {**CHAT, **STRICT}))[0] == 200
        setattr(broker, lost, False)
    first, second = (generation.body.params["structured_output"] for generation in broker.sent)
    assert first == second


async def test_only_so_many_deployments_are_remembered_that_are_gone(gateway: Gateway, broker: FakeClient) -> None:
    gateway.status_max_age_s = 0.0
    broker.is_connected = True
    for number in range(MAX_KNOWN + 3):
        broker.deployments = (f"m{number}",)
        await gateway.status()
        assert f"m{number}" in gateway.known
        assert len(gateway.known) <= MAX_KNOWN
