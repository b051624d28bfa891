# SPDX-License-Identifier: Apache-2.0
"""The record of what a reader has: exact whatever senders come, go, repeat themselves and speak too late."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mii_zmq.resume import Delivered, Place


def packed(ids: list[int]) -> bytes:
    return b"".join(token_id.to_bytes(4, "little") for token_id in ids)


def test_rows_in_order_duplicates_and_a_hole() -> None:
    record = Delivered()
    assert record.take(0, packed([7, 8]), None) is Place.NEXT
    assert record.take(0, packed([7, 8]), None) is Place.PAST
    assert record.take(3, packed([9]), None) is Place.HOLE
    assert record.take(2, b"", None) is Place.NEXT
    assert (record.num_tokens, record.resume_frames()) == (2, (packed([7, 8]),))


def test_row_that_overlaps_is_dropped_whole() -> None:
    """Where its text would have to be cut is not known."""
    record = Delivered()
    record.take(0, packed([1, 2]), None)
    assert record.take(1, packed([2, 3]), None) is Place.PAST
    assert bytes(record.token_ids) == packed([1, 2])


def test_nothing_follows_the_finishing_row() -> None:
    record = Delivered()
    record.take(0, packed([1]), "stop")
    assert record.take(1, b"", "stop") is Place.PAST
    assert record.take(1, packed([2]), None) is Place.PAST
    assert record.finish_reason == "stop"


def test_ids_that_the_reader_had_before_come_first() -> None:
    record = Delivered((packed([1, 2]), b"newer frame"))
    assert record.resume_frames() == (packed([1, 2]), b"newer frame")
    assert record.take(0, packed([1]), None) is Place.PAST
    assert record.take(2, packed([3]), None) is Place.NEXT
    assert record.resume_frames() == (packed([1, 2, 3]), b"newer frame")
    assert (record.num_tokens, len(record.token_ids)) == (3, 4)


def spell(ids: list[int]) -> str:
    return "".join(chr(97 + token_id % 26) for token_id in ids)


def text_of(ids: list[int]) -> str:
    """What is certain after these ids: every third token's text waits for the next one."""
    held = len(ids) % 3 == 2
    return spell(ids[:-1] if held else ids)


Row = tuple[int, list[int], str, str | None]


@dataclass
class Sender:
    """One incarnation: cuts the rest of the stream into rows of its own sizes, from what it was given."""

    stream: list[int]
    at: int
    unread: list[Row] = field(default_factory=list)

    def step(self, size: int) -> None:
        end = min(self.at + size, len(self.stream))
        is_last = end == len(self.stream)
        text = (spell(self.stream) if is_last else text_of(self.stream[:end]))[len(text_of(self.stream[: self.at])) :]
        if end > self.at or is_last:
            self.unread.append((self.at, self.stream[self.at : end], text, "length" if is_last else None))
        self.at = end


class Story:
    """A reader, the sender it hears, and all those that it heard before."""

    def __init__(self, stream: list[int], had: int) -> None:
        self.stream = stream
        self.record = Delivered((packed(stream[:had]),) if had else ())
        self.text = text_of(stream[:had])
        self.num_ends = 0
        self.senders = [Sender(stream, had)]
        self.heard: list[Row] = []

    def hear(self, row: Row) -> None:
        offset, ids, text, reason = row
        place = self.record.take(offset, packed(ids), reason)
        if place is Place.NEXT:
            self.text += text
            self.num_ends += reason is not None
        elif place is Place.HOLE:
            self.resume()

    def resume(self) -> None:
        ids = list(memoryview(b"".join(self.record.resume_frames())).cast("i"))
        assert ids == self.stream[: len(ids)]
        self.senders.append(Sender(self.stream, len(ids)))

    def send(self, number: int) -> None:
        self.senders[-1].step(1 + number % 4)

    def hear_next(self, number: int) -> None:
        if self.senders[-1].unread:
            self.heard.append(self.senders[-1].unread.pop(0))
            self.hear(self.heard[-1])

    def hear_stale(self, number: int) -> None:
        old = self.senders[number % len(self.senders)]
        if old.unread:
            self.hear(old.unread.pop(0))

    def hear_again(self, number: int) -> None:
        if self.heard:
            self.hear(self.heard[number % len(self.heard)])

    def lose(self, number: int) -> None:
        del self.senders[-1].unread[:1]

    def die(self, number: int) -> None:
        self.resume()

    def end(self) -> None:
        while self.record.finish_reason is None:
            self.resume()
            sender = self.senders[-1]
            while sender.at < len(self.stream) or not sender.unread:
                sender.step(3)
            for row in sender.unread:
                self.hear(row)


ACTS = (
    *(Story.send, Story.hear_next) * 2,
    *(Story.hear_stale, Story.hear_again, Story.lose, Story.die),
)


@pytest.mark.slow
@given(
    stream=st.lists(st.integers(0, 200), min_size=1, max_size=40),
    had=st.integers(0, 40),
    acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 99)), max_size=80),
)
@settings(max_examples=300, deadline=None)
def test_reader_gets_every_token_and_its_text_once_whatever_the_senders_do(
    stream: list[int], had: int, acts: list[tuple[Any, int]]
) -> None:
    """Rows of dead senders arrive late, some arrive twice, some are lost."""
    story = Story(stream, min(had, len(stream) - 1))
    for act, number in acts:
        act(story, number)
    story.end()
    assert list(memoryview(b"".join(story.record.resume_frames())).cast("i")) == stream
    assert story.text == spell(stream)
    assert story.num_ends == 1
