# SPDX-License-Identifier: Apache-2.0
"""The engine's results as Anthropic's messages: a body, or the events from message_start to message_stop. Pure.

Both come from the same blocks, written as the answer is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mii_zmq.gateway.answers import AnswerReader, Call, Part
from mii_zmq.gateway.http_errors import anthropic_error
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.tool_formats import ToolFormat

if TYPE_CHECKING:
    from mii_zmq.client import Completion, Generation
    from mii_zmq.errors import MiiError
    from mii_zmq.gateway.anthropic_schemas import MessagesRequest
    from mii_zmq.protocol import FinalBody

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
Event = dict[str, Any]


class BlockWriter:
    """Turns the parts of an answer into content blocks and the events that announce them."""

    def __init__(self, include_reasoning: bool) -> None:
        self._include_reasoning = include_reasoning
        self._kind: str | None = None
        """Of the block that is open: text or thinking."""
        self._texts: list[str] = []
        self.blocks: list[dict[str, Any]] = []
        """Those that are closed."""

    def write(self, parts: Iterable[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Call):
                events += [*self.close(), *self._tool_use(part)]
            elif isinstance(part, str):
                events += self._some("text", part)
            elif self._include_reasoning:
                events += self._some("thinking", part.text)
        return events

    def close(self) -> list[Event]:
        """End the block that is open."""
        if self._kind is None:
            return []
        text, events = "".join(self._texts), []
        block = {"type": self._kind, self._kind: text}
        if self._kind == "thinking":
            block["signature"] = ""
            events.append(self._delta({"type": "signature_delta", "signature": ""}))
        events.append({"type": "content_block_stop", "index": len(self.blocks)})
        self.blocks.append(block)
        self._kind, self._texts = None, []
        return events

    def _some(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._kind != kind:
            events = self.close()
            self._kind = kind
            empty = {"type": kind, kind: ""}
            if kind == "thinking":
                empty["signature"] = ""
            events.append(self._start(empty))
        self._texts.append(text)
        events.append(self._delta({"type": f"{kind}_delta", kind: text}))
        return events

    def _tool_use(self, call: Call) -> list[Event]:
        block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        events = [
            self._start(block),
            self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
            {"type": "content_block_stop", "index": len(self.blocks)},
        ]
        self.blocks.append({**block, "input": json.loads(call.arguments)})
        return events

    def _start(self, block: dict[str, Any]) -> Event:
        return {"type": "content_block_start", "index": len(self.blocks), "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}


class MessagesAnswer:
    """The answer to one request, which has one generation."""

    def __init__(self, asked: MessagesRequest, generations: Sequence[Generation], tool_format: ToolFormat) -> None:
        self._asked = asked
        request_id = generations[0].request_id
        self._id = f"msg_{request_id.hex()}"
        self._reader = AnswerReader(asked.tools, tool_format, request_id)
        self._writer = BlockWriter(asked.include_reasoning)

    def body(self, results: Sequence[Completion]) -> bytes:
        """The answer to a request that was not streamed."""
        result = results[0]
        self._writer.write(self._reader.push(result.text))
        self._finish()
        return encode(self._message(self._writer.blocks, self._stop(result), _usage(result)))

    def first(self, index: int) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end, as message_delta says it
        return _events([{"type": "message_start", "message": self._message([], _stop_as(None), usage)}])

    def delta(self, index: int, text: bytes, logprobs: bytes = b"") -> bytes:
        return _events(self._writer.write(self._reader.push(msgspec.json.decode(text))))

    def last(self, index: int, final: FinalBody) -> bytes:
        events = self._finish()
        events.append({"type": "message_delta", "delta": self._stop(final), "usage": _usage(final)})
        return _events(events)

    def end(self, finals: Sequence[FinalBody]) -> bytes:
        return _events([{"type": "message_stop"}])

    def error(self, error: MiiError) -> bytes:
        return _events([anthropic_error(self._asked.rename(error))])

    def _finish(self) -> list[Event]:
        """The events of what is left; an answer without anything has one empty text."""
        parts = self._reader.finish()
        events = [*self._writer.write(parts), *self._writer.close()]
        if not self._writer.blocks:
            events += [*self._writer.write([""]), *self._writer.close()]
        return events

    def _message(self, blocks: list[dict[str, Any]], stop: dict[str, Any], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._asked.model,
            "content": blocks,
            **stop,
            "usage": usage,
        }

    def _stop(self, result: Completion | FinalBody) -> dict[str, Any]:
        reason = self._reader.finish_reason(result.finish_reason)
        if reason == "stop" and result.matched_stop is not None:
            return _stop_as("stop_sequence", result.matched_stop)
        return _stop_as(_STOP_REASONS.get(reason, "end_turn"))


def _stop_as(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(result: Completion | FinalBody) -> dict[str, int]:
    """Prompt tokens out of the cache are counted apart."""
    return {
        "input_tokens": result.prompt_length - result.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": result.num_cached_tokens,
        "output_tokens": result.generated_length,
    }


def _events(events: Iterable[Event]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)) for event in events)
