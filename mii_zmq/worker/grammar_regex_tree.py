# SPDX-License-Identifier: Apache-2.0
"""Regular expressions -> trees, where ECMAScript and Python read them alike; the rest is refused by name. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mii_zmq.worker.grammar_charsets import (
    ESCAPED_SETS,
    Ranges,
    complement,
    union,
)

MAX_DEPTH = 100
MAX_COUNT_DIGITS = 9
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")
_OMITTED_MINIMUM = re.compile(r"\{,\d*\}")
_GROUP_NAME = re.compile(r"\?P?<[A-Za-z_]\w*>", re.ASCII)
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_MARKS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_UNKNOWN_GROUPS = {
    "=": "a lookahead", "!": "a lookahead", "<=": "a lookbehind", "<!": "a lookbehind", ">": "an atomic group",
    "#": "a comment", "P=": "a backreference", "(": "a condition",
}  # fmt: skip
_UNKNOWN_ESCAPES = {
    "b": "a word boundary", "B": "a word boundary", "k": "a backreference", "p": "a Unicode property",
    "P": "a Unicode property", "c": "a control character", "A": "an anchor; write ^", "Z": "an anchor; write $",
    "z": "an anchor; write $",
}  # fmt: skip


class UnusableRegexError(ValueError):
    """What of the expression cannot be enforced, and where: one sentence without its subject."""


@dataclass(frozen=True, slots=True)
class Anchor:
    mark: str
    at: int


@dataclass(frozen=True, slots=True)
class Repeat:
    what: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    branches: tuple[tuple[Node, ...], ...]


Node = Ranges | Anchor | Repeat | Choice


class RegexReader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def read(self) -> Choice:
        choice = self._choice()
        if self._at < len(self._text):
            raise self._refused("a closing parenthesis without an opening one", self._at)
        return choice

    def _choice(self) -> Choice:
        branches: list[tuple[Node, ...]] = []
        nodes: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                branches.append(tuple(nodes))
                nodes = []
                self._at += 1
            else:
                nodes.append(self._repeated(self._atom()))
        return Choice((*branches, tuple(nodes)))

    def _atom(self) -> Node:
        start, character = self._at, self._text[self._at]
        self._at += 1
        match character:
            case "(":
                return self._group(start)
            case "[":
                return self._set(start)
            case "\\":
                return self._escape(start, in_set=False)
            case ".":
                return ESCAPED_SETS["."]
            case "^" | "$":
                return Anchor(character, start)
            case "*" | "+" | "?":
                raise self._refused(f"{character} with nothing to repeat", start)
            case "{" if _COUNT.match(self._text, start):
                raise self._refused("{ with nothing to repeat", start)
        return ((ord(character), ord(character)),)

    def _group(self, start: int) -> Choice:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._refused(f"more than {MAX_DEPTH} groups within each other", start)
        if self._text.startswith("?", self._at):
            self._group_kind(start)
        choice = self._choice()
        if self._at >= len(self._text):
            raise self._refused("a parenthesis that is not closed", start)
        self._at += 1
        self._depth -= 1
        return choice

    def _group_kind(self, start: int) -> None:
        if self._text.startswith("?:", self._at):
            self._at += 2
            return
        if name := _GROUP_NAME.match(self._text, self._at):
            self._at = name.end()
            return
        for mark, meaning in _UNKNOWN_GROUPS.items():
            if self._text.startswith(mark, self._at + 1):
                raise self._refused(f"{meaning}, (?{mark}", start)
        raise self._refused(f"flags or an unknown group, (?{self._text[self._at + 1 : self._at + 2]}", start)

    def _repeated(self, node: Node) -> Node:
        start = self._at
        mark = self._text[start : start + 1]
        if mark in _MARKS:
            least, most = _MARKS[mark]
            self._at += 1
        elif count := _COUNT.match(self._text, start):
            if max(len(count[1]), len(count[3])) > MAX_COUNT_DIGITS:
                raise self._refused("a repetition of more than 9 digits", start)
            least = int(count[1])
            most = int(count[3]) if count[3] else None if count[2] else least
            if most is not None and most < least:
                raise self._refused(f"{count[0]}, whose minimum is above its maximum", start)
            self._at = count.end()
        elif _OMITTED_MINIMUM.match(self._text, start):
            raise self._refused("{,n}, which is read in two ways; write {0,n}", start)
        else:
            return node
        if isinstance(node, Anchor):
            raise self._refused(f"{node.mark} that is repeated", start)
        if self._text.startswith("?", self._at):
            # Lazy or not, the same texts match as a whole.
            self._at += 1
        if self._text[self._at : self._at + 1] in ("*", "+", "?") or _COUNT.match(self._text, self._at):
            raise self._refused("a repetition of a repetition", self._at)
        return Repeat(node, least, most)

    def _set(self, start: int) -> Ranges:
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        if self._text.startswith("]", self._at):
            raise self._refused(r"a set that begins with ], which is read in two ways; write \]", start)
        found: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            low = self._set_item(start)
            if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                dash = self._at
                self._at += 1
                high = self._set_item(start)
                if _is_one(low) and _is_one(high):
                    if high[0][0] < low[0][0]:
                        raise self._refused("a range whose end comes before its start", dash)
                    low = ((low[0][0], high[0][0]),)
                else:
                    low = (*low, *high, (ord("-"), ord("-")))
            found += low
        self._at += 1
        return complement(found) if is_negated else union(found)

    def _set_item(self, start: int) -> Ranges:
        at = self._at
        if at >= len(self._text):
            raise self._refused("a set that is not closed", start)
        self._at += 1
        if self._text[at] == "\\":
            return self._escape(at, in_set=True)
        if self._text.startswith(("[:", "[=", "[."), at):
            raise self._refused("a named set, [: :]; write its characters", at)
        return ((ord(self._text[at]), ord(self._text[at])),)

    def _escape(self, start: int, *, in_set: bool) -> Ranges:
        if self._at >= len(self._text):
            raise self._refused("a backslash at its end", start)
        if number := _HEX.match(self._text, self._at):
            code = int(number[1] or number[2] or number[3], 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise self._refused(f"\\{number[0]}, which is no character", start)
            self._at = number.end()
            return ((code, code),)
        character = self._text[self._at]
        self._at += 1
        if character in "dDwWsS":
            return ESCAPED_SETS[character]
        if in_set and character == "b":
            code = 8
        elif character == "0" and not self._text[self._at : self._at + 1].isdigit():
            code = 0
        elif character in _CONTROLS:
            code = _CONTROLS[character]
        elif character.isascii() and character.isalnum():
            meaning = "a backreference" if character.isdigit() else _UNKNOWN_ESCAPES.get(character, "an unknown escape")
            raise self._refused(f"\\{character}, {meaning}", start)
        else:
            code = ord(character)
        return ((code, code),)

    def _refused(self, what: str, at: int) -> UnusableRegexError:
        return UnusableRegexError(f"holds {what} (position {at + 1}), which cannot be enforced")


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
