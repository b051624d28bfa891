# SPDX-License-Identifier: Apache-2.0
"""The engine's results as OpenAI's Responses: a body, or the events from response.created to response.completed. Pure.

Both come from the same items, written as the answer is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mii_zmq.gateway.answers import AnswerReader, Call, Part
from mii_zmq.gateway.http_errors import openai_error
from mii_zmq.gateway.item_writer import Event, ItemWriter
from mii_zmq.gateway.logprob_bodies import ChatWriter
from mii_zmq.gateway.message_logprobs import MessageRecords
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.tool_formats import ToolFormat
from mii_zmq.logprobs import Record, decode_records

if TYPE_CHECKING:
    from mii_zmq.client import Completion, Generation
    from mii_zmq.errors import MiiError
    from mii_zmq.gateway.responses_schemas import ResponsesRequest
    from mii_zmq.protocol import FinalBody

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs"}


class ResponseItemWriter(ItemWriter):
    """Output items and their events."""

    text_kind, reasoning_kind = "message", "reasoning"

    def __init__(self, response_id: str, reader: AnswerReader, include_reasoning: bool) -> None:
        super().__init__(reader, include_reasoning)
        self._response_id = response_id
        self._logprobs: list[dict[str, Any]] = []
        """Of the tokens of the message that is open."""
        self._waiting: list[dict[str, Any]] = []

    def wait_for_text(self, logprobs: Iterable[dict[str, Any]]) -> None:
        """Log-probabilities of the message's tokens: they go with its next text, or by themselves if it is open."""
        self._waiting += logprobs

    def _write(self, parts: Iterable[Part]) -> list[Event]:
        events = super()._write(parts)
        is_open = self._kind == "message"
        return [*events, *self._continue("message", "")] if self._waiting and is_open else events

    def _opened(self, kind: str) -> list[Event]:
        part = {"type": "response.content_part.added", **self._place(kind), "part": self._part(kind, "")}
        return [self._added(self._item(kind, "in_progress")), part]

    def _delta(self, kind: str, text: str) -> Event:
        delta: Event = {"type": f"response.{_PARTS[kind]}.delta", **self._place(kind), "delta": text}
        if kind == "message":
            delta["logprobs"], self._waiting = self._waiting, []
            self._logprobs += delta["logprobs"]
        return delta

    def _closed(self, kind: str, text: str, is_cut: bool) -> tuple[dict[str, Any], list[Event]]:
        part, place = self._part(kind, text), self._place(kind)
        item = {**self._item(kind, "incomplete" if is_cut else "completed"), "content": [part]}
        done: Event = {"type": f"response.{_PARTS[kind]}.done", **place, "text": text}
        if kind == "message":
            done["logprobs"] = part["logprobs"]
            self._logprobs = []
        return item, [done, {"type": "response.content_part.done", **place, "part": part}, self._done(item)]

    def _called(self, call: Call) -> tuple[dict[str, Any], list[Event]]:
        item = {
            "id": self._item_id("fc"),
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        place = {"item_id": item["id"], "output_index": len(self.items)}
        name = "response.function_call_arguments"
        return item, [
            self._added({**item, "arguments": "", "status": "in_progress"}),
            {"type": f"{name}.delta", **place, "delta": call.arguments},
            {"type": f"{name}.done", **place, "name": call.name, "arguments": call.arguments},
            self._done(item),
        ]

    def _added(self, item: dict[str, Any]) -> Event:
        return {"type": "response.output_item.added", "output_index": len(self.items), "item": item}

    def _done(self, item: dict[str, Any]) -> Event:
        return {"type": "response.output_item.done", "output_index": len(self.items), "item": item}

    def _item(self, kind: str, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(_PREFIXES[kind]), "type": kind, "status": status, "content": []}
        return {**item, "role": "assistant"} if kind == "message" else {**item, "summary": []}

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
        return {**part, "annotations": [], "logprobs": list(self._logprobs)} if kind == "message" else part

    def _place(self, kind: str) -> dict[str, Any]:
        return {"item_id": self._item_id(_PREFIXES[kind]), "output_index": len(self.items), "content_index": 0}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._response_id}_{len(self.items)}"


class ResponsesAnswer:
    """The answer to one request, which has one generation."""

    def __init__(self, asked: ResponsesRequest, generations: Sequence[Generation], tool_format: ToolFormat) -> None:
        self._asked = asked
        request_id = generations[0].request_id
        self._id = request_id.hex()
        self._created = int(time.time())
        reader = AnswerReader(asked.tools, tool_format, request_id)
        self._writer = ResponseItemWriter(self._id, reader, asked.include_reasoning)
        self._records = MessageRecords()
        self._num_events = 0

    def body(self, results: Sequence[Completion]) -> bytes:
        """The answer to a request that was not streamed."""
        self._push(results[0].text, results[0].logprobs)
        self._finish(results[0])
        return encode(self._response(results[0]))

    def first(self, index: int, prompt_length: int) -> bytes:
        response = self._response(None)
        kinds = ("response.created", "response.in_progress")
        return self._events([{"type": kind, "response": response} for kind in kinds])

    def count(self, index: int, num_tokens: int) -> None:
        """Usage is told at the end."""

    def delta(self, index: int, text: bytes, logprobs: bytes = b"") -> bytes:
        return self._events(self._push(msgspec.json.decode(text), logprobs))

    def last(self, index: int, final: FinalBody) -> bytes:
        return self._events(self._finish(final))

    def end(self, finals: Sequence[FinalBody]) -> bytes:
        response = self._response(finals[0])
        return self._events([{"type": f"response.{response['status']}", "response": response}])

    def error(self, error: MiiError) -> bytes:
        described = openai_error(self._asked.rename(error))["error"]
        code = "rate_limit_exceeded" if described["type"] == "rate_limit_error" else "server_error"
        response = self._response(None)
        response |= {"status": "failed", "error": {"code": code, "message": described["message"]}}
        return self._events([{"type": "response.failed", "response": response}])

    def _push(self, text: str, logprobs: bytes) -> list[Event]:
        records = self._records.push(text, decode_records(logprobs)) if self._asked.logprobs.num_top is not None else ()
        self._writer.wait_for_text(self._entries(records))
        return self._writer.push(text)

    def _entries(self, records: Sequence[Record]) -> list[dict[str, Any]]:
        return ChatWriter(self._asked.logprobs).entries(records)

    def _finish(self, result: Completion | FinalBody) -> list[Event]:
        self._writer.wait_for_text(self._entries(self._records.finish()))
        return self._writer.finish(is_cut=result.finish_reason == "length")

    def _response(self, result: Completion | FinalBody | None) -> dict[str, Any]:
        """`result`: None while the answer is in progress."""
        is_cut = result is not None and result.finish_reason == "length"
        status = "in_progress" if result is None else "incomplete" if is_cut else "completed"
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "metadata": {},
            "model": self._asked.model,
            "output": list(self._writer.items),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if result is None else _usage(result),
            "user": None,
            **self._asked.echoed,
        }

    def _events(self, events: Iterable[Event]) -> bytes:
        parts = []
        for event in events:
            numbered = {**event, "sequence_number": self._num_events}
            parts.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(numbered)))
            self._num_events += 1
        return b"".join(parts)


def _usage(result: Completion | FinalBody) -> dict[str, Any]:
    return {
        "input_tokens": result.prompt_length,
        "input_tokens_details": {"cached_tokens": result.num_cached_tokens},
        "output_tokens": result.generated_length,
        "output_tokens_details": {"reasoning_tokens": 0},  # not counted apart from the others
        "total_tokens": result.prompt_length + result.generated_length,
    }
