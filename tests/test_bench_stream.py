# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii_zmq.bench_stream import EventSplitter, StreamReader, error_text
from tests.bench_server import DONE, delta, event, text, usage

COMPLETION = text("né 👩‍🚀") + text("\n\ndata: x") + text("", "length") + usage(7, 2) + DONE


def read(*pieces: bytes) -> StreamReader:
    """Each piece arrives at the second of its number, counted from 1."""
    reader = StreamReader()
    for at, piece in enumerate(pieces, 1):
        reader.feed(piece, float(at))
    reader.close(float(len(pieces) + 1))
    return reader


def test_a_completion() -> None:
    reader = read(text("a"), text("b"), text("", "length"), usage(7, 2), DONE)
    assert reader.failure is None
    assert reader.chunk_times == [1.0, 2.0]
    assert reader.last_choice_at == 3.0
    assert reader.usage is not None
    assert (reader.usage.prompt_tokens, reader.usage.completion_tokens) == (7, 2)


def test_the_role_that_opens_a_chat_is_no_first_token() -> None:
    reader = read(delta(role="assistant", content=""), delta(content="a"), delta(content=None), usage(7, 1), DONE)
    assert reader.failure is None
    assert reader.chunk_times == [2.0]
    assert reader.last_choice_at == 3.0


def test_reasoning_and_tool_calls_are_output() -> None:
    call = [{"index": 0, "function": {"arguments": "{"}}]
    reader = read(delta(reasoning_content="a"), delta(reasoning="b"), delta(tool_calls=call), DONE)
    assert reader.chunk_times == [1.0, 2.0, 3.0]


@given(st.lists(st.integers(0, len(COMPLETION)), max_size=12), st.booleans())
def test_it_does_not_matter_where_the_network_cuts(cuts: list[int], has_carriage_returns: bool) -> None:
    stream = COMPLETION.replace(b"\n", b"\r\n") if has_carriage_returns else COMPLETION
    borders = [0, *sorted(cuts), len(stream)]
    reader = read(*(stream[start:end] for start, end in pairwise(borders)))
    assert reader.failure is None
    assert len(reader.chunk_times) == 2
    assert reader.usage is not None


def test_events_of_all_allowed_forms() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b": ping\n\nevent: x\nid: 1\ndata:no space\n\ndata: two\ndata:  lines\n\n\n\ndata: rest") == [
        b"no space",
        b"two\n lines",
    ]
    assert splitter.finish() == [b"rest"]
    assert splitter.finish() == []


def test_the_end_may_lack_its_empty_line() -> None:
    assert read(text("a"), DONE.rstrip()).failure is None


@pytest.mark.parametrize(
    ("pieces", "kind", "message"),
    [
        ([text("a"), usage(1, 1)], "truncated stream", "DONE"),
        ([text("a"), b'data: {"choices": ['], "malformed event", "choices"),
        ([], "truncated stream", "DONE"),
        ([DONE], "no output", "no choice"),
        ([usage(1, 0), DONE], "no output", "no choice"),
        ([b"data: {nonsense\n\n", DONE], "malformed event", "nonsense"),
        ([b"data: [1]\n\n", DONE], "malformed event", "Expected `object`"),
        ([b"data: \xff\xfe\n\n", DONE], "malformed event", ""),
        ([text("a"), event(error={"message": "the group died", "code": 502})], "error event", "the group died"),
        ([event(error="plain"), DONE], "error event", "plain"),
    ],
)
def test_what_goes_wrong_has_a_kind(pieces: list[bytes], kind: str, message: str) -> None:
    failure = read(*pieces).failure
    assert failure is not None
    assert failure.kind == kind
    assert message in failure.message


def test_nothing_behind_the_end_counts() -> None:
    reader = read(text("a"), DONE, text("b"), b"data: {nonsense\n\n")
    assert reader.failure is None
    assert reader.chunk_times == [1.0]


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "plain"}', "plain"),
        (b'{"message": "mii"}', '{"message": "mii"}'),
        (b"<html>" + b"x" * 1000, "<html>" + "x" * 194),
        (b"\xff", "\ufffd"),
        (b"", ""),
    ],
)
def test_errors_are_shown_whatever_their_form(body: bytes, shown: str) -> None:
    assert error_text(body) == shown
