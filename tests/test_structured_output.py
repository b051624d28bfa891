# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from mii_zmq.errors import InvalidRequest
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.structured_output import MAX_CHOICES, MAX_GRAMMAR_CHARS, MAX_JSON_DEPTH


def parse(kind: str, value: str = "", **more: str) -> SamplingParams:
    return SamplingParams.from_mapping({"structured_output": {"kind": kind, "value": value, **more}})


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_object", ""),
        ("json_schema", "{}"),
        ("json_schema", "true"),
        ("regex", "é+"),
        ("choice", '["a", "b"]'),
        ("ebnf", 'root ::= "a"'),
        ("structural_tag", '{"type": "structural_tag"}'),
        ("json_schema", '{"a": ' * (MAX_JSON_DEPTH - 1) + "{}" + "}" * (MAX_JSON_DEPTH - 1)),
    ],
)
def test_a_grammar_survives_the_wire(kind: str, value: str):
    params = parse(kind, value)
    assert SamplingParams.from_mapping(params.to_mapping()) == params


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("jason", "", "structured_output"),
        ("json_object", "{}", "takes no value"),
        ("regex", "", "is empty"),
        ("regex", "a" * (MAX_GRAMMAR_CHARS + 1), "characters"),
        ("regex", "\ud800", "lone surrogate at character 0"),
        ("json_schema", "{", "no JSON"),
        ("json_schema", "[]", "has to be a JSON object"),
        ("json_schema", '{"a": ' * 100 + "{}" + "}" * 100, "nested"),
        # Brackets in strings are none, whichever way they point.
        ("json_schema", '{"a": "' + "}" * 999 + '", "b": ' + '{"a": ' * 100 + "{}" + "}" * 101, "nested"),
        ("json_schema", '{"a": "\\\\", "b": "' + "}" * 5000 + '", "c": ' + "[" * 5000, "nested"),
        ("structural_tag", "true", "has to be a JSON object"),
        ("choice", "{}", "a list of"),
        ("choice", "[]", "a list of"),
        ("choice", '["a", ""]', "a list of"),
        ("choice", json.dumps(["a"] * (MAX_CHOICES + 1)), "a list of"),
    ],
)
def test_what_is_no_grammar_is_refused_at_every_door(kind: str, value: str, reason: str):
    with pytest.raises(InvalidRequest, match=reason):
        parse(kind, value)


def test_unknown_fields_are_refused():
    with pytest.raises(InvalidRequest, match="structured_output"):
        parse("regex", "a", strict="yes")
