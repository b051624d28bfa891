# SPDX-License-Identifier: Apache-2.0
"""`tool_choice` of every door in one form. Pure.

OpenAI's "required" and Anthropic's "any" force a call of whichever tool, a named tool forces that one; `allowed_tools`
narrows what may be called, and says whether something must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from mii_zmq.errors import InvalidRequest

WORDS = ("auto", "none", "required")
Mode = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class Choice:
    mode: Mode = "auto"
    names: tuple[str, ...] | None = None
    """The tools that may be called, one where it is named; None: all."""
    where: str = "tool_choice"
    """The field that holds the names, for errors."""


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A tool by its name; chats have it in `function`, Responses beside the type."""

    type: str
    function: ChosenFunction | None = None
    name: str | None = None


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: str
    tools: list[ChosenTool]


class ChatToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Of chat completions, where it is no word."""

    type: str
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class ResponsesToolChoice(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Of Responses, where it is no word; an answer repeats it as it came."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ChosenTool] | None = None


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Of Anthropic's Messages."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


MESSAGES_MODES: dict[str, Mode] = {"auto": "auto", "none": "none", "any": "required", "tool": "named"}


def chat_choice(value: str | ChatToolChoice | None) -> Choice:
    """Raises InvalidRequest; `param` names the place."""
    if value is None or isinstance(value, str):
        return _word(value, "tool_choice")
    if value.type == "function" and value.function is not None:
        return Choice("named", (value.function.name,), "tool_choice.function.name")
    if value.type == "allowed_tools" and value.allowed_tools is not None:
        allowed, where = value.allowed_tools, "tool_choice.allowed_tools"
        return _allowed(allowed.mode, allowed.tools, where, f"{where}.mode")
    raise _bad_kind(value.type, ("function", "allowed_tools"))


def responses_choice(value: str | ResponsesToolChoice | None) -> Choice:
    """Raises InvalidRequest; `param` names the place."""
    if value is None or isinstance(value, str):
        return _word(value, "tool_choice")
    if value.type == "function" and value.name is not None:
        return Choice("named", (value.name,), "tool_choice.name")
    if value.type == "allowed_tools" and value.tools is not None:
        return _allowed(value.mode or "", value.tools, "tool_choice", "tool_choice.mode")
    raise _bad_kind(value.type, ("function", "allowed_tools"))


def messages_choice(value: MessagesToolChoice | None) -> Choice:
    """Raises InvalidRequest; `param` names the place."""
    if value is None:
        return Choice()
    if value.type not in MESSAGES_MODES:
        text = f"tool_choice.type is {value.type[:40]!r}, allowed: {', '.join(MESSAGES_MODES)}"
        raise InvalidRequest(text, param="tool_choice.type")
    if value.type != "tool":
        return Choice(MESSAGES_MODES[value.type])
    if value.name is None:
        raise InvalidRequest("tool_choice.name is missing; it says which tool", param="tool_choice.name")
    return Choice("named", (value.name,), "tool_choice.name")


def _word(value: str | None, where: str) -> Choice:
    match value:
        case None | "auto":
            return Choice()
        case "none":
            return Choice("none")
        case "required":
            return Choice("required")
    raise InvalidRequest(f"{where} is {value[:40]!r}, allowed: {', '.join(WORDS)} or a tool", param=where)


def _allowed(mode: str, tools: Sequence[ChosenTool], where: str, of_mode: str) -> Choice:
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{of_mode} is {mode[:40]!r}, allowed: auto, required", param=of_mode)
    names = []
    for index, tool in enumerate(tools):
        name = tool.name if tool.function is None else tool.function.name
        if tool.type != "function" or name is None:
            place = f"{where}.tools[{index}]"
            raise InvalidRequest(f"{place} must be of type 'function' and have a name", param=place)
        names.append(name)
    return Choice("auto" if mode == "auto" else "required", tuple(names), f"{where}.tools")


def _bad_kind(kind: str, allowed: Sequence[str]) -> InvalidRequest:
    text = f"tool_choice of the type {kind[:40]!r} is not available or not complete; allowed: {', '.join(allowed)}"
    return InvalidRequest(text, param="tool_choice")
