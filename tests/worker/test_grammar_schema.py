# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import pytest

from mii_zmq.errors import InvalidRequest
from mii_zmq.worker.grammar_checks import compilable
from mii_zmq.worker.grammar_schema import enforceable

NULL, BOOLEAN = {"type": "null"}, {"type": "boolean"}


def obj(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


ACCEPTED: list[Any] = [
    True,
    {},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"], "$defs": {"a": {"const": 1}}},
    {"type": "string", "enum": ["a", "b"], "title": "t", "description": "d", "default": "a", "examples": [1]},
    {"type": ["integer", "null"], "enum": [1, None]},
    {"type": "number", "enum": [1, 2.5]},
    {"type": "integer", "const": 3.0},
    {"type": "string", "minLength": 1, "maxLength": 5},
    {"type": "string", "minLength": 0, "pattern": "^a$"},
    {"type": "string", "pattern": r"^[a-z]+\.\d{2}\s?\u00e9?$"},
    {"type": "string", "pattern": r'^[^"\\]{0,9}$'},
    {"type": "string", "format": "password", "maxLength": 3},
    {"type": "string", "format": "uri", "minLength": 1},
    {"type": "string", "pattern": "^(ab|c{2,3}|)$", "minLength": 0, "maxLength": 3},
    {
        "type": "object",
        "additionalProperties": {},
        "propertyNames": {"$ref": "#/$defs/e"},
        "$defs": {"e": {"enum": ["a"]}},
    },
    {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "null"}], "description": "optional"},
    {"allOf": [{"type": "integer"}]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "uniqueItems": False},
    {"type": "array", "minItems": 2},
    {"type": "object", "properties": {"not": {"type": "string"}, "if": {}, "$ref": {}}, "x-unknown": 1},
    {"type": "object", "minProperties": 1},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "null"}}, "description": "d"},
    {"$ref": "#/$defs/a~1b~0c%25", "$defs": {"a/b~c%": NULL, "unused": {"not": {}}}},
    {"properties": {"a": NULL}, "items": {}, "minimum": 3},
    {"items": NULL},
    {"type": ["string", "integer"], "minimum": 3, "maxLength": 2},
    {"type": "integer", "format": "int64"},
    {"type": "string", "nullable": True, "contentEncoding": "base64", "readOnly": True},
    {"oneOf": [NULL]},
    {"type": "integer", "exclusiveMinimum": 1.5, "maximum": 20.5, "multipleOf": 5},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.1234567},
]

