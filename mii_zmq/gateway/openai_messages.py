# SPDX-License-Identifier: Apache-2.0
"""OpenAI's chat messages for chat templates: content is one string, a call's arguments are an object. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import msgspec

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.core_request import check_plain

ROLES = ("system", "developer", "user", "assistant", "tool")


class TextPart(msgspec.Struct):
    """One part of a message's content; other types than text carry other fields and are refused by their type."""

    type: str
    text: str | None = None


class ContentPart(Protocol):
    """A part of content at any door."""

    @property
    def type(self) -> str: ...
    @property
    def text(self) -> str | None: ...


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class MessageToolCall(msgspec.Struct):
    """A call of an earlier answer, as clients send it back."""

    id: str
    function: CalledFunction | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: Any = None
    tool_call_id: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Raises InvalidRequest; `param` names the place, e.g. `messages[2].content`."""
    names: dict[str, str] = {}
    found = []
    for index, message in enumerate(messages):
        plain = _message(message, f"messages[{index}]")
        for call in plain.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message.role == "tool" and message.name is None and message.tool_call_id in names:
            # Some templates want to know whose result it is.
            plain["name"] = names[message.tool_call_id]
        found.append(plain)
    return found


def call_for_template(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(text: str, where: str) -> dict[str, Any]:
    """The arguments of a call, which OpenAI's formats write as a string. Raises InvalidRequest."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be the text of a JSON object", param=where)
    return check_plain(value, where)


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    _check_kind(message, where)
    content = message.content
    if content is None and message.role != "assistant":
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    if isinstance(content, list):
        content = join_texts(content, f"{where}.content")
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _check_kind(message: ChatMessage, where: str) -> None:
    """What belongs to which role."""
    if message.role == "function" or message.function_call is not None:
        raise InvalidRequest(f"{where} is of the old function calls; send tool_calls and role 'tool'", param=where)
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{where}.role is {message.role[:40]!r}, allowed: {', '.join(ROLES)}", param=f"{where}.role"
        )
    if message.audio is not None:
        raise InvalidRequest(f"{where}.audio: this server handles text only", param=f"{where}.audio")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls belongs to the assistant's messages", param=f"{where}.tool_calls")
    if message.role == "tool" and message.tool_call_id is None:
        text = f"{where}.tool_call_id is missing; it says which call this is the result of"
        raise InvalidRequest(text, param=f"{where}.tool_call_id")


def _tool_call(call: MessageToolCall, where: str) -> dict[str, Any]:
    if call.type != "function" or call.function is None:
        raise InvalidRequest(f"{where} must be of type 'function' and have a function", param=where)
    arguments = read_arguments(call.function.arguments, f"{where}.function.arguments")
    return call_for_template(call.id, call.function.name, arguments)


def join_texts(content: str | Sequence[ContentPart], where: str, types: Collection[str] = ("text",)) -> str:
    """Content that is a text or a list of parts, a part per line. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    return "\n".join(text_of(part, f"{where}[{index}]", types) for index, part in enumerate(content))


def text_of(part: ContentPart, where: str, types: Collection[str] = ("text",)) -> str:
    """Raises InvalidRequest: a part of another type, or without text."""
    if part.type not in types:
        raise InvalidRequest(
            f"{where}.type is {part.type[:40]!r}; this server handles text only", param=f"{where}.type"
        )
    if part.text is None:
        raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
    return part.text
