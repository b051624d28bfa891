# SPDX-License-Identifier: Apache-2.0
"""The engine's results as Anthropic's messages: a body, or the events from message_start to message_stop. Pure.

Both come from the same blocks, written as the answer is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mii_zmq.gateway.answers import AnswerReader, Call
from mii_zmq.gateway.http_errors import anthropic_error
from mii_zmq.gateway.item_writer import Event, ItemWriter
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.tool_formats import ToolFormat

if TYPE_CHECKING:
    from mii_zmq.client import Completion, Generation
    from mii_zmq.errors import MiiError
    from mii_zmq.gateway.anthropic_schemas import MessagesRequest
    from mii_zmq.protocol import FinalBody

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class BlockWriter(ItemWriter):
    """Content blocks and their events."""

    text_kind, reasoning_kind = "text", "thinking"

    def _opened(self, kind: str) -> list[Event]:
        return [self._start(_block(kind, ""))]

    def _delta(self, kind: str, text: str) -> Event:
        return self._some({"type": f"{kind}_delta", kind: text})

    def _closed(self, kind: str, text: str, is_cut: bool) -> tuple[dict[str, Any], list[Event]]:
        signature = [self._some({"type": "signature_delta", "signature": ""})] if kind == "thinking" else []
        return _block(kind, text), [*signature, self._stop()]

    def _called(self, call: Call) -> tuple[dict[str, Any], list[Event]]:
        block = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        arguments = {"type": "input_json_delta", "partial_json": call.arguments}
        events = [self._start(block), self._some(arguments), self._stop()]
        return {**block, "input": json.loads(call.arguments)}, events

    def _start(self, block: dict[str, Any]) -> Event:
        return {"type": "content_block_start", "index": len(self.items), "content_block": block}

    def _some(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.items), "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": len(self.items)}


def _block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


class MessagesAnswer:
    """The answer to one request, which has one generation."""

    def __init__(self, asked: MessagesRequest, generations: Sequence[Generation], tool_format: ToolFormat) -> None:
        self._asked = asked
        request_id = generations[0].request_id
        self._id = f"msg_{request_id.hex()}"
        self._reader = AnswerReader(asked.tools, tool_format, request_id)
        self._writer = BlockWriter(self._reader, asked.include_reasoning)

    def body(self, results: Sequence[Completion]) -> bytes:
        """The answer to a request that was not streamed."""
        result = results[0]
        self._writer.push(result.text)
        self._writer.finish(is_cut=result.finish_reason == "length")
        return encode(self._message(self._writer.items, self._stop(result), _usage(result)))

    def first(self, index: int, prompt_length: int) -> bytes:
        # How much of it came from the cache is known at the end, as message_delta says it.
        usage = {"input_tokens": prompt_length, "output_tokens": 0}
        return _events([{"type": "message_start", "message": self._message([], _stop_as(None), usage)}])

    def count(self, index: int, num_tokens: int) -> None:
        """Usage is told at the end."""

    def delta(self, index: int, text: bytes, logprobs: bytes = b"") -> bytes:
        return _events(self._writer.push(msgspec.json.decode(text)))

    def last(self, index: int, final: FinalBody) -> bytes:
        events = self._writer.finish(is_cut=final.finish_reason == "length")
        events.append({"type": "message_delta", "delta": self._stop(final), "usage": _usage(final)})
        return _events(events)

    def end(self, finals: Sequence[FinalBody]) -> bytes:
        return _events([{"type": "message_stop"}])

    def error(self, error: MiiError) -> bytes:
        return _events([anthropic_error(self._asked.rename(error))])

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
