# SPDX-License-Identifier: Apache-2.0
"""Finds tool calls in a model's answer as it arrives: text in, text and complete calls out.

One engine for every format of `tool_formats`. What comes out depends on the text alone, not on how it was cut: a
streamed and an unstreamed answer are the same. A call is handed out when it is complete and valid; whatever turns out
to be none (bad JSON, an unknown tool, an end in the middle) is text like any other, and nothing here raises. Every
character is looked at a bounded number of times. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mii_zmq.gateway.tool_formats import Found, Opening, ToolFormat
from mii_zmq.gateway.tool_values import ToolCall, Tools, Value, skip_spaces

SEPARATORS = ";,"
"""One of them may stand between calls that follow each other without a marker."""

Piece = str | ToolCall


class ToolCallParser:
    """One answer. `tools`: the request's; calls of others are text."""

    def __init__(self, tool_format: ToolFormat, tools: Tools) -> None:
        self._tools = tools
        self._by_marker: dict[str, list[Opening]] = {}
        for opening in tool_format.openings:
            self._by_marker.setdefault(opening.marker, []).append(opening)
        self._openings: Sequence[Opening] = self._by_marker.pop("", [])
        """Those of which the next head may be."""
        self._marker = re.compile("|".join(map(re.escape, self._by_marker)) or r"(?!)")
        self._prefixes = {marker[:size] for marker in self._by_marker for size in range(1, len(marker))}
        self._longest = max(map(len, self._by_marker), default=1) - 1
        self._held = ""
        """What has arrived; what is before `_start` has been given out."""
        self._start = 0
        self._solid = 0
        """Behind the last character before `_seen` that is no space."""
        self._seen = 0
        """No marker begins before this index."""
        self._head = 0
        """Where the head begins that is looked for."""
        self._opening: Opening | None = None
        """Of the latest call."""
        self._value: Value | None = None
        self._num_closings = 0
        """So many of the opening's closings are behind us."""
        self._step = self._read_head

    def push(self, text: str) -> list[Piece]:
        """The pieces that have become certain; adjacent texts may be several pieces."""
        # CPython appends in place if nothing else refers to the string: a long call does not cost its square.
        held, self._held = self._held, ""
        held += text
        self._held = held
        return self._run(is_end=False)

    def finish(self) -> list[Piece]:
        """What is left at the end of the answer."""
        return self._run(is_end=True)

    def _run(self, *, is_end: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._step(pieces, is_end):
            pass
        if self._value is None and self._start:
            self._held = self._held[self._start :]
            self._solid, self._seen, self._head = (
                index - self._start for index in (self._solid, self._seen, self._head)
            )
            self._start = 0
        return pieces

    # Each step reads on in the held text and chooses the next one. True: go on, False: more text is needed.

    def _read_text(self, pieces: list[Piece], is_end: bool) -> bool:
        found = self._marker.search(self._held, self._seen)
        end = len(self._held) if found is None else found.start()
        certain = end if found is not None or is_end else self._marker_start()
        num_solid = len(self._held[self._seen : certain].rstrip())
        if num_solid:
            self._solid = self._seen + num_solid
        self._seen = certain
        # Spaces before a call are part of it: an answer that is only a call has no text.
        self._give(pieces, end if found is None and is_end else self._solid)
        if found is None:
            return False
        self._openings, self._head = self._by_marker[found.group()], found.end()
        self._step = self._read_head
        return True

    def _read_head(self, pieces: list[Piece], is_end: bool) -> bool:
        """Behind a marker, or at the beginning of the answer."""
        for opening in self._openings:
            found = opening.find_value(self._held, self._head, self._tools, is_end)
            if isinstance(found, Found):
                self._begin_value(opening, found)
                return True
            if found:
                return False
        self._be_text(pieces, self._head)
        return True

    def _begin_value(self, opening: Opening, found: Found) -> None:
        self._opening, self._value = opening, opening.begin(found.start, found.name)
        self._step = self._read_value

    def _read_value(self, pieces: list[Piece], is_end: bool) -> bool:
        value = self._value
        assert value is not None
        end = value.find_end(self._held)
        if end is None:
            if is_end:
                self._give(pieces, len(self._held))
            return False
        self._value = None
        calls = None if value.is_broken else value.calls(self._held, self._tools)
        if calls is None:
            self._be_text(pieces, end)
        else:
            pieces += calls
            self._start, self._num_closings = end, 0
            self._step = self._read_closing
        return True

    def _read_closing(self, pieces: list[Piece], is_end: bool) -> bool:
        """Behind a call: what closes it, and the spaces around that, are dropped."""
        opening = self._opening
        assert opening is not None
        self._start = skip_spaces(self._held, self._start)
        for index, closing in enumerate(opening.closings):
            if index < self._num_closings:
                continue
            if self._held.startswith(closing, self._start):
                self._start += len(closing)
                self._num_closings = index + 1
                return True
            is_short = len(self._held) - self._start < len(closing)
            if is_short and not is_end and closing.startswith(self._held[self._start :]):
                return False
        self._step = self._read_next
        return True

    def _read_next(self, pieces: list[Piece], is_end: bool) -> bool:
        """Behind a closed call: another one without a marker, or text."""
        opening = self._opening
        assert opening is not None
        self._start = skip_spaces(self._held, self._start)
        if self._start == len(self._held) and not is_end:
            return False
        if opening.repeats and not self._num_closings:
            head = self._start
            if self._held.startswith(tuple(SEPARATORS), head):
                head = skip_spaces(self._held, head + 1)
            found = opening.find_value(self._held, head, self._tools, is_end)
            if isinstance(found, Found):
                self._begin_value(opening, found)
                return True
            if found:
                return False
        self._be_text(pieces, self._start)
        return True

    def _be_text(self, pieces: list[Piece], end: int) -> None:
        """Give out the held text up to `end`, and go on with text."""
        self._give(pieces, end)
        self._solid = self._seen = end
        self._step = self._read_text

    def _give(self, pieces: list[Piece], end: int) -> None:
        if end > self._start:
            pieces.append(self._held[self._start : end])
            self._start = end

    def _marker_start(self) -> int:
        """Where a beginning of a marker at the end of the held text begins; its end if there is none."""
        held, end = self._held, len(self._held)
        for size in range(min(self._longest, end - self._seen), 0, -1):
            if held[end - size :] in self._prefixes:
                return end - size
        return end
