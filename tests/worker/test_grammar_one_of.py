# SPDX-License-Identifier: Apache-2.0
"""Branches of `oneOf`: which are known to exclude each other, and what they are made to require for it."""

from __future__ import annotations

from typing import Any

import pytest

from mii_zmq.errors import InvalidRequest
from mii_zmq.worker.grammar_schema import enforceable

TEXT, NULL, INTEGER, NUMBER = {"type": "string"}, {"type": "null"}, {"type": "integer"}, {"type": "number"}


def obj(required: str = "", *, closed: bool | None = None, **properties: Any) -> dict[str, Any]:
    others = {} if closed is None else {"additionalProperties": not closed}
    return {"type": "object", "properties": properties, "required": list(required), **others}


def const(value: Any) -> dict[str, Any]:
    return {"const": value}


DISJOINT: list[list[Any]] = [
    [TEXT, NULL, INTEGER],
    [{"type": ["string", "null"]}, {"type": ["integer", "array"]}],
    [const("a"), const("b"), {"enum": ["c", 1]}],
    [const(1), const(True), const("1"), const([1])],
    [const("a"), INTEGER],
    [obj("k", k=const("a")), obj("k", k=const("b"))],
    [obj("k", k=const("a")), obj(k=const("b"))],
    [obj("k", k=TEXT), obj("k", k={"anyOf": [INTEGER, NULL]})],
    [obj("k", k=obj("t", t=const(1))), obj("k", k=obj("t", t=const(2)))],
    [obj("a", closed=True, a=NULL), obj("b", closed=True, b=NULL)],
    # Keys that are not listed are not written.
    [obj("a", a=NULL), obj("b", b=NULL)],
    [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, NULL],
    [{"allOf": [obj("k", k=const("a"))]}, obj("k", k=const("b"))],
    [{"oneOf": [const(1), const(2)]}, {"anyOf": [const(3), TEXT]}],
    [{"enum": [n]} for n in range(2000)],
]

OVERLAPPING: list[list[Any]] = [
    [INTEGER, NUMBER],
    [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "integer", "minimum": 5, "maximum": 19}],
    [const(1), const(1.0)],
    [const("a"), TEXT],
    [{}, NULL],
    [True, NULL],
    [obj(a=NULL), obj(b=NULL)],
    [obj("a", a=NULL), obj("b", closed=False, b=NULL)],
    [obj("k", k=const("a")), obj("k", k={"enum": ["a", "b"]})],
    [obj(k=obj(t=const(1))), obj(k=obj(t=const(2)))],
    [{"type": "array", "items": NULL}, {"type": "array", "items": TEXT}],
    [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}],
    [{"$ref": "#/$defs/loop"}, NULL],
    [*({"enum": [n]} for n in range(700)), INTEGER],
]

DEFINITIONS = {
    "a": obj("k", k=const("a")),
    "b": obj("k", k=const("b")),
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}, NULL]},
}


@pytest.mark.parametrize("branches", DISJOINT, ids=lambda branches: str(branches)[:80])
def test_branches_that_exclude_each_other_are_alternatives(branches: list[Any]) -> None:
    assert len(enforceable({"oneOf": branches, "$defs": DEFINITIONS})["anyOf"]) == len(branches)


@pytest.mark.parametrize("branches", OVERLAPPING, ids=lambda branches: str(branches)[:80])
def test_branches_that_may_both_fit_are_refused_by_place(branches: list[Any]) -> None:
    schema = {"properties": {"x": {"oneOf": branches}}, "$defs": DEFINITIONS}
    with pytest.raises(
        InvalidRequest, match=r"/properties/x/oneOf cannot be enforced: its branches \d+ and \d+ .*use anyOf"
    ):
        enforceable(schema)


def test_a_discriminator_that_is_optional_becomes_required() -> None:
    """As pydantic writes unions whose discriminator has a default."""
    kinds = {
        name: obj(kind={"const": name, "default": name, "type": "string"}, size=size)
        for name, size in (("cat", INTEGER), ("dog", TEXT))
    }
    union = {
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}},
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    }
    found = enforceable({**obj(pet=union, other={"$ref": "#/$defs/cat"}), "$defs": kinds})
    pets = [found["$defs"][branch["$ref"].split("/")[-1]] for branch in found["properties"]["pet"]["anyOf"]]
    assert [pet["required"] for pet in pets] == [["kind"], ["kind"]]
    alone = found["$defs"][found["properties"]["other"]["$ref"].split("/")[-1]]
    assert alone["required"] == []


def test_recursive_unions_end() -> None:
    node = obj(kind=const("node"), children={"type": "array", "items": {"$ref": "#/$defs/any"}})
    leaf = obj(kind=const("leaf"))
    either = {"oneOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/leaf"}]}
    found = enforceable({"$ref": "#/$defs/any", "$defs": {"any": either, "node": node, "leaf": leaf}})
    assert len(found["$defs"]) == 3
