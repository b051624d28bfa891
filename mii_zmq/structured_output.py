# SPDX-License-Identifier: Apache-2.0
"""What a request may demand of the form of its output, as every door writes it down.

One grammar per request: its kind and its text. Doors translate `response_format`, vLLM's names and forced tool calls
into it; the worker compiles it (`worker/grammar_*`). Sizes are limited here, meaning is checked by the compiler.
"""

from __future__ import annotations

import json
import re
from typing import Literal, get_args

import msgspec

from mii_zmq.errors import InvalidRequest

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"]
GRAMMAR_KINDS: tuple[str, ...] = get_args(GrammarKind)
MAX_GRAMMAR_CHARS = 2**16
MAX_CHOICES = 1024
MAX_JSON_DEPTH = 64
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)


class StructuredOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form that the output's text has to have, from its first character to its end-of-sequence id."""

    kind: GrammarKind
    value: str = ""
    """Of json_schema and structural_tag: JSON text; of choice: a JSON list of strings; of regex and ebnf (GBNF): the
    expression itself; of json_object: nothing."""


def check_structured_output(grammar: StructuredOutput) -> None:
    """Raise InvalidRequest for what is too long, too deep, empty or no JSON where JSON is due."""
    value, kind = grammar.value, grammar.kind
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _invalid(
                f"its {kind} holds a lone surrogate at character {error.start}; send valid Unicode"
            ) from None
    if len(value) > MAX_GRAMMAR_CHARS:
        raise _invalid(f"its {kind} has {len(value)} characters, allowed: at most {MAX_GRAMMAR_CHARS}")
    if kind == "json_object":
        if value:
            raise _invalid("json_object takes no value; use json_schema for one")
        return
    if not value:
        raise _invalid(f"its {kind} is empty")
    if kind in ("regex", "ebnf"):
        return
    parsed = _parse(value, kind)
    if kind == "choice":
        choices = parsed if isinstance(parsed, list) else []
        if not 1 <= len(choices) <= MAX_CHOICES or not all(isinstance(choice, str) and choice for choice in choices):
            raise _invalid(f"choice has to be a list of 1 to {MAX_CHOICES} strings that are not empty")
    elif not isinstance(parsed, dict) and not (kind == "json_schema" and isinstance(parsed, bool)):
        raise _invalid(f"{kind} has to be a JSON object")


def _parse(value: str, kind: str) -> object:
    depth = deepest = 0
    for character in _STRING.sub("", value):
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    if deepest > MAX_JSON_DEPTH:
        raise _invalid(f"its {kind} is nested {deepest} deep, allowed: at most {MAX_JSON_DEPTH}")
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"its {kind} is no JSON: {error}") from None
    return parsed


def _invalid(what: str) -> InvalidRequest:
    return InvalidRequest(f"structured_output: {what}", param="structured_output")