REFUSED: list[tuple[Any, str]] = [
    (3, "has to be an object or a boolean"),
    (False, "the schema is false"),
    ({"type": "array", "uniqueItems": True}, "/uniqueItems cannot be enforced"),
    ({"properties": {"a": {"not": {}}}}, "/properties/a/not cannot be enforced"),
    ({"if": {}, "then": {}}, "/if cannot be enforced"),
    ({"type": "array", "contains": {}}, "/contains"),
    ({"items": {"dependentRequired": {}}}, "/items/dependentRequired"),
    ({"properties": {"a": {"$id": "x"}}}, r"/properties/a/\$id"),
    # Restrictions that apply to one type alone, which nobody names.
    ({"pattern": "^a$"}, "/pattern cannot be enforced without a type; add type"),
    ({"format": "date"}, "/format cannot be enforced without a type"),
    ({"minimum": 5, "maximum": 9}, "/maximum cannot be enforced without a type"),
    ({"maxLength": 1}, "/maxLength cannot"),
    ({"minLength": 1}, "/minLength cannot"),
    ({"maxItems": 1}, "/maxItems cannot"),
    ({"maxProperties": 1}, "/maxProperties cannot"),
    ({"required": ["a"]}, "/required cannot"),
    ({"multipleOf": 5}, "/multipleOf cannot"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"minimum": 5}}}, r"/\$defs/a/minimum cannot"),
    # Strings.
    ({"type": "string", "pattern": "a", "minLength": 3}, "the schema has pattern and minLength, of which only one"),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, "the schema has pattern and maxLength"),
    ({"type": "string", "pattern": "^(a|bcde)$", "maxLength": 3}, "the schema has pattern and maxLength"),
    ({"type": "string", "format": "date", "pattern": "a"}, "pattern and format"),
    ({"anyOf": [{"type": "string", "format": "date", "maxLength": 3}]}, "/anyOf/0 has format and maxLength"),
    ({"type": "string", "format": "idn-email"}, "/format is 'idn-email', which is not known; known: .*date-time"),
    ({"type": "string", "format": 3}, "/format has to be a string"),
    ({"type": "string", "pattern": 3}, "/pattern has to be a string"),
    ({"type": "string", "pattern": 'a"b'}, "/pattern asks for .* a character that JSON escapes"),
    ({"type": "string", "pattern": r"a\\b"}, "/pattern asks for"),
    ({"type": "string", "pattern": r"a\n"}, "/pattern asks for"),
    ({"type": "string", "pattern": r"\x22"}, "/pattern asks for"),
    ({"type": "string", "pattern": r"[\u0000-\u001f]"}, "/pattern asks for"),
    ({"items": {"type": "string", "pattern": "^(?=a)b"}}, r"/items/pattern holds a lookahead, \(\?="),
    ({"type": "string", "pattern": "x^y|a"}, r"/pattern holds \^ in its middle \(position 2\)"),
    (obj(patternProperties={"^(?!a)": NULL}), "/patternProperties/.* holds a lookahead"),
    (obj(propertyNames={"pattern": "^(?!a)"}), "/propertyNames/pattern holds a lookahead"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "/minLength is above its maxLength|minLength is above"),
    ({"type": "string", "minLength": -1}, "/minLength is -1, allowed: integers of 0"),
    ({"type": "string", "maxLength": "2"}, "/maxLength is 2, allowed"),
    ({"type": "string", "maxLength": True}, "/maxLength is True"),
    # Numbers.
    ({"type": "number", "multipleOf": 0.1}, "/multipleOf can be enforced for the type integer only"),
    ({"type": ["number", "null"], "multipleOf": 5}, "/multipleOf can be enforced for the type integer only"),
    ({"type": "integer", "multipleOf": 2000}, "/multipleOf is 2000, which can be enforced for 1 to 1024"),
    ({"type": "integer", "multipleOf": 1.5}, "/multipleOf is 1.5"),
    ({"type": "integer", "multipleOf": 0}, "/multipleOf is 0, allowed: numbers above 0"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1}, "/multipleOf cannot be enforced beside these bounds"),
    ({"type": "integer", "multipleOf": 3, "minimum": 1, "maximum": 10**5}, "/multipleOf cannot be enforced beside"),
    ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}, "/multipleOf is 7, of which no multiple"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "no integer lies within"),
    ({"type": "integer", "minimum": 10**30}, "/minimum is 1000.*, which is too large"),
    ({"type": "number", "maximum": 1e300}, "/maximum is 1e\\+300, which is too large"),
    ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.000001}, "no number of six decimals"),
    ({"type": "integer", "exclusiveMinimum": True, "minimum": 3}, "/exclusiveMinimum has to be a number"),
    # What stands beside a keyword that decides.
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "/allOf has 2 schemas"),
    ({"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf and type"),
    ({"$ref": "#/$defs/a", "minimum": 3}, r"\$ref and minimum"),
    ({"enum": [3], "minimum": 4}, "enum and minimum"),
    ({"enum": [1, 2], "minimum": 2}, "enum and minimum"),
    ({"const": "abc", "maxLength": 1}, "const and maxLength"),
    ({"allOf": [obj()], "additionalProperties": False}, "allOf and additionalProperties"),
    ({"type": "string", "enum": ["a", 1]}, "/enum holds '1', which is not of its type"),
    ({"type": "integer", "enum": [True]}, "which is not of its type"),
    ({"type": "integer", "const": 1.5}, "/const holds '1.5'"),
    ({"const": [10**19]}, "/const holds 10000000000000000000, allowed: integers"),
    ({"const": float("inf")}, "a number that is too large"),
    ({"const": "\ud800"}, "half of a surrogate pair"),
    # References.
    ({"$ref": "https://example.org/schema"}, "allowed: '#'"),
    ({"$ref": "#anchor"}, "allowed: '#'"),
    ({"$ref": "#/nope"}, r"/\$ref is '#/nope', where the schema has nothing"),
    ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"anyOf": [{"not": {}}]}}}, r"/\$defs/a/anyOf/0/not"),
    # Arrays.
    ({"items": [{"type": "string"}]}, "/items has to be an object or a boolean; .*prefixItems"),
    ({"type": "array", "prefixItems": {}}, "/prefixItems has to be a list"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, "/minItems is above its maxItems"),
    (
        {"type": "array", "prefixItems": [NULL], "items": False, "minItems": 2},
        "/minItems is 2, but 1 items are allowed",
    ),
    ({"type": "array", "items": NULL, "minItems": "2"}, "/minItems is 2, allowed: integers"),
    # Objects.
    ({"properties": {"a": {}}, "required": ["b"]}, "/required names 'b', which is not among its properties"),
    ({"properties": {"a": {}}, "required": ["a", "a"]}, "/required names 'a' twice"),
    ({"properties": {"a": {}}, "required": "a"}, "/required has to be a list of strings"),
    ({"properties": [1]}, "/properties has to be an object"),
    ({"properties": {"a": False}}, "/properties/a is false"),
    (obj(properties={"a": NULL}, propertyNames={"maxLength": 2}), "has properties and propertyNames"),
    (obj(properties={"a": NULL}, patternProperties={"^a": BOOLEAN}), "has properties and patternProperties"),
    (obj(patternProperties={"a": NULL}, propertyNames={"pattern": "b"}), "has patternProperties and propertyNames"),
    (obj(patternProperties={"a": NULL, "b": BOOLEAN}), "/patternProperties has 2 patterns"),
    (obj(propertyNames={"anyOf": [{"const": "a"}]}), "/propertyNames/anyOf cannot be enforced; write pattern"),
    (obj(propertyNames={"$ref": "#"}), "/propertyNames/type has to be 'string'"),
    (obj(propertyNames={"type": "integer"}), "/propertyNames/type has to be 'string'"),
    (obj(propertyNames={"enum": ["a", 1]}), "/propertyNames has to list strings"),
    (obj(propertyNames=False), "/propertyNames has to be an object"),
    (obj(minProperties=2), "/minProperties is 2, which cannot be enforced where keys are free"),
    (obj(properties={"a": NULL}, minProperties=2), "/minProperties is 2, but 1 are allowed"),
    (obj(properties={"a": NULL}, required=["a"], maxProperties=0), "/maxProperties is 0, but more are required"),
    # Malformed ones.
    ({"type": []}, "/type has to name types"),
    ({"type": ["null", "null"]}, "/type has to name types, none of them twice"),
    ({"type": "strin"}, "/type is 'strin', allowed: array"),
    ({"type": [{}]}, "/type is '{}'"),
    ({"anyOf": {}}, "/anyOf has to be a list"),
    ({"anyOf": []}, "/anyOf has to be a list of schemas that is not empty"),
    ({"enum": []}, "/enum has to be a list that is not empty"),
    ({"enum": 3}, "/enum has to be a list"),
]


