# SPDX-License-Identifier: Apache-2.0
"""Bare text to the types of a schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.gateway.tool_arguments import from_text


def convert(text: str, schema: Any, **root: Any) -> Any:
    return from_text(text, "x", {"properties": {"x": schema}, **root})


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        (" a ", {"type": "string"}, " a "),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": "integer", "nullable": True}, "None"),
        ("5", {"type": "integer"}, 5),
        ("-12\n", {"type": "integer"}, -12),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("five", {"type": "integer"}, "five"),
        ("1_000", {"type": "integer"}, "1_000"),
        ("٣", {"type": "integer"}, "٣"),
        ("9" * 30, {"type": "integer"}, int("9" * 30)),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("5", {"type": "number"}, 5),
        ("5.25e1", {"type": "number"}, 52.5),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {"type": "number"}, "NaN"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': True, 'b': None}", {"type": "object"}, {"a": True, "b": None}),
        ("[1, 2]", {"type": "object"}, "[1, 2]"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("(1, 'b')", {"type": "array"}, [1, "b"]),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("[" * 100_000 + "]" * 100_000, {"type": "array"}, "[" * 100_000 + "]" * 100_000),
        ('{"x": NaN}', {"type": "object"}, '{"x": NaN}'),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ("a", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "a"),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("true", {"const": True}, True),
        ("[1]", {"items": {"type": "integer"}}, [1]),
        ('{"a": 1}', {"properties": {}}, {"a": 1}),
        ("3", {"type": "int"}, 3),
        ("3", {}, 3),
        ("03", {}, "03"),
        ("a b", {}, "a b"),
        ('"3"', {}, "3"),
        ("1e999", {}, "1e999"),
        ("3", True, 3),
    ],
)
def test_the_schema_decides(text: str, schema: Any, value: Any) -> None:
    found = convert(text, schema)
    assert found == value
    assert type(found) is type(value)


def test_arguments_without_a_schema_are_json_or_strings() -> None:
    for schema in (None, {}, {"properties": []}, {"properties": {"y": {"type": "string"}}}):
        assert from_text("3", "x", schema) == 3
        assert from_text("three", "x", schema) == "three"


def test_references_are_followed_and_may_be_circular() -> None:
    definitions = {"N": {"type": "integer"}, "a/b": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    assert convert("5", {"$ref": "#/$defs/N"}, **{"$defs": definitions}) == 5
    assert convert("5", {"$ref": "#/$defs/a~1b"}, **{"$defs": definitions}) == "5"
    assert convert("5", {"$ref": "#/$defs/loop"}, **{"$defs": definitions}) == 5
    assert convert("5", {"$ref": "#/nowhere/else"}, **{"$defs": definitions}) == 5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
KINDS = st.sampled_from(["string", "integer", "number", "boolean", "object", "array", "null", "int", "other", 5, None])


@settings(max_examples=50, deadline=None)
@given(text=st.text(), kinds=st.lists(KINDS, max_size=3), schema=JSON)
def test_nothing_raises(text: str, kinds: list[Any], schema: Any) -> None:
    convert(text, {"type": kinds})
    convert(text, schema)
    from_text(text, "x", {"properties": schema})


class Counted(list[Any]):
    """Counts the values that are looked at."""

    num_seen = 0

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            Counted.num_seen += 1
            yield value

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        Counted.num_seen += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("again", [{"$ref": "#/$defs/a"}, {"anyOf": [{"$ref": "#/$defs/a"}]}])
def test_huge_lists_of_a_schema_that_holds_itself_are_not_read(again: dict[str, Any]) -> None:
    Counted.num_seen = 0
    schema = {
        "type": Counted(["integer"] * 150_000),
        "enum": Counted([1] * 150_000),
        "anyOf": Counted([again] * 150_000),
    }
    for _ in range(10):
        assert convert("5", {"$ref": "#/$defs/a"}, **{"$defs": {"a": schema}}) == 5
    assert Counted.num_seen < 10_000


def test_what_a_huge_reference_points_to_is_not_looked_for() -> None:
    name = "a" * 5000
    assert convert("5", {"$ref": "#/" + name, "type": "string"}, **{name: {"type": "integer"}}) == "5"
