# SPDX-License-Identifier: Apache-2.0
"""What every door understands of the form that an answer shall have, and how it refuses what it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.anthropic_schemas import parse_messages
from mii_zmq.gateway.core_request import CoreRequest
from mii_zmq.gateway.openai_schemas import parse_chat, parse_completion
from mii_zmq.gateway.request_body import split_fields
from mii_zmq.gateway.responses_schemas import parse_responses
from mii_zmq.gateway.rest import parse as parse_mii
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.structured_output import MAX_GRAMMAR_CHARS, StructuredOutput

MESSAGES = [{"role": "user", "content": "x"}]
PARSERS: dict[str, tuple[Callable[[Any], CoreRequest], dict[str, Any]]] = {
    "chat": (parse_chat, {"model": "fake", "messages": MESSAGES}),
    "completion": (parse_completion, {"model": "fake", "prompt": "x"}),
    "responses": (parse_responses, {"model": "fake", "input": "x"}),
    "messages": (parse_messages, {"model": "fake", "messages": MESSAGES, "max_tokens": 5}),
}
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = '{"type":"object","properties":{"z":{"type":"integer"},"a":{"type":"string"}}}'
TAG = {"type": "triggered_tags", "triggers": ["<f>"], "tags": []}
FORM = StructuredOutput("json_schema", TEXT)


def parse(door: str, fields: dict[str, Any]) -> CoreRequest:
    parser, good = PARSERS[door]
    return parser(split_fields(msgspec.json.encode({**good, **fields})))


def deep(depth: int) -> dict[str, Any]:
    return {"items": deep(depth - 1)} if depth else {}


def of_schema(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **more}}


OPENAI = [
    ({"response_format": of_schema(strict=True, description="d")}, FORM),
    ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None}, None),
    (
        {"response_format": {"type": "structural_tag", "format": TAG}},
        StructuredOutput(
            "structural_tag", json.dumps({"type": "structural_tag", "format": TAG}, separators=(",", ":"))
        ),
    ),
]
VLLM = [
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": SCHEMA}}, FORM),
    ({"structured_outputs": {"json": TEXT, "disable_fallback": True}}, FORM),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
    ({"structured_outputs": {"choice": ["ja", "nein"]}}, StructuredOutput("choice", '["ja","nein"]')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, StructuredOutput("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"json_object": True}}, StructuredOutput("json_object")),
    ({"structured_outputs": {"json_object": False, "regex": "a"}}, StructuredOutput("regex", "a")),
    ({"guided_json": SCHEMA}, FORM),
    ({"guided_json": TEXT}, FORM),
    ({"guided_regex": "a+", "guided_decoding_backend": "outlines"}, StructuredOutput("regex", "a+")),
    ({"guided_choice": ["é"]}, StructuredOutput("choice", '["é"]')),
    ({"guided_grammar": 'root ::= "a"'}, StructuredOutput("ebnf", 'root ::= "a"')),
]
RESPONSES = [
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}}, FORM),
    ({"text": {"format": {"type": "json_object"}, "verbosity": "medium"}}, StructuredOutput("json_object")),
    ({"text": {"format": {"type": "text"}}}, None),
    ({"text": {}}, None),
]
ANTHROPIC = [
    ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, FORM),
    ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, FORM),
    ({"output_config": {}}, None),
    ({"output_config": {"format": None, "effort": None}}, None),
]


@pytest.mark.parametrize(
    ("door", "fields", "expected"),
    [
        *((door, *case) for door in ("chat", "completion") for case in (*OPENAI, *VLLM)),
        *(("responses", *case) for case in (*RESPONSES, *VLLM)),
        *(("messages", *case) for case in ANTHROPIC),
    ],
)
def test_every_spelling_is_understood(door: str, fields: dict[str, Any], expected: StructuredOutput | None) -> None:
    [body] = parse(door, fields).bodies()
    assert SamplingParams.from_mapping(body.params).structured_output == expected


def test_tags_of_older_versions_become_triggered_tags() -> None:
    older = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
    expected = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}}
    older["type"] = "structural_tag"  # type: ignore[assignment]
    for fields in (
        {"response_format": older},
        {"structural_tag": older},
        {"structural_tag": json.dumps(older)},
        {"structured_outputs": {"structural_tag": json.dumps(older)}},
        {"structured_outputs": {"structural_tag": expected}},
    ):
        form = parse("chat", fields).params.structured_output
        assert form is not None
        assert (form.kind, json.loads(form.value)) == ("structural_tag", expected)


REFUSED_BY_OPENAI = [
    ({"response_format": "json"}, "response_format", "str"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {}}, "response_format", "type"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", "schema"),
    (
        {"response_format": {"type": "json_object", "json_schema": {"name": "n"}}},
        "response_format.json_schema",
        "object",
    ),
    ({"response_format": {"type": "text", "format": {}}}, "response_format.format", "text"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
        "name",
    ),
    ({"response_format": of_schema(schema=None)}, "response_format.json_schema.schema", "missing"),
    ({"response_format": of_schema(schema=[1])}, "response_format.json_schema.schema", "object"),
    ({"response_format": of_schema(stric=True)}, "response_format.json_schema", "stric"),
    ({"response_format": of_schema(schema=deep(80))}, "response_format.json_schema.schema", "deep"),
    ({"response_format": of_schema(schema={"a": "x" * MAX_GRAMMAR_CHARS})}, "response_format", "characters"),
    ({"response_format": of_schema(schema={"maximum": 2**70})}, "response_format.json_schema.schema", "64"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "format"),
    ({"response_format": {"type": "structural_tag", "triggers": ["a"]}}, "response_format", "structures"),
]
REFUSED_OF_VLLM = [
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "jsn"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "no JSON"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "int"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "empty"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "structural tag"),
    ({"structured_outputs": {"structural_tag": {"type": "x"}}}, "structured_outputs.structural_tag.type", "x"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "structured_outputs.regex"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "spaces",
    ),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace", "spaces"),
    ({"guided_json": [1]}, "guided_json", "array"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex", "characters"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
    (
        {"guided_regex": "a", "structured_outputs": {"json_object": True}},
        "structured_outputs.json_object",
        "guided_regex",
    ),
]
REFUSED_BY_RESPONSES = [
    ({"text": {"format": {"type": "structural_tag"}}}, "text.format.type", "structural_tag"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "missing"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema", "json_object"),
    ({"text": {"format": {"type": "json_object", "colour": 1}}}, "text.format", "colour"),
    ({"text": {"verbosity": "high"}}, "text.verbosity", "high"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format", "guided_regex"),
]
REFUSED_BY_ANTHROPIC = [
    ({"output_config": {"effort": "low"}}, "output_config.effort", "effort"),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget", "effort"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type", "json_object"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "missing"),
    ({"output_format": {"type": "json_schema", "scheme": {}}}, "output_format", "scheme"),
    (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "output_format": {"type": "json_schema", "schema": {}},
        },
        "output_format",
        "output_config.format",
    ),
]


@pytest.mark.parametrize(
    ("door", "fields", "param", "words"),
    [
        *((door, *case) for door in ("chat", "completion") for case in (*REFUSED_BY_OPENAI, *REFUSED_OF_VLLM)),
        *(("responses", *case) for case in (*REFUSED_BY_RESPONSES, *REFUSED_OF_VLLM)),
        *(("messages", *case) for case in REFUSED_BY_ANTHROPIC),
        ("chat", {"response_format": {"type": "json_object"}, "guided_json": {}}, "response_format", "guided_json"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_place(
    door: str, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(door, fields)
    assert caught.value.param == param
    assert param in caught.value.message
    assert words in caught.value.message
    assert len(caught.value.message) < 400


def test_miis_own_door_takes_the_field_itself() -> None:
    def ask(form: Any) -> Any:
        return parse_mii(split_fields(msgspec.json.encode({"prompts": "x", "structured_output": form})))

    [body] = ask({"kind": "choice", "value": '["a"]'}).bodies()
    assert body.params["structured_output"] == {"kind": "choice", "value": '["a"]'}
    assert ask(None).params.structured_output is None
    for form in (
        "json",
        {},
        {"kind": "xml"},
        {"kind": "regex"},
        {"kind": "json_object", "value": "x"},
        {"kid": "regex"},
    ):
        with pytest.raises(InvalidRequest, match="structured_output") as caught:
            ask(form)
        assert (caught.value.param or "").startswith("structured_output")
