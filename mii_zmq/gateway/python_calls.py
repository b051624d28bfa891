# SPDX-License-Identifier: Apache-2.0
"""Reads calls that models write as Python: keyword arguments of literal values, nothing else, nothing executed.

Not `ast.parse`: on text from outside it can overflow the C stack, and it prints warnings. JSON's true, false and null
count as well, as models that saw their tools as JSON write them. Linear in the length of the text. Pure.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NoReturn

MAX_DEPTH = 64
_SPACES = re.compile(r"\s*")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_WORD = re.compile(r"[^\W\d]\w*")
_NUMBER = re.compile(r"([+-]?)(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][+-]?[0-9]+)?(?![\w.])")
_STRING = re.compile(r"""'([^'\\]*(?:\\.[^'\\]*)*)'|"([^"\\]*(?:\\.[^"\\]*)*)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(\r?\n|[\\'\"abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})")
_ESCAPED = {
    "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\n": "", "\r\n": "",
}  # fmt: skip
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class PythonReader:
    """One text, read from its beginning to its end; each method raises ValueError where there is anything else."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read_calls(self) -> list[tuple[str, dict[str, Any]]]:
        """`[f(x=1), g()]`: names and arguments."""
        calls = []
        self._take("[")
        while not self._taken("]"):
            name = self._match(_NAME).group()
            calls.append((name, self._arguments()))
            self._separate("]")
        self._end()
        return calls

    def read_arguments(self) -> dict[str, Any]:
        """`(x=1, y="a")`."""
        arguments = self._arguments()
        self._end()
        return arguments

    def read_value(self) -> Any:
        """A literal: string, number, True, False, None, list, tuple (as a list) or dict with strings as keys."""
        value = self._value(0)
        self._end()
        return value

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        self._take("(")
        while not self._taken(")"):
            name = self._match(_WORD).group()
            self._take("=")
            arguments[name] = self._value(0)
            self._separate(")")
        return arguments

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self._refuse()
        for opening, closing in ("[]", "()"):
            if self._taken(opening):
                items = []
                while not self._taken(closing):
                    items.append(self._value(depth + 1))
                    self._separate(closing)
                return items
        if self._taken("{"):
            return self._dict(depth)
        if self._text.startswith(("'", '"'), self._at):
            return self._string()
        word = _WORD.match(self._text, self._at)
        if word is None:
            return self._number()
        if word.group() not in _CONSTANTS:
            self._refuse()
        self._at = word.end()
        return _CONSTANTS[word.group()]

    def _dict(self, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        while not self._taken("}"):
            key = self._string()
            self._take(":")
            value[key] = self._value(depth + 1)
            self._separate("}")
        return value

    def _string(self) -> str:
        found = self._match(_STRING)
        return _ESCAPE.sub(_unescape, found[1] if found[1] is not None else found[2])

    def _number(self) -> int | float:
        sign, whole, fraction, exponent = self._match(_NUMBER).groups()
        if whole is None and fraction in (None, "."):
            self._refuse()
        if fraction is None and exponent is None:
            return int(sign + whole)
        return float(f"{sign}{whole or 0}{fraction or ''}{exponent or ''}")

    def _separate(self, closing: str) -> None:
        """A comma, or the end of the list; a comma may stand before the end."""
        self._skip()
        if not self._text.startswith(closing, self._at):
            self._take(",")

    def _take(self, char: str) -> None:
        if not self._taken(char):
            self._refuse()

    def _taken(self, char: str) -> bool:
        self._skip()
        if not self._text.startswith(char, self._at):
            return False
        self._at += len(char)
        self._skip()
        return True

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            self._refuse()
        self._at = found.end()
        return found

    def _skip(self) -> None:
        found = _SPACES.match(self._text, self._at)
        if found is not None:
            self._at = found.end()

    def _end(self) -> None:
        self._skip()
        if self._at < len(self._text):
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(f"no literal at character {self._at}")


def _unescape(found: re.Match[str]) -> str:
    escape = found[1]
    if escape in _ESCAPED:
        return _ESCAPED[escape]
    code = int(escape[1:], 16) if escape[0] in "xuU" else int(escape, 8)
    if code > sys.maxunicode:
        raise ValueError("no such character")
    return chr(code)
