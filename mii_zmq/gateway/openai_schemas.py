# SPDX-License-Identifier: Apache-2.0
"""OpenAI's requests translated into the engine's words, and the engine's results into OpenAI's bodies and events.

Pure: no sockets, no handlers. OpenAI's own defaults hold here (temperature 1, top_p 1, 16 tokens for completions),
not MII's. Errors carry the names of OpenAI's fields.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mii_zmq.client import fan_out
from mii_zmq.errors import InvalidRequest, MiiError, RequestError, UnknownDeployment
from mii_zmq.gateway.generations import check_count
from mii_zmq.gateway.http_errors import openai_error
from mii_zmq.gateway.openai_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    ChatMessage,
    ParsedFields,
    Rule,
    StreamOptions,
    TextPart,
    apply_rules,
)
from mii_zmq.gateway.request_body import Fields
from mii_zmq.gateway.sse import encode
from mii_zmq.protocol import GenerateBody
from mii_zmq.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mii_zmq.client import Completion
    from mii_zmq.protocol import FinalBody

OWNER = "mii_zmq"
FINGERPRINT = "mii_zmq"
DEFAULT_COMPLETION_TOKENS = 16
MAX_TOKEN_ID = 2**31 - 1
MAX_PRIORITY = 2**31 - 1
ROLES = ("system", "developer", "user", "assistant")
_NAMES = {"min_new_tokens": "min_tokens", "return_full_text": "echo", "prompt_token_ids": "prompt"}


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """Either door's request, ready to be sent."""

    model: str
    prompts: list[GenerateBody]
    """Without params."""
    params: SamplingParams
    stream: bool
    include_usage: bool
    priority: int
    ignored: list[str]
    names: dict[str, str]
    """The engine's name of a field, and the one that this request used."""

    def bodies(self) -> list[GenerateBody]:
        """All choices of the first prompt, then of the second ..."""
        choices = fan_out(self.params)
        return [
            GenerateBody(
                prompt=prompt.prompt,
                prompt_token_ids=prompt.prompt_token_ids,
                messages=prompt.messages,
                params=choice,
                add_special_tokens=prompt.add_special_tokens,
                add_generation_prompt=prompt.add_generation_prompt,
            )
            for prompt in self.prompts
            for choice in choices
        ]

    def rename(self, error: MiiError) -> MiiError:
        """The same error in the names of this door."""
        if isinstance(error, UnknownDeployment):
            return UnknownDeployment(error.message, param="model")
        return _renamed(error, self.names)

    @property
    def headers(self) -> dict[str, str]:
        return {"x-ignored-fields": ", ".join(self.ignored)} if self.ignored else {}


def parse_chat(fields: Fields) -> OpenAIRequest:
    """Raises InvalidRequest; `param` names the field."""
    parsed = apply_rules(fields, CHAT_FIELDS)
    values = parsed.values
    if "messages" not in values:
        raise InvalidRequest("messages is missing; send a list of messages", param="messages")
    if not values["messages"]:
        raise InvalidRequest("messages is an empty list; send at least one message", param="messages")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(values["messages"])]
    limit = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    body = GenerateBody(messages=messages, add_generation_prompt=values.get("add_generation_prompt", True))
    return _request(parsed, CHAT_FIELDS, [body], limit, None)


def parse_completion(fields: Fields) -> OpenAIRequest:
    """Raises InvalidRequest; `param` names the field."""
    parsed = apply_rules(fields, COMPLETION_FIELDS)
    if "prompt" not in parsed.values:
        raise InvalidRequest("prompt is missing; send a string, token ids, or a list of either", param="prompt")
    add_special_tokens = parsed.values.get("add_special_tokens", True)
    prompts = [
        GenerateBody(prompt=prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, str)
        else GenerateBody(prompt_token_ids=prompt)
        for prompt in _prompts(parsed.values["prompt"])
    ]
    return _request(parsed, COMPLETION_FIELDS, prompts, "max_tokens", DEFAULT_COMPLETION_TOKENS)


def _request(
    parsed: ParsedFields, rules: dict[str, Rule], prompts: list[GenerateBody], limit: str, default_tokens: int | None
) -> OpenAIRequest:
    values = parsed.values
    if "model" not in values:
        raise InvalidRequest("model is missing; /v1/models lists what is served", param="model")
    stream = values.get("stream", False)
    options: StreamOptions = values.get("stream_options", StreamOptions())
    if "stream_options" in values and not stream:
        raise InvalidRequest("stream_options is only for requests with stream true", param="stream_options")
    if options.continuous_usage_stats:
        where = "stream_options.continuous_usage_stats"
        raise InvalidRequest(f"{where} is not supported: the usage is known at the end", param=where)
    priority = values.get("priority", 0)
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"priority is {priority}, allowed: +/-{MAX_PRIORITY}", param="priority")
    params = {"temperature": 1.0, "top_p": 1.0, "skip_special_tokens": True, **parsed.params(rules)}
    params["max_new_tokens"] = values.get(limit, default_tokens)
    if values.get("top_k", 0) not in (0, -1):
        params["top_k"] = values["top_k"]
    if "seed" in values:
        params["seed"] = _seed(values["seed"])
    names = {**_NAMES, "max_new_tokens": limit}
    try:
        checked = SamplingParams.from_mapping(params)
    except InvalidRequest as error:
        raise _renamed(error, names) from None
    check_count(len(prompts), checked.n, "prompt")
    return OpenAIRequest(
        values["model"], prompts, checked, stream, bool(options.include_usage), priority, parsed.ignored, names
    )


