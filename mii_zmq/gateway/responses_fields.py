# SPDX-License-Identifier: Apache-2.0
"""The table of every field of OpenAI's Responses API (and of vLLM's additions to it), and the shapes of its items."""

from __future__ import annotations

import msgspec

from mii_zmq.gateway.field_rules import IGNORED, Honoured, Refused, Rule
from mii_zmq.gateway.openai_fields import CHAT_FIELDS, COMMON_FIELDS
from mii_zmq.gateway.openai_messages import TextPart
from mii_zmq.gateway.output_forms import TextConfig
from mii_zmq.gateway.tool_choice import ResponsesToolChoice
from mii_zmq.gateway.tool_definitions import ResponsesTool

_NO_STORE = "responses are not stored; send the whole conversation as input"
_ELSEWHERE = ("n", "max_tokens", "store", "response_format", "request_id")
"""Fields of completions that have no meaning, or another one, here."""


class InputItem(msgspec.Struct):
    """One item of a conversation. Which fields count depends on the type; other types are refused by it."""

    type: str = "message"
    role: str | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Usage is in the last event anyway, so that the options of completions have no place here."""

    include_obfuscation: bool | None = None
    """Accepted; nothing here is ever padded."""


RESPONSES_FIELDS: dict[str, Rule] = {
    **{name: rule for name, rule in COMMON_FIELDS.items() if name not in _ELSEWHERE},
    "stream_options": Honoured(ResponsesStreamOptions | None),
    "input": Honoured(str | list[InputItem]),
    "instructions": Honoured(str | None),
    "max_output_tokens": Honoured(int | None),
    "tools": Honoured(list[ResponsesTool] | None),
    "tool_choice": Honoured(str | ResponsesToolChoice | None),
    "parallel_tool_calls": Honoured(bool | None),
    "chat_template_kwargs": CHAT_FIELDS["chat_template_kwargs"],
    "include_reasoning": Honoured(bool | None),
    **dict.fromkeys(("request_id", "access_programs", "background_options", "image"), IGNORED),
    "n": Refused("a response is one answer", (b"1",)),
    "store": Refused(_NO_STORE, (b"false",)),
    "previous_response_id": Refused(_NO_STORE),
    "conversation": Refused(_NO_STORE),
    "prompt": Refused("prompts are not stored; send input and instructions"),
    "background": Refused("responses are not stored, so none can be fetched later", (b"false",)),
    "include": Honoured(list[str] | None),
    "text": Honoured(TextConfig | None),
    "truncation": Refused("prompts are never truncated; shorten it", (b'"disabled"',)),
    "reasoning": Refused("the effort of reasoning cannot be set", (b"{}",)),
    "top_logprobs": Honoured(int | None),
    "prompt_logprobs": Refused("log-probabilities of a prompt are not available at this door"),
    "max_tool_calls": Refused("tools of this server there are none, and the client runs its own"),
    "context_management": Refused("conversations are not edited; send what the model shall see", (b"[]",)),
    "moderation": CHAT_FIELDS["moderation"],
}
