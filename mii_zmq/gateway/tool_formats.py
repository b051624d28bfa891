# SPDX-License-Identifier: Apache-2.0
"""How families of models write tool calls: a table of what opens a call, what may stand in it and what closes it.

    llama3    {"name": "f", "parameters": {...}} as the whole answer or behind <|python_tag|>, several with ';' between
    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>           (Hermes, Qwen2.5, Qwen3)
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...] or [TOOL_CALLS]f[ARGS]{...}
    any       all of these, for a deployment that does not say which

Pure. Reading a stream is `tool_calls`' business; here a complete piece of JSON becomes calls, or is no call.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True)
class Opening:
    """One way in which calls begin."""

    marker: str
    """Empty: a JSON object that begins the answer."""
    closing: str = ""
    """Text that may stand behind the call and belongs to it."""
    is_named: bool = False
    """The name may come first, and the JSON object is the arguments alone."""
    separators: str = ""
    """Characters behind which another call may follow without a marker."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    openings: tuple[Opening, ...]
    has_short_ids: bool = False
    """Its templates take only ids of nine letters and digits."""

    @property
    def markers(self) -> dict[str, Opening]:
        return {opening.marker: opening for opening in self.openings if opening.marker}

    @property
    def bare(self) -> Opening | None:
        """How an answer that begins with a JSON object is read; None: as text."""
        return next((opening for opening in self.openings if not opening.marker), None)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call of one of the request's tools."""

    name: str
    arguments: str
    """A JSON object."""


_LLAMA3 = (Opening("<|python_tag|>", separators=";,"), Opening("", separators=";,"))
_HERMES = (Opening("<tool_call>", closing="</tool_call>"),)
_MISTRAL = (Opening("[TOOL_CALLS]", is_named=True),)
ANY = ToolFormat("any", (*_LLAMA3, *_HERMES, *_MISTRAL), has_short_ids=True)
FORMATS = {
    "llama3": ToolFormat("llama3", _LLAMA3),
    "hermes": ToolFormat("hermes", _HERMES),
    "mistral": ToolFormat("mistral", _MISTRAL, has_short_ids=True),
    "any": ANY,
}


def read_calls(text: str, name: str | None, names: Collection[str]) -> list[ToolCall] | None:
    """The calls in a JSON object or list, None where it holds anything else than calls of the tools `names`.

    `name`: of the tool whose arguments the object is; None where each object brings name and arguments.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)
        if name is not None:
            return [_call(name, value, names)]
        objects = value if isinstance(value, list) else [value]
        return [_named_call(entry, names) for entry in objects] or None
    except (ValueError, TypeError, RecursionError):
        return None


def _named_call(value: Any, names: Collection[str]) -> ToolCall:
    if not isinstance(value, dict):
        raise TypeError("a call is an object")
    return _call(value.get("name"), value.get("arguments", value.get("parameters")), names)


def _call(name: Any, arguments: Any, names: Collection[str]) -> ToolCall:
    if not isinstance(name, str) or name not in names:
        raise ValueError("no tool of this name")
    if isinstance(arguments, str):
        # Some models write the object as a string, as OpenAI's own format does.
        arguments = json.loads(arguments, strict=False, parse_constant=_refuse_constant)
    if not isinstance(arguments, dict):
        raise TypeError("arguments are an object")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()  # a lone surrogate cannot be sent on
    return ToolCall(name, written)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} does not exist in JSON")
