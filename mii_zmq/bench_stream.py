# SPDX-License-Identifier: Apache-2.0
"""Understands the streamed answer of an OpenAI-compatible server, to time it. Knows bytes and times, but no socket.

A chunk counts as output when it holds text (or reasoning, or part of a tool call): the role that opens a chat, an empty
text beside a finish reason and the usage at the end do not. The request ends with its last chunk that has a choice.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mii_zmq.bench_metrics import Failure

MAX_SHOWN_CHARACTERS = 200
DONE = b"[DONE]"


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None

    def has_output(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


class EventSplitter:
    """Cuts a byte stream of server-sent events into their data, wherever the network has cut it."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The data of all events that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if not text:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
        return events

    def finish(self) -> list[bytes]:
        """The last event, if only its empty line is missing."""
        return self.feed(b"\n\n")


class StreamReader:
    """One streamed answer: `feed` what arrives with its time, `close` at the end, then look at the attributes."""

    def __init__(self) -> None:
        self.chunk_times: list[float] = []
        self.last_choice_at: float | None = None
        self.usage: Usage | None = None
        self.failure: Failure | None = None
        self._splitter = EventSplitter()
        self._is_done = False

    def feed(self, data: bytes, now: float) -> None:
        self._read(self._splitter.feed(data), now)

    def close(self, now: float) -> None:
        """The server has ended the response in good order; whether the stream in it was complete is judged here."""
        self._read(self._splitter.finish(), now)
        if self.failure is not None:
            return
        if not self._is_done:
            self.failure = Failure("truncated stream", "the response ended without data: [DONE]")
        elif self.last_choice_at is None:
            self.failure = Failure("no output", "the stream held no choice at all")

    def _read(self, events: list[bytes], now: float) -> None:
        for event in events:
            if self.failure is not None or self._is_done:
                return
            if event == DONE:
                self._is_done = True
                return
            self._read_event(event, now)

    def _read_event(self, event: bytes, now: float) -> None:
        try:
            chunk = decode_chunk(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            shown = event[:MAX_SHOWN_CHARACTERS].decode("utf-8", "replace")
            self.failure = Failure("malformed event", f"{error}: {shown}")
            return
        if chunk.error is not None:
            self.failure = Failure("error event", error_text(event))
            return
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.choices:
            self.last_choice_at = now
            if any(choice.has_output() for choice in chunk.choices):
                self.chunk_times.append(now)


def error_text(body: bytes) -> str:
    """The message in an error body or event of OpenAI's form, or the beginning of whatever it is."""
    try:
        error = msgspec.json.decode(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
        return str(message)[:MAX_SHOWN_CHARACTERS]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return body[:MAX_SHOWN_CHARACTERS].decode("utf-8", "replace")
