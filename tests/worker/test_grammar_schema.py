# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from mii_zmq.errors import InvalidRequest
from mii_zmq.worker.grammar_schema import check_schema, check_tag

ACCEPTED: list[Any] = [
    True,
    {},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"], "$defs": {"a": {"const": 1}}},
    {"type": "string", "enum": ["a", "b"], "title": "t", "description": "d", "default": "a", "examples": [1]},
    {"type": ["integer", "null"], "enum": [1, None]},
    {"type": "number", "enum": [1, 2.5]},
    {"type": "integer", "const": 3.0},
    {"type": "string", "minLength": 1, "maxLength": 5},
    {"type": "string", "pattern": r"^[a-z]+\.\d{2}\s?\u00e9?$"},
    {"type": "string", "pattern": "^[^a]{0,9}$"},
    {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "null"}], "description": "optional"},
    {"allOf": [{"type": "integer"}]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "uniqueItems": False},
    {"type": "object", "properties": {"not": {"type": "string"}, "if": {}, "$ref": {}}, "x-unknown": 1},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}, "description": "d"},
]

REFUSED: list[tuple[Any, str]] = [
    (3, "has to be an object or a boolean"),
    ({"type": "array", "uniqueItems": True}, "/uniqueItems cannot be enforced"),
    ({"properties": {"a": {"not": {}}}}, "/properties/a/not cannot be enforced"),
    ({"if": {}, "then": {}}, "/if cannot be enforced"),
    ({"type": "array", "contains": {}}, "/contains"),
    ({"items": {"dependentRequired": {}}}, "/items/dependentRequired"),
    ({"type": "string", "pattern": "a", "minLength": 3}, "pattern and minLength"),
    ({"type": "string", "format": "date", "pattern": "a"}, "pattern and format"),
    ({"type": "string", "pattern": 'a"b'}, "/pattern names a character that JSON escapes"),
    ({"type": "string", "pattern": r"a\\b"}, "/pattern names"),
    ({"type": "string", "pattern": r"a\n"}, "/pattern names"),
    ({"type": "string", "pattern": r"\x22"}, "/pattern names"),
    ({"type": "string", "pattern": r"\u001f"}, "/pattern names"),
    ({"anyOf": [{"type": "string", "format": "date", "maxLength": 3}]}, "/anyOf/0 has format and maxLength"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "/allOf has 2 schemas"),
    ({"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf and type"),
    ({"$ref": "#/$defs/a", "minimum": 3}, r"\$ref and minimum"),
    ({"$ref": "https://example.org/schema"}, "allowed: '#'"),
    ({"$ref": "#anchor"}, "allowed: '#'"),
    ({"type": "string", "enum": ["a", 1]}, "/enum holds '1', which is not of its type"),
    ({"type": "integer", "enum": [True]}, "which is not of its type"),
    ({"type": "integer", "const": 1.5}, "/const holds '1.5'"),
    ({"enum": [3], "minimum": 4}, "enum and minimum"),
    ({"properties": {"a": {}}, "required": ["b"]}, "/required names 'b'"),
    ({"properties": [1]}, "/properties has to be an object"),
    ({"anyOf": {}}, "/anyOf has to be a list"),
    ({"items": [{"type": "string"}]}, "/items has to be an object or a boolean"),
]


@pytest.mark.parametrize("schema", ACCEPTED, ids=str)
def test_what_can_be_enforced_is_accepted(schema: Any):
    check_schema(schema)


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=str)
def test_what_cannot_is_refused_by_name(schema: Any, reason: str):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        check_schema(schema)
    assert caught.value.param == "structured_output"
    assert caught.value.message.startswith("structured_output: json_schema: ")


def test_schemas_within_structural_tags_are_checked() -> None:
    def tag(schema: object) -> object:
        call = {"type": "tag", "begin": "a", "content": {"type": "json_schema", "json_schema": schema}, "end": "b"}
        rules = [["x", {"type": "or", "elements": [call]}]]
        return {"type": "structural_tag", "format": {"type": "dispatch", "rules": rules}}

    check_tag(tag({"type": "object", "properties": {"type": {"const": "json_schema"}}}))
    with pytest.raises(InvalidRequest, match="not cannot be enforced"):
        check_tag(tag({"not": {}}))
