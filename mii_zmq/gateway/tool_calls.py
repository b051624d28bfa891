# SPDX-License-Identifier: Apache-2.0
"""Finds tool calls in a model's answer as it arrives: text in, text and complete calls out.

One engine for every format of `tool_formats`. What comes out depends on the text alone, not on how it was cut: a
streamed and an unstreamed answer are the same. A call is handed out when it is complete and valid; whatever turns out
to be none (bad JSON, an unknown tool, an end in the middle) is text like any other, and nothing here raises. Every
character is looked at a bounded number of times. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from mii_zmq.gateway.tool_formats import Opening, ToolCall, ToolFormat, read_calls

MAX_HEAD_CHARS = 256
"""Between a marker and the JSON behind it: spaces, or a name with its marks."""
_NAME = re.compile(r"\s*([\w.-]{1,128})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*")
_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_CLOSERS = {"{": "}", "[": "]"}

Piece = str | ToolCall


class JsonSpan:
    """Where the JSON object or list that begins at `start` of a growing text ends. Brackets and strings only."""

    __slots__ = ("_at", "_closers", "_in_string", "is_broken")

    def __init__(self, start: int) -> None:
        self._at = start
        self._closers: list[str] = []
        self._in_string = False
        self.is_broken = False
        """A bracket closes what was not open: no JSON, whatever follows."""

    def find_end(self, text: str) -> int | None:
        """The index behind it (behind the wrong bracket, if broken); None: not yet there."""
        while True:
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            char, self._at = found.group(), found.end()
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                if self._at == len(text):
                    self._at -= 1
                    return None
                self._at += 1
            elif char in _CLOSERS:
                self._closers.append(_CLOSERS[char])
            else:
                self.is_broken = self._closers.pop() != char
                if self.is_broken or not self._closers:
                    return self._at


class ToolCallParser:
    """One answer. `names`: the request's tools; calls of others are text."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        self._names = names
        self._openings = tool_format.markers
        self._bare = tool_format.bare
        self._marker = re.compile("|".join(map(re.escape, self._openings)))
        self._prefixes = {marker[:size] for marker in self._openings for size in range(1, len(marker))}
        self._longest = max(map(len, self._openings)) - 1
        self._held = ""
        """What has arrived and not been given out; while a call is read it begins with the call."""
        self._step = self._read_start if self._bare is not None else self._read_text
        self._opening: Opening | None = None
        self._head = 0
        """Of the held text: where the marker ends."""
        self._name: str | None = None
        self._value = 0
        self._span = JsonSpan(0)

    def push(self, text: str) -> list[Piece]:
        """The pieces that have become certain; adjacent texts may be several pieces."""
        self._held += text
        return self._run(is_end=False)

    def finish(self) -> list[Piece]:
        """What is left at the end of the answer."""
        return self._run(is_end=True)

    def _run(self, *, is_end: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._step(pieces, is_end):
            pass
        return pieces

    def _read_start(self, pieces: list[Piece], is_end: bool) -> bool:
        """Nothing but spaces has come; True: go on with the next step."""
        start = _skip_spaces(self._held, 0)
        if start == len(self._held) and not is_end:
            return False
        if self._held.startswith("{", start):
            self._begin_value(self._bare, start)
        else:
            self._step = self._read_text
        return True

    def _read_text(self, pieces: list[Piece], is_end: bool) -> bool:
        found = self._marker.search(self._held)
        if found is None:
            self._give(pieces, len(self._held) if is_end else self._certain_text())
            return False
        # Spaces before a call are part of it: an answer that is only a call has no text.
        start = len(self._held[: found.start()].rstrip())
        self._give(pieces, start)
        self._opening = self._openings[found.group()]
        self._head = found.end() - start
        self._step = self._read_head
        return True

    def _read_head(self, pieces: list[Piece], is_end: bool) -> bool:
        opening = self._opening
        assert opening is not None
        head = self._held[self._head : self._head + MAX_HEAD_CHARS]
        spaces = _skip_spaces(head, 0)
        if head.startswith(("{", "["), spaces):
            self._begin_value(opening, self._head + spaces)
            return True
        end = head.find("{") if opening.is_named else -1
        if end < 0 and len(head) < MAX_HEAD_CHARS and (opening.is_named or spaces == len(head)) and not is_end:
            return False
        named = _NAME.fullmatch(head, 0, end) if end >= 0 else None
        if named is None:
            self._give(pieces, self._head)
            self._step = self._read_text
        else:
            self._begin_value(opening, self._head + end, named.group(1))
        return True

    def _begin_value(self, opening: Opening | None, start: int, name: str | None = None) -> None:
        self._opening, self._value, self._name = opening, start, name
        self._span = JsonSpan(start)
        self._step = self._read_value

    def _read_value(self, pieces: list[Piece], is_end: bool) -> bool:
        end = self._span.find_end(self._held)
        if end is None:
            if is_end:
                self._give(pieces, len(self._held))
            return False
        text = self._held[self._value : end]
        calls = None if self._span.is_broken else read_calls(text, self._name, self._names)
        if calls is None:
            self._give(pieces, end)
            self._step = self._read_text
        else:
            pieces += calls
            self._held = self._held[end:]
            self._step = self._read_closing
        return True

    def _read_closing(self, pieces: list[Piece], is_end: bool) -> bool:
        """Behind a call: what closes it, and the spaces around that, are dropped."""
        opening = self._opening
        assert opening is not None
        self._held = self._held.lstrip()
        if self._held.startswith(opening.closing):
            self._held = self._held.removeprefix(opening.closing)
            self._step = self._read_next
        elif is_end or not opening.closing.startswith(self._held):
            self._step = self._read_next
        else:
            return False
        return True

    def _read_next(self, pieces: list[Piece], is_end: bool) -> bool:
        """Behind a closed call: another one without a marker, or text."""
        opening = self._opening
        assert opening is not None
        self._held = self._held.lstrip()
        start = 0
        if opening.separators and self._held[:1] in opening.separators:
            start = _skip_spaces(self._held, len(self._held[:1]))
        if start == len(self._held) and not is_end:
            return False
        if opening.separators and self._held.startswith("{", start):
            self._begin_value(opening, start)
        else:
            self._step = self._read_text
        return True

    def _give(self, pieces: list[Piece], end: int) -> None:
        """Give out the held text up to `end`."""
        if end:
            pieces.append(self._held[:end])
            self._held = self._held[end:]

    def _certain_text(self) -> int:
        """How much of the held text cannot become a call: not a marker's beginning, nor the spaces before one."""
        held = self._held
        end = len(held)
        for size in range(min(self._longest, end), 0, -1):
            if held[end - size :] in self._prefixes:
                end -= size
                break
        return len(held[:end].rstrip())


def _skip_spaces(text: str, start: int) -> int:
    """The index of the first character from `start` on that is no space."""
    return len(text) - len(text[start:].lstrip())
