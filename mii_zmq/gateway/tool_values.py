# SPDX-License-Identifier: Apache-2.0
"""The text of a call behind its opening: where it ends as it grows, and which calls it is. JSON, Python, pairs of tags.

Every value reads each character a bounded number of times, whatever the text is cut into, and never raises: what is
malformed, or calls none of the request's tools, is no call. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from mii_zmq.gateway.python_calls import PythonReader
from mii_zmq.gateway.tool_arguments import from_text

Tools = Mapping[str, Mapping[str, Any] | None]
"""The request's tools: the JSON schema of each one's arguments by its name; None: it has none."""

MAX_KEY_CHARS = 256
_SPACES = re.compile(r"\s*")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call of one of the request's tools."""

    name: str
    arguments: str
    """A JSON object."""


class Value(Protocol):
    """One value in a text that grows at its end."""

    is_broken: bool
    """It is no call, whatever follows."""

    def find_end(self, text: str) -> int | None:
        """The index behind the value (behind what is wrong with it, if broken); None: not yet there."""

    def calls(self, text: str, tools: Tools) -> list[ToolCall] | None:
        """Once the end is found: the calls, None where there is anything else than calls of `tools`."""


class _Brackets:
    """A value that begins with a bracket and ends with the one that closes it; brackets in strings do not count."""

    outside: re.Pattern[str]
    """Finds brackets and quotes."""

    def __init__(self, start: int, name: str | None) -> None:
        self.start, self.name = start, name
        self.end = start
        self._closers: list[str] = []
        self._quote = ""
        self.is_broken = False

    def find_end(self, text: str) -> int | None:
        while True:
            found = (_IN_STRING[self._quote] if self._quote else self.outside).search(text, self.end)
            if found is None:
                self.end = len(text)
                return None
            char, self.end = found.group(), found.end()
            if char == "\\":
                if self.end == len(text):
                    self.end -= 1
                    return None
                self.end += 1
            elif char in _IN_STRING:
                self._quote = "" if self._quote else char
            elif char in _CLOSERS:
                self._closers.append(_CLOSERS[char])
            else:
                self.is_broken = self._closers.pop() != char
                if self.is_broken or not self._closers:
                    return self.end


_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


class JsonValue(_Brackets):
    """An object or a list of objects with name and arguments; where the name came before, the arguments alone."""

    outside = re.compile(r'["{}\[\]]')

    def calls(self, text: str, tools: Tools) -> list[ToolCall] | None:
        try:
            value = _parse_json(text[self.start : self.end])
            if self.name is not None:
                return [_call(self.name, value, tools)]
            objects = value if isinstance(value, list) else [value]
            return [_named_call(entry, tools) for entry in objects] or None
        except (ValueError, TypeError, RecursionError):
            return None


class PythonValue(_Brackets):
    """A list of calls with keyword arguments, `[f(x=1), g()]`; where the name came before, the arguments alone."""

    outside = re.compile(r"""["'{}()\[\]]""")

    def calls(self, text: str, tools: Tools) -> list[ToolCall] | None:
        try:
            reader = PythonReader(text[self.start : self.end])
            found = reader.read_calls() if self.name is None else [(self.name, reader.read_arguments())]
            return [_call(name, arguments, tools) for name, arguments in found] or None
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Tags:
    """How a format writes arguments as pairs of key and value between tags."""

    key_opening: str
    key_closing: str
    value_opening: str
    """Behind the key and spaces; empty: the value follows the key's closing."""
    value_closing: str
    end: str
    """Of the call."""
    start: str = ""
    """Before the first pair."""
    has_own_lines: bool = False
    """A line break behind the opening of a value and one before its closing do not belong to it."""


