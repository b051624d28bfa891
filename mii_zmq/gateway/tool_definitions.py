# SPDX-License-Identifier: Apache-2.0
"""A request's tools and what it says of their use, from any door's spelling to the chat template's. Pure.

Templates expect OpenAI's form: `{"type": "function", "function": {"name": …, "description": …, "parameters": …}}`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.answers import ToolUse
from mii_zmq.gateway.core_request import check_plain
from mii_zmq.gateway.tool_choice import Choice

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    is_strict: bool = False

    def for_template(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Tools:
    """What of a request's tools goes to the template, and what may be called in the answer."""

    for_template: list[dict[str, Any]] | None = None
    use: ToolUse | None = None


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """A function as OpenAI's chat completions describe it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    function: FunctionDefinition | None = None


class ResponsesTool(msgspec.Struct):
    """A function as OpenAI's Responses describe it; tools of other types have other fields."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def read_responses_tools(tools: Sequence[ResponsesTool]) -> list[Tool]:
    """Raises InvalidRequest; `param` names the place."""
    for index, tool in enumerate(tools):
        check_type(tool.type, "function", f"tools[{index}]")
    return [Tool(tool.name, tool.description, tool.parameters, bool(tool.strict)) for tool in tools]


def read_chat_tools(tools: Sequence[ChatTool]) -> list[Tool]:
    """Raises InvalidRequest; `param` names the place."""
    found = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        check_type(tool.type, "function", where)
        if tool.function is None:
            raise InvalidRequest(f"{where}.function is missing", param=f"{where}.function")
        function = tool.function
        found.append(Tool(function.name, function.description, function.parameters, bool(function.strict)))
    return found


def check_type(kind: str, allowed: str, where: str) -> None:
    if kind != allowed:
        text = f"{where}.type is {kind[:40]!r}; tools of this kind are not available, allowed: {allowed}"
        raise InvalidRequest(text, param=f"{where}.type")


def choose_tools(tools: Sequence[Tool], choice: Choice, *, is_parallel: bool) -> Tools:
    """What of the tools the choice leaves. The model is shown all of them where one is named, else those allowed.

    Raises:
        InvalidRequest: a tool's name, or a choice among tools that there are not.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools holds {len(tools)} tools; the limit is {MAX_TOOLS}", param="tools")
    names = set()
    for index, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name) or tool.name in names:
            why = "there is one of this name already" if tool.name in names else "allowed: letters, digits, _, . and -"
            raise InvalidRequest(f"tools[{index}] has the name {tool.name[:40]!r}; {why}", param=f"tools[{index}]")
        names.add(tool.name)
        check_plain(tool.parameters, f"tools[{index}]")
    is_forced = choice.mode in ("required", "named")
    if not tools and (is_forced or choice.names):
        raise InvalidRequest(
            "tool_choice names a tool or wants one called, but there are no tools", param="tool_choice"
        )
    for name in choice.names or ():
        if name not in names:
            raise InvalidRequest(
                f"{choice.where} is or holds {name[:40]!r}, which is none of tools", param=choice.where
            )
    callable_ = [tool for tool in tools if choice.names is None or tool.name in choice.names]
    if not callable_ and is_forced:
        raise InvalidRequest(f"{choice.where} allows no tool, though one has to be called", param=choice.where)
    if not callable_ or choice.mode == "none":
        return Tools()
    use = ToolUse(
        {tool.name: tool.parameters for tool in callable_},
        is_parallel=is_parallel and choice.mode != "named",
        is_forced=is_forced,
        is_named=choice.mode == "named",
        strict=frozenset(tool.name for tool in callable_ if tool.is_strict),
    )
    shown = tools if choice.mode == "named" else callable_
    return Tools([tool.for_template() for tool in shown], use)
