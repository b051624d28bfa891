# SPDX-License-Identifier: Apache-2.0
"""OpenAI's requests for completions and chats translated into the engine's words.

Pure: no sockets, no handlers. OpenAI's own defaults hold here (temperature 1, top_p 1, 16 tokens for completions),
not MII's. Errors carry the names of OpenAI's fields. Answers are made in `openai_answers`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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
from mii_zmq.gateway.field_rules import ParsedFields, Rule, apply_rules
from mii_zmq.gateway.generations import MAX_GENERATIONS, check_count
from mii_zmq.gateway.logprob_bodies import LogprobView
from mii_zmq.gateway.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS, StreamOptions
from mii_zmq.gateway.openai_messages import template_messages
from mii_zmq.gateway.output_forms import openai_demand
from mii_zmq.gateway.prompt_lists import prompt_body, read_prompts
from mii_zmq.gateway.request_body import Fields
from mii_zmq.gateway.tool_choice import chat_choice
from mii_zmq.gateway.tool_definitions import Tools, choose_tools, read_chat_tools
from mii_zmq.protocol import GenerateBody
from mii_zmq.sampling_params import MAX_LOGPROBS

OWNER = "mii_zmq"
DEFAULT_COMPLETION_TOKENS = 16
_NAMES = {"min_new_tokens": "min_tokens", "return_full_text": "echo", "prompt_token_ids": "prompt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest(CoreRequest):
    """A request for completions or a chat."""

    include_usage: bool
    has_running_usage: bool
    include_reasoning: bool = True
    logprobs: LogprobView


def parse_chat(fields: Fields) -> OpenAIRequest:
    """Raises InvalidRequest; `param` names the field."""
    parsed = apply_rules(fields, CHAT_FIELDS)
    values = parsed.values
    if "messages" not in values:
        raise InvalidRequest("messages is missing; send a list of messages", param="messages")
    if not values["messages"]:
        raise InvalidRequest("messages is an empty list; send at least one message", param="messages")
    if len(values["messages"]) > MAX_MESSAGES:
        text = f"messages holds {len(values['messages'])} messages; the limit is {MAX_MESSAGES}"
        raise InvalidRequest(text, param="messages")
    tools = _tools(values)
    is_continued = values.get("continue_final_message", False)
    body = chat_body(
        template_messages(values["messages"]),
        tools.for_template,
        check_plain(values.get("chat_template_kwargs", {}), "chat_template_kwargs"),
        is_continued=is_continued,
        add_generation_prompt=values.get("add_generation_prompt", not is_continued),
    )
    checked_params({"max_new_tokens": values.get("max_tokens")}, {"max_new_tokens": "max_tokens"})  # used or not
    limit = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    return _request(parsed, CHAT_FIELDS, [body], limit, None, _chat_logprobs(values), tools)


def _chat_logprobs(values: dict[str, Any]) -> LogprobView:
    num_top = values.get("top_logprobs", 0)
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs is {num_top}, allowed: 0 to {MAX_LOGPROBS}", param="top_logprobs")
    if num_top and not values.get("logprobs"):
        raise InvalidRequest("top_logprobs is for requests with logprobs true", param="top_logprobs")
    return LogprobView(is_chat=True, num_top=num_top if values.get("logprobs") else None)


def _tools(values: dict[str, Any]) -> Tools:
    choice, is_parallel = chat_choice(values.get("tool_choice")), values.get("parallel_tool_calls", True)
    return choose_tools(read_chat_tools(values.get("tools", ())), choice, is_parallel=is_parallel)


def parse_completion(fields: Fields) -> OpenAIRequest:
    """Raises InvalidRequest; `param` names the field."""
    parsed = apply_rules(fields, COMPLETION_FIELDS)
    if "prompt" not in parsed.values:
        raise InvalidRequest("prompt is missing; send a string, token ids, or a list of either", param="prompt")
    add_special_tokens = parsed.values.get("add_special_tokens", True)
    prompts = [
        prompt_body(prompt, add_special_tokens)
        for prompt in read_prompts(parsed.values["prompt"], "prompt", MAX_GENERATIONS)
    ]
    num_top = parsed.values.get("logprobs")
    if num_top is True:
        raise InvalidRequest("logprobs is true; at this door it is a number, as in 5", param="logprobs")
    view = LogprobView(
        is_chat=False, num_top=None if num_top is False else num_top, echo=parsed.values.get("echo", False)
    )
    return _request(parsed, COMPLETION_FIELDS, prompts, "max_tokens", DEFAULT_COMPLETION_TOKENS, view)


def _request(
    parsed: ParsedFields,
    rules: dict[str, Rule],
    prompts: list[GenerateBody],
    limit: str,
    default_tokens: int | None,
    view: LogprobView,
    tools: Tools = Tools(),  # noqa: B008 - frozen
) -> OpenAIRequest:
    values = parsed.values
    if "model" not in values:
        raise InvalidRequest("model is missing; /v1/models lists what is served", param="model")
    stream = values.get("stream", False)
    options: StreamOptions = values.get("stream_options", StreamOptions())
    if "stream_options" in values and not stream:
        raise InvalidRequest("stream_options is only for requests with stream true", param="stream_options")
    params = {"temperature": 1.0, "top_p": 1.0, "skip_special_tokens": True, **parsed.params(rules)}
    params |= {"max_new_tokens": values.get(limit, default_tokens), **shared_params(values)}
    view = replace(
        view, num_prompt_top=values.get("prompt_logprobs"), by_id=values.get("return_tokens_as_token_ids", False)
    )
    if stream and view.num_prompt_top is not None:
        raise InvalidRequest("prompt_logprobs is not available with stream true", param="prompt_logprobs")
    params |= view.params()
    if tools.use is not None:
        params["skip_special_tokens"] = False  # some models mark their calls with special tokens
    names = {**_NAMES, "max_new_tokens": limit}
    if (demand := openai_demand(values)) is not None:
        params["structured_output"], names["structured_output"] = demand.grammar, demand.field
    checked = checked_params(params, names)
    check_count(len(prompts), checked.n, "prompt")
    return OpenAIRequest(
        model=values["model"],
        prompts=prompts,
        params=checked,
        stream=stream,
        priority=check_priority(values.get("priority", 0)),
        ignored=parsed.ignored,
        names=names,
        tools=tools.use,
        include_usage=bool(options.include_usage),
        has_running_usage=bool(options.continuous_usage_stats),
        include_reasoning=values.get("include_reasoning", True),
        logprobs=view,
    )
