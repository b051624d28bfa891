# SPDX-License-Identifier: Apache-2.0
"""An answer as a list of items (texts, reasoning, calls) and the events that announce them, for doors that have these.

What is open and when it closes is the same for all of them; what an item and its events look like is the door's. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mii_zmq.gateway.answers import AnswerReader, Call, Part

Event = dict[str, Any]


class ItemWriter:
    """Turns the parts of an answer into items and events. Neighbouring texts of one kind are one item."""

    text_kind: str
    reasoning_kind: str

    def __init__(self, reader: AnswerReader, include_reasoning: bool) -> None:
        self._reader = reader
        self._include_reasoning = include_reasoning
        self._kind: str | None = None
        """Of the item that is open."""
        self._texts: list[str] = []
        self.items: list[dict[str, Any]] = []
        """Those that are closed."""

    def push(self, text: str) -> list[Event]:
        """Some more of the answer's text."""
        return self._write(self._reader.push(text))

    def finish(self, *, is_cut: bool) -> list[Event]:
        """What is left at the end; an answer without anything has one empty text."""
        events = [*self._write(self._reader.finish()), *self._close(is_cut)]
        return events if self.items else [*self._write([""]), *self._close(False)]

    def _write(self, parts: Iterable[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Call):
                events += self._close(False)
                item, more = self._called(part)
                self.items.append(item)
                events += more
            elif isinstance(part, str):
                events += self._continue(self.text_kind, part)
            elif self._include_reasoning:
                events += self._continue(self.reasoning_kind, part.text)
        return events

    def _continue(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._kind != kind:
            events = self._close(False)
            self._kind = kind
            events += self._opened(kind)
        self._texts.append(text)
        return [*events, self._delta(kind, text)]

    def _close(self, is_cut: bool) -> list[Event]:
        if self._kind is None:
            return []
        item, events = self._closed(self._kind, "".join(self._texts), is_cut)
        self.items.append(item)
        self._kind, self._texts = None, []
        return events

    # The door's part. An item's number is `len(self.items)`.

    def _opened(self, kind: str) -> list[Event]:
        raise NotImplementedError

    def _delta(self, kind: str, text: str) -> Event:
        raise NotImplementedError

    def _closed(self, kind: str, text: str, is_cut: bool) -> tuple[dict[str, Any], list[Event]]:
        """The item with its whole text, and the events of its end. `is_cut`: the answer's length ended it."""
        raise NotImplementedError

    def _called(self, call: Call) -> tuple[dict[str, Any], list[Event]]:
        """A call's item and all its events."""
        raise NotImplementedError
