# SPDX-License-Identifier: Apache-2.0
"""The table of every field of completions and chats that OpenAI or vLLM publishes; `field_rules` says what the rules
mean."""

from __future__ import annotations

from typing import Any

import msgspec

from mii_zmq.gateway.field_rules import IGNORED, Honoured, Refused, Rule
from mii_zmq.gateway.openai_messages import ChatMessage
from mii_zmq.gateway.output_forms import ResponseFormat, StructuredOutputs
from mii_zmq.gateway.tool_choice import ChatToolChoice
from mii_zmq.gateway.tool_definitions import ChatTool


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; nothing here is ever padded."""
    continuous_usage_stats: bool | None = None
    """Every chunk tells the usage so far."""


_OLD_CALLS = "the old function calls are not available; send tools"
NO_MEDIA = "this server handles text only"

COMMON_FIELDS: dict[str, Rule] = {
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
    "logit_bias": Honoured(dict[str, float] | None, "logit_bias"),
    "allowed_token_ids": Honoured(list[int] | None, "allowed_token_ids"),
    "prompt_logprobs": Honoured(int | None),
    "return_tokens_as_token_ids": Honoured(bool | None),
    **dict.fromkeys(
        (
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
            "prompt_cache_retention", "prompt_cache_options", "request_id", "session_id", "length_penalty",
            "truncation_side", "return_token_offsets", "return_mm_kwargs",
            "routed_experts_prompt_start", "media_io_kwargs", "mm_processor_kwargs", "guided_decoding_backend",
            "guided_whitespace_pattern", "stream_interval",
        ),
        IGNORED,
    ),
    "response_format": Honoured(ResponseFormat | None),
    "structured_outputs": Honoured(StructuredOutputs | None),
    "guided_json": Honoured(dict[str, Any] | str | None),
    "guided_regex": Honoured(str | None),
    "guided_choice": Honoured(list[str] | None),
    "guided_grammar": Honoured(str | None),
    "structural_tag": Honoured(dict[str, Any] | str | None),
    "logits_processors": Refused("logits processors of a client are not run", (b"[]",)),
    "use_beam_search": Refused("beam search is not available", (b"false",)),
    "best_of": Refused("best_of is not available; use n and choose", (b"1",)),
    "logprob_token_ids": Refused("log-probabilities of chosen tokens are not available; use top_logprobs"),
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
    **COMMON_FIELDS,
    "messages": Honoured(list[ChatMessage]),
    "max_completion_tokens": Honoured(int | None),
    "add_generation_prompt": Honoured(bool | None),
    "tools": Honoured(list[ChatTool] | None),
    "tool_choice": Honoured(str | ChatToolChoice | None),
    "parallel_tool_calls": Honoured(bool | None),
    "include_reasoning": Honoured(bool | None),
    "chat_template_kwargs": Honoured(dict[str, bool | int | float | str | None] | None),
    "continue_final_message": Honoured(bool | None),
    "prediction": IGNORED,
    "logprobs": Honoured(bool | None),
    "top_logprobs": Honoured(int | None),
    "functions": Refused(_OLD_CALLS, (b"[]",)),
    "function_call": Refused(_OLD_CALLS, (b'"none"', b'"auto"')),
    "moderation": Refused("moderation is not available"),
    "audio": Refused(NO_MEDIA),
    "modalities": Refused(NO_MEDIA, (b'["text"]',)),
    "web_search_options": Refused("web search is not available"),
    "reasoning_effort": Refused("the effort of reasoning cannot be set", (b'"none"',)),
    "verbosity": Refused("verbosity cannot be set", (b'"medium"',)),
    "echo": Refused("echo of the last message is not available", (b"false",)),
    "add_special_tokens": Refused("the chat template places the special tokens", (b"false",)),
    "documents": Refused("documents are not handed to the chat template", (b"[]",)),
    "chat_template": Refused("the model's own chat template is used"),
}

COMPLETION_FIELDS: dict[str, Rule] = {
    **COMMON_FIELDS,
    "prompt": Honoured(str | list[str | int | list[int]]),
    "echo": Honoured(bool | None, "return_full_text"),
    "add_special_tokens": Honoured(bool | None),
    "logprobs": Honoured(int | bool | None),
    "suffix": Refused("infilling is not available", (b'""',)),
    "prompt_embeds": Refused("prompts are text or token ids"),
}
