# SPDX-License-Identifier: Apache-2.0
"""Checks what a chat template is given: messages, tools, and a request's own variables.

Templates see plain strings, numbers, lists and dicts, in the shapes that published templates expect: content is one
string, a tool call's arguments are an object, tools are `{"type": "function", "function": {...}}`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from mii_zmq.config import MAX_MESSAGES
from mii_zmq.errors import InvalidRequest
from mii_zmq.sampling_params import check_text, unknown_field

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
MAX_TOOLS = 1024
MAX_VARIABLES = 32
MAX_VARIABLE_CHARS = 8192
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range"}
)
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Validate messages; content given as a list of text parts becomes one string, a part per line.

    Raises:
        InvalidRequest: `param` names the place, e.g. `messages[2].content`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise _refused("messages", f"must be a list of messages, got {_kind(messages)}")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise _refused("messages", f"holds {len(messages)} messages, allowed: 1 to {MAX_MESSAGES}")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools for the template; None where there are none. Raises InvalidRequest."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise _refused("tools", f"must be a list of functions, got {_kind(tools)}")
    if len(tools) > MAX_TOOLS:
        raise _refused("tools", f"holds {len(tools)} tools, allowed: at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _refused(f"tools[{index}]", "must be an object with type and function, which has a name")
    return tools


def check_variables(variables: Any, reserved: Collection[str]) -> dict[str, Any]:
    """A request's variables for the template: names of its own, plain values. Raises InvalidRequest."""
    where = "chat_template_kwargs"
    if not isinstance(variables, dict):
        raise _refused(where, f"must be an object, got {_kind(variables)}")
    if len(variables) > MAX_VARIABLES:
        raise _refused(where, f"holds {len(variables)} variables, allowed: at most {MAX_VARIABLES}")
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(str(name)) or name == "self" or name in RESERVED_VARIABLES or name in reserved:
            raise _refused(where, f"holds {str(name)[:64]!r}, which a request cannot set")
        if isinstance(value, str) and len(value) <= MAX_VARIABLE_CHARS:
            check_text(value, f"{where}.{name}")
        elif value is not None and not isinstance(value, (bool, int, float)):
            raise _refused(
                f"{where}.{name}", f"must be a boolean, number, or string of at most {MAX_VARIABLE_CHARS} characters"
            )
    return variables


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _refused(where, f"must be an object with role and content, got {_kind(message)}")
    present = {name: value for name, value in message.items() if value is not None}
    for name in present:
        if name not in MESSAGE_FIELDS:
            raise InvalidRequest(f"{where}: {unknown_field(str(name), MESSAGE_FIELDS)}", param=f"{where}.{name}")
    role = present.get("role")
    if role not in ROLES:
        shown = repr(role)[:60] if isinstance(role, str) else "missing" if role is None else _kind(role)
        raise _refused(f"{where}.role", f"is {shown}, allowed: {', '.join(ROLES)}")
    checked = {"role": role, "content": _check_content(present.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in present:
            if not isinstance(present[name], str):
                raise _refused(f"{where}.{name}", f"must be a string, got {_kind(present[name])}")
            checked[name] = check_text(present[name], f"{where}.{name}")
    if "tool_calls" in present:
        checked["tool_calls"] = _check_tool_calls(present["tool_calls"], f"{where}.tool_calls")
    return checked


def _check_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not calls:
        raise _refused(where, "must be a list of at least one call")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _refused(f"{where}[{index}]", "must be an object with function, which has name and arguments")
        if not isinstance(function.get("arguments"), dict):
            raise _refused(f"{where}[{index}].function.arguments", "must be an object")
    return calls


def _check_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return check_text(content, where)
    if content is None:
        raise _refused(where, "is missing")
    if not isinstance(content, (list, tuple)):
        raise _refused(where, f"must be a string or a list of text parts, got {_kind(content)}")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise _refused(place, f"must be an object with type and text, got {_kind(part)}")
        if part.get("type") != "text":
            raise _refused(f"{place}.type", f"is {str(part.get('type'))[:60]!r}; this model takes only text parts")
        if not isinstance(part.get("text"), str):
            raise _refused(f"{place}.text", f"must be a string, got {_kind(part.get('text'))}")
        texts.append(check_text(part["text"], f"{place}.text"))
    return "\n".join(texts)


def _refused(where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {reason}", param=where)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
