# SPDX-License-Identifier: Apache-2.0
"""What of JSON Schema can be enforced while a text is written, and what has to be refused.

The grammar compiler passes over what it cannot express, and such an answer would not be valid. So every keyword that
restricts values and is not enforced, alone or beside another one, is refused here by name; annotations and unknown
names are ignored, as JSON Schema says. `oneOf` is read as `anyOf`. Pure; nothing is resolved but local references.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mii_zmq.errors import InvalidRequest

UNENFORCED = frozenset({
    "additionalItems", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "then", "$dynamicRef", "$recursiveRef",
})  # fmt: skip
DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""The first of these that a schema has is all that the compiler reads of it."""
RESTRICTING = frozenset({
    *DECIDING, "type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
SCHEMAS = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_UNQUOTABLE = re.compile(
    r'["\x00-\x1f]|\\\\|\\[nrtfv0c]|\\x(?:[01]|22|5c)|\\u\{?0{0,4}(?:[01][0-9a-f]\b|22|5c)|\\u00[01]', re.I
)
"""In a pattern; the compiler writes such characters into a string as they are."""
_TYPES: dict[str, Any] = {
    "string": str, "boolean": bool, "null": type(None), "array": list, "object": dict, "integer": int,
    "number": (int, float),
}  # fmt: skip


def check_schema(schema: Any) -> None:
    """Raise InvalidRequest for what an answer could violate although it follows the grammar; the message says where."""
    _check(schema, "")


def check_tag(tag: Any) -> None:
    """The same for every schema of a structural tag, at whatever depth. Raises InvalidRequest."""
    if isinstance(tag, dict) and tag.get("type") == "json_schema":
        check_schema(tag.get("json_schema", True))
    elif isinstance(tag, (dict, list)):
        for part in tag.values() if isinstance(tag, dict) else tag:
            check_tag(part)


def _check(schema: Any, path: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _refused(f"{path or 'the schema'} has to be an object or a boolean")
    for keyword in sorted(UNENFORCED & schema.keys()):
        raise _refused(f"{path}/{keyword} cannot be enforced; leave it out")
    if schema.get("uniqueItems") is True:
        raise _refused(f"{path}/uniqueItems cannot be enforced; leave it out")
    _check_combinations(schema, path)
    _check_references(schema, path)
    for name, inner in _inner_schemas(schema, path):
        _check(inner, name)


def _check_combinations(schema: dict[str, Any], path: str) -> None:
    strings = [name for name in ("pattern", "format", "minLength", "maxLength") if name in schema]
    if len(strings) > 1 and strings != ["minLength", "maxLength"]:
        raise _refused(f"{path} has {' and '.join(strings)}, of which only one can be enforced; keep one")
    if _UNQUOTABLE.search(str(schema.get("pattern", ""))):
        raise _refused(f"{path}/pattern names a character that JSON escapes (a quotation mark, a backslash, a control)")
    deciding = next((name for name in DECIDING if name in schema), None)
    if deciding is None:
        _check_required(schema, path)
        return
    beside = sorted(RESTRICTING & schema.keys() - {deciding})
    if deciding in ("enum", "const") and beside == ["type"]:
        _check_type(schema, deciding, path)
    elif beside:
        raise _refused(f"{path} has {deciding} and {beside[0]}, of which only {deciding} can be enforced; merge them")
    if deciding == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) > 1:
        raise _refused(f"{path}/allOf has {len(schema['allOf'])} schemas, allowed: one; merge them")


def _check_required(schema: dict[str, Any], path: str) -> None:
    required, properties = schema.get("required"), schema.get("properties", {})
    if isinstance(required, list) and isinstance(properties, dict):
        for name in required:
            if name not in properties:
                raise _refused(f"{path}/required names {str(name)[:60]!r}, which is not among its properties")


def _check_type(schema: dict[str, Any], deciding: str, path: str) -> None:
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    values = schema["enum"] if deciding == "enum" else [schema["const"]]
    if not isinstance(values, list):
        raise _refused(f"{path}/enum has to be a list")
    for value in values:
        if not any(_has_type(value, name) for name in types):
            raise _refused(f"{path}/{deciding} holds {str(value)[:60]!r}, which is not of its type")


def _has_type(value: Any, name: Any) -> bool:
    expected = _TYPES.get(name) if isinstance(name, str) else None
    if expected is None or (isinstance(value, bool) and name != "boolean"):
        return False
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, expected)


def _check_references(schema: dict[str, Any], path: str) -> None:
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        raise _refused(f"{path}/$ref is {str(reference)[:60]!r}, allowed: '#' and '#/...', within the schema")


def _inner_schemas(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name in SCHEMAS:
        if name in schema:
            yield f"{path}/{name}", schema[name]
    for name in MAPS_OF_SCHEMAS:
        inner = schema.get(name, {})
        if not isinstance(inner, dict):
            raise _refused(f"{path}/{name} has to be an object")
        for key, value in inner.items():
            yield f"{path}/{name}/{key[:60]}", value
    for name in LISTS_OF_SCHEMAS:
        inner = schema.get(name, [])
        if not isinstance(inner, list):
            raise _refused(f"{path}/{name} has to be a list")
        for index, value in enumerate(inner):
            yield f"{path}/{name}/{index}", value


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest(f"structured_output: json_schema: {what}", param="structured_output")
