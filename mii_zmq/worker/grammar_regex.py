# SPDX-License-Identifier: Apache-2.0
"""Regular expressions as requests write them -> the few constructs that the grammar compiler reads as everybody does.

The compiler passes over what it does not know (assertions, anchors in the middle), takes unknown escapes for letters,
and reads several classes in its own way. So expressions are read here: what ECMAScript and Python read alike is written
anew, in characters, sets of code points, groups, alternatives and repetitions; everything else is refused by name.
The result describes the whole text, as if it stood between ^ and $. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mii_zmq.worker.grammar_charsets import (
    ANY,
    ESCAPED_SETS,
    UNQUOTED,
    Ranges,
    complement,
    intersection,
    union,
    written,
)

MAX_DEPTH = 100
_AS_GRAMMAR = "(é){0}"
"""Nothing, but not in ASCII: the compiler then makes rules of a JSON string's pattern, as it does of other expressions.
The automaton that it would make takes (a{1,2}|a) for a+."""
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
class _Anchor:
    mark: str
    at: int


@dataclass(frozen=True, slots=True)
class _Repeat:
    what: _Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Choice:
    branches: tuple[tuple[_Node, ...], ...]


_Node = Ranges | _Anchor | _Repeat | _Choice


def normal(pattern: str, *, in_json: bool) -> str:
    """The expression in the compiler's terms.

    `in_json`: it describes what stands between the quotation marks of a JSON string, where the characters that JSON
    escapes are never written: sets are taken without them.

    Raises:
        UnusableRegexError: it is malformed, or holds what cannot be enforced.
    """
    node = _Reader(pattern).read()
    _check_anchors(node, is_first=True, is_last=True)
    return _AS_GRAMMAR + _write(node, UNQUOTED) if in_json else _write(node, ANY)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def read(self) -> _Choice:
        choice = self._choice()
        if self._at < len(self._text):
            raise self._refused("a closing parenthesis without an opening one", self._at)
        return choice

    def _choice(self) -> _Choice:
        branches: list[tuple[_Node, ...]] = []
        nodes: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                branches.append(tuple(nodes))
                nodes = []
                self._at += 1
            else:
                nodes.append(self._repeated(self._atom()))
        return _Choice((*branches, tuple(nodes)))

    def _atom(self) -> _Node:
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
                return _Anchor(character, start)
            case "*" | "+" | "?":
                raise self._refused(f"{character} with nothing to repeat", start)
            case "{" if _COUNT.match(self._text, start):
                raise self._refused("{ with nothing to repeat", start)
        return ((ord(character), ord(character)),)

    def _group(self, start: int) -> _Choice:
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

    def _repeated(self, node: _Node) -> _Node:
        start = self._at
        mark = self._text[start : start + 1]
        if mark in _MARKS:
            least, most = _MARKS[mark]
            self._at += 1
        elif count := _COUNT.match(self._text, start):
            least = int(count[1])
            most = int(count[3]) if count[3] else None if count[2] else least
            if most is not None and most < least:
                raise self._refused(f"{count[0]}, whose minimum is above its maximum", start)
            self._at = count.end()
        elif _OMITTED_MINIMUM.match(self._text, start):
            raise self._refused("{,n}, which is read in two ways; write {0,n}", start)
        else:
            return node
        if isinstance(node, _Anchor):
            raise self._refused(f"{node.mark} that is repeated", start)
        if self._text.startswith("?", self._at):
            # Lazy or not, the same texts match as a whole.
            self._at += 1
        if self._text[self._at : self._at + 1] in ("*", "+", "?") or _COUNT.match(self._text, self._at):
            raise self._refused("a repetition of a repetition", self._at)
        return _Repeat(node, least, most)

    def _set(self, start: int) -> Ranges:
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        if self._text.startswith("]", self._at):
            raise self._refused(r"a set that begins with ], which is read in two ways; write \]", start)
        found: Ranges = ()
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
            found = (*found, *low)
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


def _check_anchors(node: _Node, *, is_first: bool, is_last: bool) -> None:
    """Anchors say nothing new at the ends of the text; elsewhere no text could match, or not in every repetition."""
    if isinstance(node, _Repeat):
        is_single = (node.least, node.most) == (1, 1)
        _check_anchors(node.what, is_first=is_first and is_single, is_last=is_last and is_single)
    elif isinstance(node, _Choice):
        for branch in node.branches:
            marks = [part.mark if isinstance(part, _Anchor) else "" for part in branch]
            num_leading = next((i for i, mark in enumerate(marks) if mark != "^"), len(marks))
            num_trailing = next((i for i, mark in enumerate(reversed(marks)) if mark != "$"), len(marks))
            for index, part in enumerate(branch):
                first, last = index <= num_leading, index >= len(branch) - 1 - num_trailing
                _check_anchors(part, is_first=is_first and first, is_last=is_last and last)
    elif isinstance(node, _Anchor) and not (is_first if node.mark == "^" else is_last):
        raise UnusableRegexError(f"holds {node.mark} in its middle (position {node.at + 1}), which cannot be enforced")


def _write(node: _Node, alphabet: Ranges) -> str:
    if isinstance(node, _Anchor):
        return ""
    if isinstance(node, _Repeat):
        what = _write(node.what, alphabet)
        if not what or node.most == 0:
            return "()"
        if node.most is None and node.least < 2:
            return what + "*+"[node.least]
        return f"{what}{{{node.least},{'' if node.most is None else node.most}}}"
    if isinstance(node, _Choice):
        return f"({'|'.join(''.join(_write(part, alphabet) for part in branch) for branch in node.branches)})"
    ranges = intersection(node, alphabet)
    if not ranges:
        raise UnusableRegexError(
            f"asks for {written(node)}, a character that JSON escapes (a quotation mark, a backslash, a control), "
            "which cannot be enforced"
        )
    return written(ranges)