def _renamed(error: MiiError, names: dict[str, str]) -> MiiError:
    if not isinstance(error, RequestError) or error.param is None:
        return error
    message, param = error.message, error.param
    for ours, theirs in names.items():
        message, param = message.replace(ours, theirs), param.replace(ours, theirs)
    return type(error)(message, param=param, retry_after_ms=error.retry_after_ms, emitted_tokens=error.emitted_tokens)


def _seed(seed: int) -> int:
    """OpenAI's seeds are signed; the negative ones are mapped onto ours."""
    if not -(2**63) <= seed < 2**63:
        raise InvalidRequest(f"seed is {str(seed)[:40]}, allowed: -2^63 to 2^63 - 1", param="seed")
    return seed % 2**63


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """One string, strings, token ids, or lists of token ids."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        prompt = [prompt]
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not prompts:
        raise InvalidRequest("prompt is an empty list; send at least one prompt", param="prompt")
    kind = type(prompts[0])
    for index, entry in enumerate(prompts):
        if type(entry) is not kind:
            raise InvalidRequest(f"prompt mixes kinds at index {index}; send strings or lists of ids", param="prompt")
        if not entry:
            raise InvalidRequest(f"prompt is empty at index {index}; send some text or token ids", param="prompt")
        if isinstance(entry, list):
            _check_token_ids(entry)
    return prompts


def _check_token_ids(token_ids: list[Any]) -> None:
    for token_id in token_ids:
        if not isinstance(token_id, int) or not 0 <= token_id <= MAX_TOKEN_ID:
            shown = str(token_id)[:40] if isinstance(token_id, int) else repr(token_id)[:40]
            raise InvalidRequest(f"prompt holds {shown}, allowed: token ids from 0", param="prompt")


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role in ("tool", "function") or message.tool_calls or message.function_call is not None:
        raise InvalidRequest(f"{where} belongs to a tool call; tool calls are not available", param=where)
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{where}.role is {message.role[:40]!r}, allowed: {', '.join(ROLES)}", param=f"{where}.role"
        )
    if message.audio is not None:
        raise InvalidRequest(f"{where}.audio: this server handles text only", param=f"{where}.audio")
    content = message.content
    if content is None and message.role != "assistant":
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    if isinstance(content, list):
        content = "\n".join(_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(part: TextPart, where: str) -> str:
    if part.type != "text":
        raise InvalidRequest(
            f"{where}.type is {part.type[:40]!r}; this server handles text only", param=f"{where}.type"
        )
    if part.text is None:
        raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
    return part.text


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


@dataclass(slots=True)
class Envelope:
    """What all bodies and events of one response share."""

    request: OpenAIRequest
    response_id: str
    is_chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, results: Sequence[Completion]) -> bytes:
        """The answer to a request that was not streamed."""
        return encode(
            {
                "id": self.response_id,
                "object": "chat.completion" if self.is_chat else "text_completion",
                "created": self.created,
                "model": self.request.model,
                "choices": [self._choice(index, result) for index, result in enumerate(results)],
                "usage": usage(results, self.request.params.n),
                "system_fingerprint": FINGERPRINT,
            }
        )

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **more,
        }

    def _choice(self, index: int, result: Completion) -> dict[str, Any]:
        if not self.is_chat:
            return {
                "index": index,
                "text": result.text,
                "logprobs": None,
                "finish_reason": result.finish_reason,
            }
        message = {"role": "assistant", "content": result.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": result.finish_reason}


class OpenAIEvents:
    """Chunks of a streamed chat or completion. What does not change from chunk to chunk is encoded once."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._more = {"usage": None} if envelope.request.include_usage else {}
        head = encode(envelope.chunk([])).removesuffix(b"[]}")
        opening = b'"delta":{"content":' if envelope.is_chat else b'"text":'
        closing = b'},"logprobs":null' if envelope.is_chat else b',"logprobs":null'
        tail = b',"usage":null}' if envelope.request.include_usage else b"}"
        self._before_index = b'data: %b[{"index":' % head
        self._before_text = b"," + opening
        self._after_text = closing + b',"finish_reason":null}]' + tail + b"\n\n"

    def first(self, index: int) -> bytes:
        if not self._envelope.is_chat:
            return b""
        return self._event(index, None, {"role": "assistant", "content": ""})

    def delta(self, index: int, text: bytes) -> bytes:
        return b"%b%d%b%b%b" % (self._before_index, index, self._before_text, text, self._after_text)

    def last(self, index: int, final: FinalBody) -> bytes:
        return self._event(index, final.finish_reason, {})

    def end(self, finals: Sequence[FinalBody]) -> bytes:
        if not self._envelope.request.include_usage:
            return b""
        chunk = self._envelope.chunk([], usage=usage(finals, self._envelope.request.params.n))
        return b"data: %b\n\n" % encode(chunk)

    def error(self, error: MiiError) -> bytes:
        return b"data: %b\n\n" % encode(openai_error(self._envelope.request.rename(error)))

    def _event(self, index: int, finish_reason: str | None, delta: dict[str, str]) -> bytes:
        content: dict[str, Any] = {"delta": delta} if self._envelope.is_chat else {"text": ""}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
        return b"data: %b\n\n" % encode(self._envelope.chunk([choice], **self._more))