@pytest.mark.parametrize("schema", ACCEPTED, ids=str)
def test_what_can_be_enforced_is_accepted(schema: Any) -> None:
    json.dumps(enforceable(schema))


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=str)
def test_what_cannot_is_refused_by_name(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        enforceable(schema)
    assert caught.value.param == "structured_output"
    assert caught.value.message.startswith("structured_output: json_schema: ")


def test_definitions_that_refer_to_each_other_are_written_once() -> None:
    chain: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(1500)}
    found = enforceable({"$ref": "#/$defs/d0", "$defs": {**chain, "d1500": NULL}})
    assert len(found["$defs"]) == 1501
    node = obj(properties={"next": {"anyOf": [{"$ref": "#"}, NULL]}})
    assert len(enforceable(node)["$defs"]) == 1


def test_alternatives_that_are_equal_are_one() -> None:
    assert enforceable({"anyOf": [NULL, {"type": "null", "title": "t"}]}) == NULL
    assert enforceable({"anyOf": [NULL, BOOLEAN, NULL]}) == {"anyOf": [NULL, BOOLEAN]}


def test_schemas_and_expressions_within_structural_tags_are_checked() -> None:
    def tag(content: object) -> str:
        call = {"type": "tag", "begin": "a", "content": content, "end": "b"}
        rules = [["x", {"type": "or", "elements": [call]}]]
        return json.dumps({"type": "structural_tag", "format": {"type": "dispatch", "rules": rules}})

    def schema(value: object, kind: str = "json_schema") -> str:
        return tag({"type": kind, "json_schema": value})

    compilable("structural_tag", schema({"type": "object", "properties": {"type": {"const": "json_schema"}}}))
    for kind in ("json_schema", "qwen_xml_parameter"):
        with pytest.raises(InvalidRequest, match="not cannot be enforced"):
            compilable("structural_tag", schema({"not": {}}, kind))
    with pytest.raises(InvalidRequest, match="its regex holds a lookahead"):
        compilable("structural_tag", tag({"type": "regex", "pattern": "(?=a)"}))
    with pytest.raises(InvalidRequest, match="its regex holds \\^ in its middle"):
        compilable("regex", "a^b")
    assert compilable("ebnf", "root ::= [^a]") == "root ::= [^a]"
