# SPDX-License-Identifier: Apache-2.0
"""The table of every request field that OpenAI or vLLM publishes, and what this server does with each.

    honoured   decoded into its type, and used
    ignored    cannot change the text (bookkeeping, hints); named in the response header `x-ignored-fields`
    refused    would change the answer in a way this engine cannot deliver: 400, unless the value asks for nothing

A field that is in neither API is refused by name. To support one more field, move its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.request_body import Fields, decode_field
from mii_zmq.sampling_params import unknown_field

MAX_SHOWN_BYTES = 60


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; nothing here is ever padded."""
    continuous_usage_stats: bool | None = None


class TextPart(msgspec.Struct):
    """One part of a message's content; other types than text carry other fields and are refused by their type."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    tool_call_id: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


@dataclass(frozen=True, slots=True)
class Honoured:
    """`param` is the name in SamplingParams, where the value goes there as it is."""

    kind: Any
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Ignored:
    pass


@dataclass(frozen=True, slots=True)
class Refused:
    """`harmless`: JSON values, in compact spelling, that ask for what the engine does anyway."""

    why: str
    harmless: tuple[bytes, ...] = ()


Rule = Honoured | Ignored | Refused
IGNORED = Ignored()
_NO_LOGPROBS = "log-probabilities are not available"
_NO_TOOLS = "tool calls are not available"
_NO_GRAMMAR = "constrained output is not available"
_NO_MEDIA = "this server handles text only"

_COMMON: dict[str, Rule] = {
    "model": Honoured(str),
    "stream": Honoured(bool | None),
    "stream_options": Honoured(StreamOptions | None),
    "n": Honoured(int | None, "n"),
    "seed": Honoured(int | None),
    "stop": Honoured(str | list[str] | None, "stop"),
    "max_tokens": Honoured(int | None),
    "temperature": Honoured(float | None, "temperature"),
    "top_p": Honoured(float | None, "top_p"),
    "presence_penalty": Honoured(float | None, "presence_penalty"),
    "frequency_penalty": Honoured(float | None, "frequency_penalty"),
    "top_k": Honoured(int | None),
    "min_p": Honoured(float | None, "min_p"),
    "repetition_penalty": Honoured(float | None, "repetition_penalty"),
    "stop_token_ids": Honoured(list[int] | None, "stop_token_ids"),
    "bad_words": Honoured(str | list[str] | None, "bad_words"),
    "ignore_eos": Honoured(bool | None, "ignore_eos"),
    "min_tokens": Honoured(int | None, "min_new_tokens"),
    "skip_special_tokens": Honoured(bool | None, "skip_special_tokens"),
    "priority": Honoured(int | None),
    **dict.fromkeys(
        (
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention", "request_id", "session_id", "length_penalty", "truncation_side",
            "return_tokens_as_token_ids", "return_token_offsets", "return_mm_kwargs", "routed_experts_prompt_start",
            "media_io_kwargs", "mm_processor_kwargs", "guided_decoding_backend", "guided_whitespace_pattern",
            "stream_interval",
        ),
        IGNORED,
    ),
    "logit_bias": Refused("token biases are not available", (b"{}",)),
    "response_format": Refused(_NO_GRAMMAR, (b'{"type":"text"}',)),
    "structured_outputs": Refused(_NO_GRAMMAR, (b"{}",)),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), Refused(_NO_GRAMMAR)
    ),
    "allowed_token_ids": Refused(_NO_GRAMMAR),
    "logits_processors": Refused("logits processors of a client are not run", (b"[]",)),
    "use_beam_search": Refused("beam search is not available", (b"false",)),
    "best_of": Refused("best_of is not available; use n and choose", (b"1",)),
    "prompt_logprobs": Refused(_NO_LOGPROBS),
    "logprob_token_ids": Refused(_NO_LOGPROBS),
    "include_stop_str_in_output": Refused("stop strings are never part of the text", (b"false",)),
    "spaces_between_special_tokens": Refused("special tokens are joined with spaces or left out", (b"true",)),
    "truncate_prompt_tokens": Refused("prompts are never truncated; shorten it"),
    "watermarking": Refused("watermarks are not available", (b"false",)),
    "return_token_ids": Refused("token ids are not returned at this door", (b"false",)),
    "return_prompt_text": Refused("the prompt's text is not returned at this door", (b"false",)),
    "cache_salt": Refused("salts for the prefix cache are not available at this door"),
    "kv_transfer_params": Refused("transfer of KV blocks is not available", (b"{}",)),
    "ec_transfer_params": Refused("transfer of encoder outputs is not available", (b"{}",)),
    "vllm_xargs": Refused("there are no extensions for these arguments", (b"{}",)),
    "repetition_detection": Refused("detection of repetitions is not available"),
    "thinking_token_budget": Refused("a limit on reasoning is not available", (b"-1",)),
}  # fmt: skip

CHAT_FIELDS: dict[str, Rule] = {
    **_COMMON,
    "messages": Honoured(list[ChatMessage]),
    "max_completion_tokens": Honoured(int | None),
    "add_generation_prompt": Honoured(bool | None),
    "parallel_tool_calls": IGNORED,
    "prediction": IGNORED,
    "logprobs": Refused(_NO_LOGPROBS, (b"false",)),
    "top_logprobs": Refused(_NO_LOGPROBS, (b"0",)),
    "tools": Refused(_NO_TOOLS, (b"[]",)),
    "tool_choice": Refused(_NO_TOOLS, (b'"none"', b'"auto"')),
    "functions": Refused(_NO_TOOLS, (b"[]",)),
    "function_call": Refused(_NO_TOOLS, (b'"none"', b'"auto"')),
    "audio": Refused(_NO_MEDIA),
    "modalities": Refused(_NO_MEDIA, (b'["text"]',)),
    "web_search_options": Refused("web search is not available"),
    "reasoning_effort": Refused("the effort of reasoning cannot be set", (b'"none"',)),
    "include_reasoning": Refused("reasoning is not separated from the text", (b"true",)),
    "verbosity": Refused("verbosity cannot be set", (b'"medium"',)),
    "echo": Refused("echo of the last message is not available", (b"false",)),
    "continue_final_message": Refused("continuing the last message is not available", (b"false",)),
    "add_special_tokens": Refused("the chat template places the special tokens", (b"false",)),
    "documents": Refused("documents are not handed to the chat template", (b"[]",)),
    "chat_template": Refused("the model's own chat template is used"),
    "chat_template_kwargs": Refused("the chat template takes no variables of a request", (b"{}",)),
}

COMPLETION_FIELDS: dict[str, Rule] = {
    **_COMMON,
    "prompt": Honoured(str | list[str | int | list[int]]),
    "echo": Honoured(bool | None, "return_full_text"),
    "add_special_tokens": Honoured(bool | None),
    "logprobs": Refused(_NO_LOGPROBS, (b"false",)),
    "suffix": Refused("infilling is not available", (b'""',)),
    "prompt_embeds": Refused("prompts are text or token ids"),
}


@dataclass(frozen=True, slots=True)
class ParsedFields:
    values: dict[str, Any]
    """Honoured fields that are not null."""
    ignored: list[str]

    def params(self, rules: Mapping[str, Rule]) -> dict[str, Any]:
        """The values that are SamplingParams under another or the same name."""
        found = {}
        for name, value in self.values.items():
            rule = rules[name]
            if isinstance(rule, Honoured) and rule.param is not None:
                found[rule.param] = value
        return found


def apply_rules(fields: Fields, rules: Mapping[str, Rule]) -> ParsedFields:
    """Sort a request's fields by the table. Raises InvalidRequest; `param` names the field."""
    parsed = ParsedFields({}, [])
    for name, raw in fields.items():
        match rules.get(name):
            case Honoured(kind):
                value = decode_field(name, raw, kind)
                if value is not None:
                    parsed.values[name] = value
            case Ignored():
                parsed.ignored.append(name)
            case Refused(why, harmless):
                if not _is_harmless(name, raw, harmless):
                    raise InvalidRequest(f"{name} is not supported: {why}", param=name)
                parsed.ignored.append(name)
            case None:
                raise unknown_field(name, rules)
    return parsed


def _is_harmless(name: str, raw: msgspec.Raw, harmless: tuple[bytes, ...]) -> bool:
    data = bytes(raw)
    if len(data) > MAX_SHOWN_BYTES:
        return False
    return msgspec.json.encode(decode_field(name, raw, Any)) in (b"null", *harmless)
