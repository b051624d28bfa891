# SPDX-License-Identifier: Apache-2.0
"""A chat model's answer as doors present it: reasoning, text and tool calls, read from the stream of its text.

`AnswerReader` is the one reader for streamed and unstreamed answers of every door that has conversations. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from mii_zmq.gateway.reasoning import ReasoningSplitter
from mii_zmq.gateway.tool_calls import ToolCallParser
from mii_zmq.gateway.tool_formats import ANY, ToolFormat
from mii_zmq.gateway.tool_values import ToolCall, Tools

SHORT_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request lets the model call."""

    tools: Tools
    """In the request's order."""
    is_parallel: bool = True
    """False: calls behind the first are dropped."""
    is_forced: bool = False
    """The answer is calls and nothing else."""
    is_named: bool = False
    """One tool is forced by its name; `tools` holds that one."""
    strict: frozenset[str] = frozenset()
    """Those whose arguments have to follow their schema."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call with its number in the answer and its id."""

    index: int
    call_id: str
    name: str
    arguments: str


Part = Reasoning | str | Call


class AnswerReader:
    """One answer. `request_id` makes the ids of its calls."""

    def __init__(self, tools: ToolUse | None, tool_format: ToolFormat = ANY, request_id: bytes = b"") -> None:
        self._splitter = ReasoningSplitter()
        self._format = tool_format
        self._is_parallel = tools is None or tools.is_parallel
        self._parser = None if tools is None else ToolCallParser(tool_format, tools.tools)
        self._request_id = request_id
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        """All that follows is text as it is."""
        return self._parser is None and self._splitter.is_done

    def push(self, text: str) -> list[Part]:
        """The parts that have become certain; adjacent ones may be of the same kind."""
        reasoning, content = self._splitter.push(text)
        pieces = [content] if self._parser is None else self._parser.push(content)
        return self._parts(reasoning, pieces)

    def finish(self) -> list[Part]:
        """What is left at the end of the answer."""
        reasoning, content = self._splitter.finish()
        pieces: list[str | ToolCall] = [content]
        if self._parser is not None:
            pieces = [*self._parser.push(content), *self._parser.finish()]
        return self._parts(reasoning, pieces)

    def finish_reason(self, reason: str) -> str:
        """In OpenAI's words."""
        return "tool_calls" if self.num_calls and reason == "stop" else reason

    def _parts(self, reasoning: str, pieces: Iterable[str | ToolCall]) -> list[Part]:
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        for piece in pieces:
            if isinstance(piece, str):
                if piece:
                    parts.append(piece)
            elif self._is_parallel or not self.num_calls:
                parts.append(Call(self.num_calls, self._call_id(), piece.name, piece.arguments))
                self.num_calls += 1
        return parts

    def _call_id(self) -> str:
        seed = self._request_id + self.num_calls.to_bytes(4, "little")
        digest = hashlib.blake2b(seed, digest_size=12).hexdigest()
        return digest[:SHORT_ID_CHARS] if self._format.has_short_ids else f"call_{digest}"


@dataclass(slots=True)
class Answer:
    """A whole answer, taken apart."""

    reasoning: str = ""
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str = "stop"

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, str):
                self.text += part
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            else:
                self.calls.append(part)


def read_answer(reader: AnswerReader, text: str, finish_reason: str) -> Answer:
    """Take a whole text apart."""
    answer = Answer()
    answer.add(reader.push(text))
    answer.add(reader.finish())
    answer.finish_reason = reader.finish_reason(finish_reason)
    return answer
