# SPDX-License-Identifier: Apache-2.0
"""Schemas of arrays and objects -> what of them the grammar compiler enforces to the letter. Pure.

`inner` turns a schema within, given with its path, into one of the compiler's. Functions raise InvalidRequest, which
names path and keyword, for what cannot be enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from mii_zmq.worker.grammar_charsets import UNQUOTED, Ranges, other_texts
from mii_zmq.worker.grammar_scalars import count, refused, string, text_pattern

Inner = Callable[[Any, str], dict[str, Any]]


def array(schema: dict[str, Any], path: str, inner: Inner) -> dict[str, Any]:
    least, most = count(schema, "minItems", path) or 0, count(schema, "maxItems", path)
    if most is not None and least > most:
        raise refused(f"{path}/minItems is above its maxItems")
    first = schema.get("prefixItems", [])
    if not isinstance(first, list):
        raise refused(f"{path}/prefixItems has to be a list")
    if isinstance(schema.get("items"), list):
        raise refused(f"{path}/items has to be an object or a boolean; a list of schemas is called prefixItems")
    items = [inner(item, f"{path}/prefixItems/{index}") for index, item in enumerate(first[:most])]
    keyword = "items" if "items" in schema else "unevaluatedItems"
    others = schema.get(keyword, len(items) < least or "prefixItems" not in schema)
    if others is False and least > len(items):
        raise refused(f"{path}/minItems is {least}, but {len(items)} items are allowed")
    return {
        "type": "array",
        **({"prefixItems": items} if items else {}),
        "items": others is not False and inner(others, f"{path}/{keyword}"),
        **({"minItems": least} if least else {}),
        **({} if most is None else {"maxItems": most}),
    }


def obj(
    schema: dict[str, Any],
    path: str,
    inner: Inner,
    also_required: Collection[str] = (),
    key_characters: Ranges = UNQUOTED,
) -> dict[str, Any]:
    """`also_required`: of its properties, beside those that the schema requires; `key_characters`: of other keys."""
    properties = {
        name: inner(value, f"{path}/properties/{name[:60]}")
        for name, value in _mapping(schema, "properties", path).items()
    }
    required = [*_required(schema, properties, path)]
    required += sorted(set(also_required) & properties.keys() - set(required))
    patterns = _mapping(schema, "patternProperties", path)
    _check_pairs(schema, properties, patterns, path)
    keyword = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
    others = schema.get(keyword, "properties" not in schema and not patterns)
    found: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    names = _names(schema.get("propertyNames", True), f"{path}/propertyNames")
    if patterns:
        ((pattern, value),) = patterns.items()
        where = f"{path}/patternProperties/{pattern[:60]}"
        found["patternProperties"] = {text_pattern(pattern, where): inner(value, where)}
    found["additionalProperties"] = others is not False and inner(others, f"{path}/{keyword}")
    if others is not False and not patterns:
        if names is not None:
            found["propertyNames"] = names
        elif properties:
            # Otherwise the compiler would take a listed key with another type, its letters escaped.
            found["propertyNames"] = {"type": "string", "pattern": other_texts(properties, key_characters)}
    is_free = others is not False or bool(patterns)
    return found | _counts(schema, len(properties), len(required), path, is_free=is_free)


def _mapping(schema: dict[str, Any], keyword: str, path: str) -> dict[str, Any]:
    found = schema.get(keyword, {})
    if not isinstance(found, dict):
        raise refused(f"{path}/{keyword} has to be an object")
    return found


def _required(schema: dict[str, Any], properties: dict[str, Any], path: str) -> list[str]:
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refused(f"{path}/required has to be a list of strings")
    seen: set[str] = set()
    for name in names:
        if name not in properties:
            raise refused(f"{path}/required names {name[:60]!r}, which is not among its properties")
        if name in seen:
            raise refused(f"{path}/required names {name[:60]!r} twice")
        seen.add(name)
    return names


def _check_pairs(schema: dict[str, Any], properties: dict[str, Any], patterns: dict[str, Any], path: str) -> None:
    present = [
        *(["properties"] if properties else []),
        *(["patternProperties"] if patterns else []),
        *(["propertyNames"] if schema.get("propertyNames") not in (None, True, {}) else []),
    ]
    if len(present) > 1:
        raise refused(
            f"{path or 'the schema'} has {present[0]} and {present[1]}, which cannot be enforced together; keep one"
        )
    if len(patterns) > 1:
        raise refused(
            f"{path}/patternProperties has {len(patterns)} patterns, of which one can be enforced; merge them"
        )


def _names(schema: Any, path: str) -> dict[str, Any] | None:
    """A schema of keys; None: any."""
    if schema in (True, {}):
        return None
    if not isinstance(schema, dict):
        raise refused(f"{path} has to be an object that describes strings")
    if schema.get("type", "string") != "string":
        raise refused(f"{path}/type has to be 'string'")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise refused(f"{path} has to list strings")
        return {"enum": values}
    for keyword in ("$ref", "anyOf", "oneOf", "allOf", "not", "if"):
        if keyword in schema:
            raise refused(f"{path}/{keyword} cannot be enforced; write pattern, enum, const or lengths there")
    return string(schema, path)


def _counts(schema: dict[str, Any], num_listed: int, num_required: int, path: str, *, is_free: bool) -> dict[str, int]:
    least, most = count(schema, "minProperties", path) or 0, count(schema, "maxProperties", path)
    if most is not None and max(least, num_required) > most:
        raise refused(f"{path}/maxProperties is {most}, but more are required")
    if is_free and least > max(1, num_required):
        raise refused(
            f"{path}/minProperties is {least}, which cannot be enforced where keys are free, since one may come twice; "
            "list and require them, or leave it out"
        )
    if not is_free and least > num_listed:
        raise refused(f"{path}/minProperties is {least}, but {num_listed} are allowed")
    return ({"minProperties": least} if least else {}) | ({} if most is None else {"maxProperties": most})
