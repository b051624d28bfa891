# SPDX-License-Identifier: Apache-2.0
"""The table of every field of Anthropic's Messages API, and the shapes of what is honoured."""

from __future__ import annotations

from typing import Any

import msgspec

from mii_zmq.gateway.field_rules import IGNORED, Honoured, Refused, Rule
from mii_zmq.gateway.output_forms import JsonOutput, OutputConfig
from mii_zmq.gateway.tool_choice import MessagesToolChoice


class Block(msgspec.Struct):
    """One block of a message's content. Which fields count depends on the type; other types are refused by it."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    thinking: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[Block]


class MessagesTool(msgspec.Struct):
    """A tool of the client's; those that Anthropic's servers run have other types, by which they are refused."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


MESSAGES_FIELDS: dict[str, Rule] = {
    "model": Honoured(str),
    "messages": Honoured(list[Message]),
    "max_tokens": Honoured(int | None),
    "system": Honoured(str | list[Block] | None),
    "stop_sequences": Honoured(list[str] | None, "stop"),
    "stream": Honoured(bool | None),
    "temperature": Honoured(float | None, "temperature"),
    "top_p": Honoured(float | None, "top_p"),
    "top_k": Honoured(int | None),
    "tools": Honoured(list[MessagesTool] | None),
    "tool_choice": Honoured(MessagesToolChoice | None),
    "thinking": Honoured(Thinking | None),
    **dict.fromkeys(
        (
            "metadata", "service_tier", "inference_geo", "cache_control", "speed", "diagnostics", "workspace_id",
            "user_profile_id", "billing_policy", "fallbacks", "fallback_credit_token",
        ),
        IGNORED,
    ),
    "container": Refused("there are no containers to run code in"),
    "context_management": Refused("conversations are not edited; send what the model shall see"),
    "compaction": Refused("conversations are not edited; send what the model shall see"),
    "thread": Refused("conversations are not stored; send the whole of it as messages"),
    "mcp_servers": Refused("this server calls no other servers", (b"[]",)),
    "output_config": Honoured(OutputConfig | None),
    "output_format": Honoured(JsonOutput | None),
}  # fmt: skip
