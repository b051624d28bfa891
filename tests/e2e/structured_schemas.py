# SPDX-License-Identifier: Apache-2.0
"""Twenty-five schemas whose answers are of bounded length, so that also a random model comes to an end."""

from __future__ import annotations

from typing import Any

NAME = {"type": "string", "minLength": 1, "maxLength": 12}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
POINT = {"type": "object", "properties": {"x": SMALL, "y": SMALL}, "required": ["x", "y"]}


def record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required}


SCHEMAS: list[dict[str, Any]] = [
    NAME,
    {"type": "boolean"},
    {"type": "null"},
    SMALL,
    {"type": "integer", "minimum": -1000, "maximum": 1000},
    {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 12},
    {"enum": ["red", "green", "blue", None, 7, {"a": [1, 2]}]},
    {"type": "string", "enum": ["north", "south", "östlich", 'say "west"']},
    {"const": {"fixed": [1, None, "x"]}},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "maxLength": 5},
    {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "prefixItems": [NAME, SMALL, {"type": "null"}], "items": False, "minItems": 3},
    record(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 150}),
    record(["id"], id=SMALL, nick=NAME, tags={"type": "array", "items": NAME, "maxItems": 3}),
    record([], a={"type": "boolean"}, b={"type": "boolean"}, c={"type": "null"}),
    record(inner=record(deeper=record(deepest=SMALL))),
    {"anyOf": [SMALL, NAME, {"type": "null"}]},
    record(
        value={"anyOf": [{"type": "null"}, record(kind={"const": "n"}, n=SMALL), record(kind={"const": "s"}, s=NAME)]}
    ),
    record(points={"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 3}) | {"$defs": {"point": POINT}},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    record(status={"enum": ["ok", "failed"]}, code={"type": "integer", "minimum": 100, "maximum": 599}, note=NAME)
    | {"additionalProperties": False},
    record(["city"], city=NAME, zip={"type": "string", "pattern": "^[0-9]{5}$"}, geo=POINT),
]
