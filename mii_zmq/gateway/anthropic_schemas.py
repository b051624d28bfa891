# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages translated into the engine's words. Pure; errors carry the names of Anthropic's fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mii_zmq.config import MAX_MESSAGES
from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.anthropic_fields import MESSAGES_FIELDS, Block, Message, MessagesTool, Thinking
from mii_zmq.gateway.core_request import CoreRequest, chat_body, check_plain, checked_params, shared_params
from mii_zmq.gateway.field_rules import apply_rules
from mii_zmq.gateway.openai_messages import call_for_template, join_texts, text_of
from mii_zmq.gateway.output_forms import messages_demand
from mii_zmq.gateway.request_body import Fields
from mii_zmq.gateway.tool_choice import MessagesToolChoice, messages_choice
from mii_zmq.gateway.tool_definitions import Tool, Tools, check_type, choose_tools

_NAMES = {"max_new_tokens": "max_tokens", "stop": "stop_sequences"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest(CoreRequest):
    include_reasoning: bool = True


def parse_messages(fields: Fields) -> MessagesRequest:
    """Raises InvalidRequest; `param` names the field."""
    parsed = apply_rules(fields, MESSAGES_FIELDS)
    values = parsed.values
    for name, what in (("model", "/v1/models lists what is served"), ("max_tokens", "say how long an answer may be")):
        if name not in values:
            raise InvalidRequest(f"{name} is missing; {what}", param=name)
    messages = _messages(values)
    tools = _tools(values)
    thinking: Thinking | None = values.get("thinking")
    variables = {} if thinking is None else {"enable_thinking": _is_thinking(thinking)}
    if thinking is not None and thinking.budget_tokens is not None:
        parsed.ignored.append("thinking.budget_tokens")
    # A conversation that ends with the assistant's words is one that the model goes on with.
    is_continued = messages[-1]["role"] == "assistant"
    body = chat_body(
        messages, tools.for_template, variables, is_continued=is_continued, add_generation_prompt=not is_continued
    )
    params = {"temperature": 1.0, "top_p": 1.0, **parsed.params(MESSAGES_FIELDS), **shared_params(values)}
    params |= {"max_new_tokens": values["max_tokens"], "skip_special_tokens": tools.use is None}
    names = dict(_NAMES)
    if (demand := messages_demand(values)) is not None:
        params["structured_output"], names["structured_output"] = demand.grammar, demand.field
    return MessagesRequest(
        model=values["model"],
        prompts=[body],
        params=checked_params(params, names),
        stream=values.get("stream", False),
        ignored=parsed.ignored,
        names=names,
        tools=tools.use,
        include_reasoning=thinking is None or (_is_thinking(thinking) and thinking.display != "omitted"),
    )


def parse_counting(fields: Fields) -> MessagesRequest:
    """A request whose prompt is counted only: it says nothing of the answer's length. Raises as `parse_messages`."""
    for name in ("max_tokens", "stream"):
        if name in fields:
            raise InvalidRequest(f"{name} has no meaning here: nothing is generated; leave it out", param=name)
    return parse_messages({**fields, "max_tokens": msgspec.Raw(b"1")})


def _is_thinking(thinking: Thinking) -> bool:
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        text = f"thinking.type is {thinking.type[:40]!r}, allowed: enabled, adaptive, disabled"
        raise InvalidRequest(text, param="thinking.type")
    return thinking.type != "disabled"


def _tools(values: dict[str, Any]) -> Tools:
    tools: Sequence[MessagesTool] = values.get("tools", ())
    found = []
    for index, tool in enumerate(tools):
        check_type(tool.type or "custom", "custom", f"tools[{index}]")
        found.append(Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict)))
    choice: MessagesToolChoice | None = values.get("tool_choice")
    is_parallel = choice is None or not choice.disable_parallel_tool_use
    return choose_tools(found, messages_choice(choice), is_parallel=is_parallel)


def _messages(values: dict[str, Any]) -> list[dict[str, Any]]:
    messages: Sequence[Message] = values.get("messages", ())
    if not messages:
        raise InvalidRequest("messages is missing or empty; send at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages holds {len(messages)} messages; the limit is {MAX_MESSAGES}", param="messages")
    found: list[dict[str, Any]] = []
    system = values.get("system")
    if system:
        found.append({"role": "system", "content": join_texts(system, "system")})
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role == "user":
            found += _user_messages(message.content, where, names)
        elif message.role == "assistant":
            found.append(_assistant_message(message.content, where, names))
        elif message.role == "system":
            found.append({"role": "system", "content": join_texts(message.content, f"{where}.content")})
        else:
            text = f"{where}.role is {message.role[:40]!r}, allowed: user, assistant, system"
            raise InvalidRequest(text, param=f"{where}.role")
    return found


def _user_messages(content: str | list[Block], where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """Results of tools are messages of their own for a template. `names`: of the calls so far, by id."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    found: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise InvalidRequest(f"{place}.tool_use_id is missing", param=f"{place}.tool_use_id")
            result = {"role": "tool", "content": join_texts(block.content or "", f"{place}.content")}
            result["tool_call_id"] = block.tool_use_id
            if block.tool_use_id in names:
                result["name"] = names[block.tool_use_id]
            found.append(result)
        elif found and found[-1]["role"] == "user":
            found[-1]["content"] += "\n" + text_of(block, place)
        else:
            found.append({"role": "user", "content": text_of(block, place)})
    if not found:
        raise InvalidRequest(f"{where}.content is an empty list; send some text", param=f"{where}.content")
    return found


def _assistant_message(content: str | list[Block], where: str, names: dict[str, str]) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if block.id is None or block.name is None:
                raise InvalidRequest(f"{place} must have id, name and input", param=place)
            names[block.id] = block.name
            arguments = check_plain(block.input or {}, f"{place}.input")
            calls.append(call_for_template(block.id, block.name, arguments))
        elif block.type != "redacted_thinking":
            texts.append(text_of(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
