# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses translated into the engine's words: items become chat messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mii_zmq.config import MAX_MESSAGES
from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.core_request import (
    CoreRequest,
    chat_body,
    check_plain,
    check_priority,
    checked_params,
    shared_params,
)
from mii_zmq.gateway.field_rules import apply_rules
from mii_zmq.gateway.logprob_bodies import LogprobView
from mii_zmq.gateway.openai_messages import TextPart, call_for_template, join_texts, read_arguments
from mii_zmq.gateway.output_forms import TextConfig, TextFormat, responses_demand
from mii_zmq.gateway.request_body import Fields
from mii_zmq.gateway.responses_fields import RESPONSES_FIELDS, InputItem
from mii_zmq.gateway.tool_choice import responses_choice
from mii_zmq.gateway.tool_definitions import ResponsesTool, choose_tools, read_responses_tools
from mii_zmq.sampling_params import MAX_LOGPROBS

ROLES = ("system", "developer", "user", "assistant")
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""The second one changes nothing: reasoning is never encrypted."""
TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text")
_NAMES = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_output_tokens", "messages": "input"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(CoreRequest):
    include_reasoning: bool
    logprobs: LogprobView
    echoed: dict[str, Any]
    """Fields of the request that the response repeats."""


def parse_responses(fields: Fields) -> ResponsesRequest:
    """Raises InvalidRequest; `param` names the field."""
    parsed = apply_rules(fields, RESPONSES_FIELDS)
    values = parsed.values
    if "model" not in values:
        raise InvalidRequest("model is missing; /v1/models lists what is served", param="model")
    if not values.get("input"):
        raise InvalidRequest("input is missing or empty; send a string or a list of items", param="input")
    defined: Sequence[ResponsesTool] = values.get("tools", ())
    choice, is_parallel = responses_choice(values.get("tool_choice")), values.get("parallel_tool_calls", True)
    tools = choose_tools(read_responses_tools(defined), choice, is_parallel=is_parallel)
    variables = check_plain(values.get("chat_template_kwargs", {}), "chat_template_kwargs")
    body = chat_body(_messages(values["input"], values.get("instructions")), tools.for_template, variables)
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "skip_special_tokens": True}
    params |= {**parsed.params(RESPONSES_FIELDS), **shared_params(values)}
    view = _logprobs(values, has_tools=tools.use is not None)
    params |= {"max_new_tokens": values.get("max_output_tokens"), **view.params()}
    if tools.use is not None:
        params["skip_special_tokens"] = False
    names = dict(_NAMES)
    if (demand := responses_demand(values)) is not None:
        params["structured_output"], names["structured_output"] = demand.grammar, demand.field
    return ResponsesRequest(
        model=values["model"],
        prompts=[body],
        params=checked_params(params, names),
        stream=values.get("stream", False),
        priority=check_priority(values.get("priority", 0)),
        ignored=parsed.ignored,
        names=names,
        tools=tools.use,
        include_reasoning=values.get("include_reasoning", True),
        logprobs=view,
        echoed={
            "instructions": values.get("instructions"),
            "max_output_tokens": values.get("max_output_tokens"),
            "parallel_tool_calls": is_parallel,
            "temperature": params["temperature"],
            "text": _text_config(values.get("text")),
            "tool_choice": values.get("tool_choice", "auto"),
            "tools": list(defined),
            "top_logprobs": view.num_top or 0,
            "top_p": params["top_p"],
        },
    )


def _logprobs(values: dict[str, Any], *, has_tools: bool) -> LogprobView:
    included, num_top = values.get("include", ()), values.get("top_logprobs", 0)
    for name in included:
        if name not in INCLUDABLE:
            text = f"include holds {name[:60]!r}, which cannot be included; allowed: {', '.join(INCLUDABLE)}"
            raise InvalidRequest(text, param="include")
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs is {num_top}, allowed: 0 to {MAX_LOGPROBS}", param="top_logprobs")
    if LOGPROBS not in included:
        if num_top:
            raise InvalidRequest(f"top_logprobs is for requests that include {LOGPROBS!r}", param="top_logprobs")
        return LogprobView(is_chat=True, num_top=None)
    if has_tools:
        # Which tokens are a message's is certain only where no text can turn out to be a call.
        text = f"include: {LOGPROBS!r} is not available together with tools; chat completions have it"
        raise InvalidRequest(text, param="include")
    return LogprobView(is_chat=True, num_top=num_top, by_id=values.get("return_tokens_as_token_ids", False))


def _text_config(given: TextConfig | None) -> dict[str, Any]:
    """As OpenAI repeats it: with a format, and of that what was sent."""
    asked = given.format if given is not None and given.format is not None else TextFormat("text")
    return {"format": {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None}}


def _messages(given: str | list[InputItem], instructions: str | None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if len(given) > MAX_MESSAGES:
        raise InvalidRequest(f"input holds {len(given)} items; the limit is {MAX_MESSAGES}", param="input")
    names: dict[str, str] = {}
    for index, item in enumerate(given):
        _add_item(messages, item, f"input[{index}]", names)
    return messages


def _add_item(messages: list[dict[str, Any]], item: InputItem, where: str, names: dict[str, str]) -> None:
    """`names`: of the calls so far, by id. What one answer consisted of becomes one message again."""
    match item.type:
        case "message":
            role = item.role or ""
            if role not in ROLES:
                text = f"{where}.role is {role[:40]!r}, allowed: {', '.join(ROLES)}"
                raise InvalidRequest(text, param=f"{where}.role")
            content = _join(item.content, f"{where}.content")
            if role == "assistant":
                message = _open_answer(messages)
                message["content"] = "\n".join(filter(None, (message["content"], content)))
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": content})
        case "reasoning":
            if item.content:
                _open_answer(messages)["reasoning_content"] = _join(item.content, f"{where}.content")
        case "function_call":
            call_id, name = _needed(item.call_id, f"{where}.call_id"), _needed(item.name, f"{where}.name")
            arguments = read_arguments(item.arguments or "", f"{where}.arguments")
            names[call_id] = name
            _open_answer(messages).setdefault("tool_calls", []).append(call_for_template(call_id, name, arguments))
        case "function_call_output":
            call_id = _needed(item.call_id, f"{where}.call_id")
            result = {"role": "tool", "content": _join(item.output, f"{where}.output"), "tool_call_id": call_id}
            messages.append(result | ({"name": names[call_id]} if call_id in names else {}))
        case other:
            text = f"{where}.type is {other[:40]!r}; items of this kind are not available"
            raise InvalidRequest(text, param=f"{where}.type")


def _open_answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end of the conversation."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise InvalidRequest(f"{where} is missing", param=where)
    return value


def _join(content: str | list[TextPart] | None, where: str) -> str:
    if content is None:
        raise InvalidRequest(f"{where} is missing", param=where)
    return join_texts(content, where, TEXT_TYPES)
