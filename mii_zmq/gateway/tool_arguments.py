# SPDX-License-Identifier: Apache-2.0
"""Arguments that a model writes as bare text, to the types that the tool's JSON schema gives them.

Formats with tags write `<parameter=count>3</parameter>`: whether that is a number or a string only the schema tells.
What no type takes stays the string that it is, so that the caller sees what the model wrote. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mii_zmq.gateway.python_calls import PythonReader

MAX_STEPS = 64
"""Schemas looked at for one argument; those behind them do not count."""
MAX_VALUES = 256
"""Of one schema's enum, or list of types, looked at."""
MAX_REFERENCE_CHARS = 4096
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,4000}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_TYPES: dict[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array", type(None): "null",
}  # fmt: skip
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
"""Python's names, which schemas written by hand hold."""
_NO_VALUE = object()


def from_text(text: str, name: str, schema: Mapping[str, Any] | None) -> Any:
    """The value of the argument `name` of a tool whose arguments `schema` describes.

    Of several types the narrowest that takes the text counts, a string last. Without a type it is JSON if it reads as
    JSON, and a string otherwise.
    """
    root = schema or {}
    properties = root.get("properties")
    own = properties.get(name) if isinstance(properties, dict) else None
    types = set(_types(own, root))
    if not types:
        value = _json(text)
        return text if value is _NO_VALUE else value
    bare = text.strip()
    for kind, convert in _CONVERSIONS.items():
        if kind in types and (value := convert(bare)) is not _NO_VALUE:
            return value
    return text


def _types(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """The types that a schema allows, as far as it says so."""
    waiting, seen = [schema], set()
    for _ in range(MAX_STEPS):
        if not waiting:
            return
        found = waiting.pop()
        if not isinstance(found, dict) or id(found) in seen:
            continue
        seen.add(id(found))
        kinds = found.get("type")
        yield from (
            _ALIASES.get(kind, kind)
            for kind in (kinds[:MAX_VALUES] if isinstance(kinds, list) else [kinds])
            if isinstance(kind, str)
        )
        values = found.get("enum")
        yield from {_TYPES[type(value)] for value in (values[:MAX_VALUES] if isinstance(values, list) else [])}
        if "const" in found:
            yield _TYPES[type(found["const"])]
        if kinds is None and "properties" in found:
            yield "object"
        if kinds is None and "items" in found:
            yield "array"
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += found[key][:MAX_STEPS] if isinstance(found.get(key), list) else []
        reference = found.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/") and len(reference) <= MAX_REFERENCE_CHARS:
            waiting.append(_referenced(reference, root))


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference[2:].split("/", MAX_STEPS):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _null(text: str) -> Any:
    return None if text.lower() in ("null", "none") else _NO_VALUE


def _boolean(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), _NO_VALUE)


def _integer(text: str) -> Any:
    if _INTEGER.fullmatch(text):
        return int(text)
    number = _number(text)
    return int(number) if isinstance(number, float) and number.is_integer() else _NO_VALUE


def _number(text: str) -> Any:
    if _INTEGER.fullmatch(text):
        return int(text)
    number = float(text) if _NUMBER.fullmatch(text) else math.inf
    return number if math.isfinite(number) else _NO_VALUE


def _object(text: str) -> Any:
    value = _literal(text)
    return value if isinstance(value, dict) else _NO_VALUE


def _array(text: str) -> Any:
    value = _literal(text)
    return value if isinstance(value, list) else _NO_VALUE


def _literal(text: str) -> Any:
    """JSON, or what models write that have seen Python's instead."""
    value = _json(text)
    if value is not _NO_VALUE:
        return value
    try:
        return PythonReader(text).read_value()
    except ValueError:
        return _NO_VALUE


def _json(text: str) -> Any:
    try:
        return json.loads(text, strict=False, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        return _NO_VALUE


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} does not exist in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is beyond all numbers")
    return number


_CONVERSIONS = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
}
