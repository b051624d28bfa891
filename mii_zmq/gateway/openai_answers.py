# SPDX-License-Identifier: Apache-2.0
"""The engine's results in OpenAI's bodies and chunks: completions, and chat with reasoning and tool calls. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from mii_zmq.gateway.answers import Answer, AnswerReader, Call, Part, Reasoning, read_answer
from mii_zmq.gateway.http_errors import openai_error
from mii_zmq.gateway.logprob_bodies import ChatWriter, CompletionWriter
from mii_zmq.gateway.sse import DONE, encode
from mii_zmq.gateway.tool_formats import ToolFormat

if TYPE_CHECKING:
    from mii_zmq.client import Completion, Generation
    from mii_zmq.errors import MiiError
    from mii_zmq.gateway.openai_schemas import OpenAIRequest
    from mii_zmq.protocol import FinalBody

FINGERPRINT = "mii_zmq"


def usage(results: Sequence[Completion | FinalBody], num_choices: int) -> dict[str, Any]:
    """A prompt counts once, however many choices it has."""
    firsts = results[::num_choices]
    prompt = sum(result.prompt_length for result in firsts)
    completion = sum(result.generated_length for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens for result in firsts)},
    }


class CompletionAnswer:
    """The answer to one request for completions, as a body or as chunks. What does not change from chunk to chunk is
    encoded once."""

    prefix = "cmpl"
    whole = chunk_name = "text_completion"
    opening, closing = b'"text":', b',"logprobs":'

    def __init__(self, asked: OpenAIRequest, generations: Sequence[Generation], tool_format: ToolFormat) -> None:
        self._asked = asked
        self._id = f"{self.prefix}-{generations[0].request_id.hex()}"
        self._created = int(time.time())
        self._counts: dict[int, list[int]] | None = {} if asked.has_running_usage else None
        """Prompt and output tokens of each choice so far, where chunks tell them."""
        self._more = {"usage": None} if asked.include_usage or asked.has_running_usage else {}
        head = encode(self._chunk([])).removesuffix(b"[]}")
        tail = b',"usage":null}' if self._more else b"}"
        self._before_index = b'data: %b[{"index":' % head
        self._before_text = b"," + self.opening
        self._after_logprobs = b',"finish_reason":null}]' + tail + b"\n\n"
        self._after_text = self.closing + b"null" + self._after_logprobs
        self._writers: dict[int, CompletionWriter | ChatWriter] = {}

    def body(self, results: Sequence[Completion]) -> bytes:
        """The answer to a request that was not streamed."""
        return encode(
            {
                "id": self._id,
                "object": self.whole,
                "created": self._created,
                "model": self._asked.model,
                "choices": [self._choice(index, result) for index, result in enumerate(results)],
                "usage": usage(results, self._asked.params.n),
                "system_fingerprint": FINGERPRINT,
                **self._of_prompt(results[0]),
            }
        )

    def first(self, index: int, prompt_length: int) -> bytes:
        # Of an earlier version of broker or worker come no lengths; such a stream tells its usage at the end alone.
        if self._counts is not None and prompt_length:
            self._counts[index] = [prompt_length, 0]
        return b""

    def count(self, index: int, num_tokens: int) -> None:
        if self._counts and index in self._counts:
            self._counts[index][1] += num_tokens

    def delta(self, index: int, text: bytes, logprobs: bytes = b"") -> bytes:
        after_text, after_logprobs = self._after_text, self._after_logprobs
        if self._counts:
            after_logprobs = b',"finish_reason":null}],' + encode(self._tail(index))[1:] + b"\n\n"
            after_text = self.closing + b"null" + after_logprobs
        if logprobs:
            after_text = self.closing + encode(self._writer(index).write(logprobs)) + after_logprobs
        return b"%b%d%b%b%b" % (self._before_index, index, self._before_text, text, after_text)

    def last(self, index: int, final: FinalBody) -> bytes:
        return self._event(index, {"text": ""}, final.finish_reason)

    def end(self, finals: Sequence[FinalBody]) -> bytes:
        if not self._asked.include_usage:
            return DONE
        return b"data: %b\n\n" % encode(self._chunk([], usage=usage(finals, self._asked.params.n))) + DONE

    def error(self, error: MiiError) -> bytes:
        return b"data: %b\n\n" % encode(openai_error(self._asked.rename(error)))

    def _choice(self, index: int, result: Completion) -> dict[str, Any]:
        view = self._asked.logprobs
        choice = {"text": result.text, "logprobs": view.choice(result.logprobs), **view.prompt(result.logprobs)}
        return {"index": index, **choice, "finish_reason": result.finish_reason}

    def _of_prompt(self, first: Completion) -> dict[str, Any]:
        """What the whole answer says of the prompt."""
        return {}

    def _writer(self, index: int) -> CompletionWriter | ChatWriter:
        """Of the log-probabilities of a choice's chunks."""
        if index not in self._writers:
            self._writers[index] = self._asked.logprobs.writer()
        return self._writers[index]

    def _event(self, index: int, content: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
        return b"data: %b\n\n" % encode(self._chunk([choice], **self._tail(index)))

    def _tail(self, index: int) -> dict[str, Any]:
        """What a chunk of this choice ends with."""
        if not self._counts or index not in self._counts:
            return self._more
        prompt, output = self._counts[index]
        return {"usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": self.chunk_name,
            "created": self._created,
            "model": self._asked.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **more,
        }


class ChatAnswer(CompletionAnswer):
    """The same for a chat: each choice is read for reasoning and tool calls."""

    prefix = "chatcmpl"
    whole, chunk_name = "chat.completion", "chat.completion.chunk"
    opening, closing = b'"delta":{"content":', b'},"logprobs":'

    def __init__(self, asked: OpenAIRequest, generations: Sequence[Generation], tool_format: ToolFormat) -> None:
        super().__init__(asked, generations, tool_format)
        self._readers = [AnswerReader(asked.tools, tool_format, generation.request_id) for generation in generations]

    def first(self, index: int, prompt_length: int) -> bytes:
        super().first(index, prompt_length)
        return self._event(index, {"delta": {"role": "assistant", "content": ""}})

    def delta(self, index: int, text: bytes, logprobs: bytes = b"") -> bytes:
        reader = self._readers[index]
        if reader.is_plain:
            return super().delta(index, text, logprobs)
        return self._parts(index, reader.push(msgspec.json.decode(text)), logprobs)

    def last(self, index: int, final: FinalBody) -> bytes:
        reader = self._readers[index]
        parts = self._parts(index, reader.finish())
        return parts + self._event(index, {"delta": {}}, self._reason(reader.finish_reason(final.finish_reason)))

    def _parts(self, index: int, parts: Sequence[Part], logprobs: bytes = b"") -> bytes:
        """`logprobs` go with the first text, or by themselves where there is none."""
        events = []
        for part in parts:
            if isinstance(part, str):
                events.append(super().delta(index, encode(part), logprobs))
                logprobs = b""
            elif isinstance(part, Call):
                events.append(self._event(index, {"delta": {"tool_calls": [{"index": part.index, **_call(part)}]}}))
            elif self._asked.include_reasoning:
                events.append(self._event(index, {"delta": _reasoning(part)}))
        if logprobs:
            events.append(super().delta(index, b'""', logprobs))
        return b"".join(events)

    def _choice(self, index: int, result: Completion) -> dict[str, Any]:
        answer = read_answer(self._readers[index], result.text, result.finish_reason)
        choice = {"message": self._message(answer), "logprobs": self._asked.logprobs.choice(result.logprobs)}
        return {"index": index, **choice, "finish_reason": self._reason(answer.finish_reason)}

    def _reason(self, reason: str) -> str:
        """OpenAI says "stop" of a call of the tool that was named, "tool_calls" of all others."""
        is_named = self._asked.tools is not None and self._asked.tools.is_named
        return "stop" if is_named and reason == "tool_calls" else reason

    def _of_prompt(self, first: Completion) -> dict[str, Any]:
        return self._asked.logprobs.prompt(first.logprobs)

    def _message(self, answer: Answer) -> dict[str, Any]:
        content = answer.text if answer.text or not (answer.calls or answer.reasoning) else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning and self._asked.include_reasoning:
            message |= _reasoning(Reasoning(answer.reasoning))
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        return message


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _reasoning(reasoning: Reasoning) -> dict[str, Any]:
    """Under both names that clients look for."""
    return {"reasoning_content": reasoning.text, "reasoning": reasoning.text}
