# SPDX-License-Identifier: Apache-2.0
"""Schemas of strings and numbers -> what of them the grammar compiler enforces to the letter. Pure.

Functions take the schema and its path and return a schema of the compiler's with the keywords of that type alone; all
raise InvalidRequest, which names path and keyword, for what cannot be enforced.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from mii_zmq.errors import InvalidRequest
from mii_zmq.worker.grammar_formats import FORMATS, FREE_FORMATS
from mii_zmq.worker.grammar_regex import lengths, normal
from mii_zmq.worker.grammar_regex_tree import UnusableRegexError

MAX_COUNT = 2**31 - 1
MAX_INTEGER = 2**63 - 1
MAX_BOUND = 2**53
MAX_MULTIPLE = 1024
MAX_MULTIPLES_SPAN = 10_000
_STEP = Decimal("0.000001")
"""Numbers with bounds are written with six decimals at most."""


def refused(what: str) -> InvalidRequest:
    return InvalidRequest(f"structured_output: json_schema: {what}", param="structured_output")


def string(schema: dict[str, Any], path: str) -> dict[str, Any]:
    least, most = count(schema, "minLength", path), count(schema, "maxLength", path)
    form = schema.get("format")
    if "format" in schema and not isinstance(form, str):
        raise refused(f"{path}/format has to be a string")
    if form in FREE_FORMATS:
        form = None
    elif form is not None and form not in FORMATS:
        known = ", ".join(sorted((*FORMATS, *FREE_FORMATS)))
        raise refused(f"{path}/format is {form[:60]!r}, which is not known; known: {known}")
    if form is not None and "pattern" in schema:
        raise refused(f"{path or 'the schema'} has pattern and format, of which only one can be enforced; keep one")
    if form is None and "pattern" not in schema:
        return {"type": "string", **_span("Length", least, most, path)}
    keyword, pattern = ("pattern", schema["pattern"]) if form is None else ("format", FORMATS[form])
    found = text_pattern(pattern, f"{path}/{keyword}")
    shortest, longest = lengths(pattern)
    for name, is_met in (("minLength", shortest >= (least or 0)), ("maxLength", _is_within(longest, most))):
        if not is_met:
            raise refused(
                f"{path or 'the schema'} has {keyword} and {name}, of which only one can be enforced, unless all that "
                f"the {keyword} allows is of such a length; keep one"
            )
    return {"type": "string", "pattern": found}


def _is_within(longest: int | None, most: int | None) -> bool:
    return most is None or (longest is not None and longest <= most)


def text_pattern(pattern: Any, path: str) -> str:
    """A pattern in the compiler's terms; it describes the whole text."""
    if not isinstance(pattern, str):
        raise refused(f"{path} has to be a string")
    try:
        return normal(pattern, in_json=True)
    except UnusableRegexError as error:
        raise refused(f"{path} {error}") from None


def count(schema: dict[str, Any], keyword: str, path: str) -> int | None:
    """The value of a keyword that counts something; None: it is not there."""
    if keyword not in schema:
        return None
    value = schema[keyword]
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or value != value
        or value not in range(MAX_COUNT + 1)
    ):
        raise refused(f"{path}/{keyword} is {str(value)[:60]}, allowed: integers of 0 to {MAX_COUNT}")
    return int(value)


def _span(what: str, least: int | None, most: int | None, path: str) -> dict[str, int]:
    if least and most is not None and least > most:
        raise refused(f"{path}/min{what} is above its max{what}")
    return ({f"min{what}": least} if least else {}) | ({} if most is None else {f"max{what}": most})


def integer(schema: dict[str, Any], path: str) -> dict[str, Any]:
    lows = [math.ceil(value) for value in _bounds(schema, "minimum", path, MAX_INTEGER)]
    lows += [math.floor(value) + 1 for value in _bounds(schema, "exclusiveMinimum", path, MAX_INTEGER)]
    highs = [math.floor(value) for value in _bounds(schema, "maximum", path, MAX_INTEGER)]
    highs += [math.ceil(value) - 1 for value in _bounds(schema, "exclusiveMaximum", path, MAX_INTEGER)]
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise refused(f"{path or 'the schema'}: no integer lies within its minimum and maximum")
    found = {"minimum": low, "maximum": high, "multipleOf": _multiple(schema, low, high, path)}
    return {"type": "integer", **{name: value for name, value in found.items() if value is not None}}


def _multiple(schema: dict[str, Any], low: int | None, high: int | None, path: str) -> int | None:
    if "multipleOf" not in schema:
        return None
    step = _number(schema["multipleOf"], MAX_INTEGER, f"{path}/multipleOf")
    if step <= 0:
        raise refused(f"{path}/multipleOf is {step}, allowed: numbers above 0")
    if step not in range(1, MAX_MULTIPLE + 1):
        raise refused(f"{path}/multipleOf is {step}, which can be enforced for 1 to {MAX_MULTIPLE}; leave it out")
    if step == 1:
        return None
    if low is None and high is None:
        return int(step)
    if low is None or high is None or high - low >= MAX_MULTIPLES_SPAN:
        raise refused(
            f"{path}/multipleOf cannot be enforced beside these bounds; give none, or minimum and maximum that "
            f"are less than {MAX_MULTIPLES_SPAN} apart"
        )
    if high // step * step < low:
        raise refused(f"{path}/multipleOf is {step}, of which no multiple lies within minimum and maximum")
    return int(step)


def number(schema: dict[str, Any], path: str) -> dict[str, Any]:
    if "multipleOf" in schema:
        raise refused(f"{path}/multipleOf can be enforced for the type integer only; leave it out or change the type")
    lows = [_rounded(value, ROUND_CEILING) for value in _bounds(schema, "minimum", path, MAX_BOUND)]
    lows += [_rounded(value, ROUND_FLOOR) + _STEP for value in _bounds(schema, "exclusiveMinimum", path, MAX_BOUND)]
    highs = [_rounded(value, ROUND_FLOOR) for value in _bounds(schema, "maximum", path, MAX_BOUND)]
    highs += [_rounded(value, ROUND_CEILING) - _STEP for value in _bounds(schema, "exclusiveMaximum", path, MAX_BOUND)]
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise refused(f"{path or 'the schema'}: no number of six decimals lies within its minimum and maximum")
    found = {"minimum": low, "maximum": high}
    return {"type": "number", **{name: float(value) for name, value in found.items() if value is not None}}


def _rounded(value: float, rounding: str) -> Decimal:
    return Decimal(str(value)).quantize(_STEP, rounding)


def _bounds(schema: dict[str, Any], keyword: str, path: str, limit: int) -> list[int | float]:
    """One number, or none."""
    return [_number(schema[keyword], limit, f"{path}/{keyword}")] if keyword in schema else []


def _number(value: Any, limit: int, path: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refused(f"{path} has to be a number")
    if not abs(value) < limit:
        raise refused(f"{path} is {str(value)[:60]}, which is too large to be enforced; allowed: less than {limit}")
    return value
