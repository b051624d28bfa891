# SPDX-License-Identifier: Apache-2.0
"""What structural tags are made of: formats as xgrammar takes them, JSON objects with a `type`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Format = dict[str, Any]
Schemas = Mapping[str, Any]


MAX_SPACES = 12
"""Between two marks of JSON: a line's end and an indentation, not pages of nothing."""
_APPLICATORS = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords that say of a schema, somehow, what values it takes."""


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def schema_format(schema: Any, style: str = "json") -> Format:
    """JSON, or the `style` of pairs of tags."""
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_SPACES}
    return form if style == "json" else {**form, "style": style}


def arguments(schema: Mapping[str, Any] | None, style: str = "json") -> Format:
    """Arguments are an object, also where the schema does not say so."""
    if schema is None:
        return schema_format({"type": "object", "properties": {}}, style)
    return schema_format(
        schema if any(name in schema for name in _APPLICATORS) else {"type": "object", **schema}, style
    )


def call_list(tags: Sequence[Format], separator: str, is_parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