class TaggedValue:
    """Pairs of tags. What stands between the tags of a value is the value; types come from the tool's schema."""

    __slots__ = ("_at", "_key", "_pairs", "_searched", "_step", "is_broken", "name", "tags")

    def __init__(self, tags: Tags, start: int, name: str | None) -> None:
        self.tags, self.name = tags, name
        self._at = start + len(tags.start)
        self._key = ""
        self._pairs: list[tuple[str, int, int]] = []
        """Key, and where its value begins and ends."""
        self._searched = 0
        """No closing of the value begins before this index."""
        self._step: Callable[[str], bool | None] = self._find_key
        self.is_broken = False

    def find_end(self, text: str) -> int | None:
        while is_going_on := self._step(text):
            pass
        return None if is_going_on is None else self._at

    def calls(self, text: str, tools: Tools) -> list[ToolCall] | None:
        if self.name is None or self.name not in tools:
            return None
        schema, arguments = tools[self.name], {}
        for key, start, end in self._pairs:
            value = text[start:end]
            if self.tags.has_own_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = from_text(value, key, schema)
        try:
            return [_call(self.name, arguments, tools)]
        except (ValueError, RecursionError):
            return None

    # Each step moves on in the text and chooses the next one. True: go on; False: over; None: more text is needed.

    def _find_key(self, text: str) -> bool | None:
        self._at = skip_spaces(text, self._at)
        ends, opens = self._stands(self.tags.end, text), self._stands(self.tags.key_opening, text)
        if ends:
            self._at += len(self.tags.end)
            return False
        if opens:
            self._at += len(self.tags.key_opening)
            self._step = self._read_key
            return True
        return None if ends is None or opens is None else self._break()

    def _read_key(self, text: str) -> bool | None:
        closing = self.tags.key_closing
        stop = self._at + MAX_KEY_CHARS + len(closing)
        end = text.find(closing, self._at, stop)
        if end < 0:
            return None if len(text) < stop else self._break()
        self._key = text[self._at : end].strip()
        self._at = end + len(closing)
        self._step = self._find_value
        return True if self._key else self._break()

    def _find_value(self, text: str) -> bool | None:
        opening = self.tags.value_opening
        if opening:
            self._at = skip_spaces(text, self._at)
            opens = self._stands(opening, text)
            if not opens:
                return None if opens is None else self._break()
        self._at += len(opening)
        self._searched = self._at
        self._step = self._read_value
        return True

    def _read_value(self, text: str) -> bool | None:
        closing = self.tags.value_closing
        end = text.find(closing, self._searched)
        if end < 0:
            self._searched = max(self._at, len(text) - len(closing) + 1)
            return None
        self._pairs.append((self._key, self._at, end))
        self._at = end + len(closing)
        self._step = self._find_key
        return True

    def _break(self) -> bool:
        self.is_broken = True
        return False

    def _stands(self, tag: str, text: str) -> bool | None:
        """Whether `tag` is next; None: the text ends within it."""
        if text.startswith(tag, self._at):
            return True
        return None if len(text) - self._at < len(tag) and tag.startswith(text[self._at :]) else False


def skip_spaces(text: str, start: int) -> int:
    """The index of the first character from `start` on that is no space."""
    found = _SPACES.match(text, start)
    return found.end() if found else start


def _named_call(value: Any, tools: Tools) -> ToolCall:
    if not isinstance(value, dict):
        raise TypeError("a call is an object")
    return _call(value.get("name"), value.get("arguments", value.get("parameters")), tools)


def _call(name: Any, arguments: Any, tools: Tools) -> ToolCall:
    if not isinstance(name, str) or name not in tools:
        raise ValueError("no tool of this name")
    if isinstance(arguments, str):
        # Some models write the object as a string, as OpenAI's own format does.
        arguments = _parse_json(arguments)
    if not isinstance(arguments, dict):
        raise TypeError("arguments are an object")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()  # a lone surrogate cannot be sent on
    return ToolCall(name, written)


def _parse_json(text: str) -> Any:
    return json.loads(text, strict=False, parse_constant=_refuse_constant)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} does not exist in JSON")
