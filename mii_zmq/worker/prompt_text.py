# SPDX-License-Identifier: Apache-2.0
"""A request's prompt in any of its forms -> token ids that fit the model and its KV pool. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mii_zmq.errors import InvalidRequest, PromptTooLong, RequestError
from mii_zmq.sampling_params import check_text
from mii_zmq.tokenizer import TextTokenizer
from mii_zmq.worker.chat_template import render_chat
from mii_zmq.worker.plan import EngineLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInput:
    """A request's prompt in exactly one of its three forms, unchecked."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Any = None
    add_special_tokens: bool = True
    """With text: begin-of-sequence and the like, as the tokenizer has them."""
    add_generation_prompt: bool = True
    """With messages: end with the opening of an assistant message."""
    tools: Any = None
    """With messages: functions that the model may call, for the template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """With messages: more variables for the template."""
    continue_final_message: bool = False
    """With messages: end within the last one, for the model to go on with."""
    return_reasoning_start: bool = False
    """Where the prompt ends with an opening <think>, the output's text begins with it."""


def encode_prompt(
    tokenizer: TextTokenizer,
    limits: EngineLimits,
    prompt: PromptInput,
    *,
    must_fit: bool = True,
    has_output: bool = True,
) -> tuple[list[int], str | None]:
    """The prompt's ids, and its text unless it came as ids.

    Raises as `build_sequence`; PromptTooLong only where it `must_fit` the context, with an output token if it
    `has_output`.
    """
    forms = [form for form in (prompt.text, prompt.token_ids, prompt.messages) if form is not None]
    if len(forms) != 1:
        raise InvalidRequest(
            f"give exactly one of prompt, prompt_token_ids and messages, not {len(forms)}", param="prompt"
        )
    if prompt.token_ids is not None:
        token_ids = check_token_ids(prompt.token_ids, limits.vocab_size, "prompt_token_ids")
        if not token_ids:
            raise InvalidRequest("prompt_token_ids is empty; send at least one token", param="prompt_token_ids")
        if must_fit:
            _check_context(len(token_ids), limits, "prompt_token_ids", has_output)
        return token_ids, None
    if prompt.messages is not None:
        param, text = (
            "messages",
            render_chat(
                tokenizer,
                prompt.messages,
                prompt.add_generation_prompt,
                tools=prompt.tools,
                variables=prompt.chat_template_kwargs,
                continue_final_message=prompt.continue_final_message,
            ),
        )
    else:
        param, text = "prompt", _check_prompt_text(prompt.text)
    if must_fit:
        _check_characters(tokenizer, len(text), limits, param, has_output)
    # A chat template writes its own special tokens.
    token_ids = tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens and prompt.messages is None)
    if not token_ids:
        raise InvalidRequest(f"{param} gives no tokens; send some text", param=param)
    if must_fit:
        _check_context(len(token_ids), limits, param, has_output)
    if max(token_ids) >= limits.vocab_size:
        raise InvalidRequest(
            f"{param} contains a token ({max(token_ids)}) that the tokenizer knows but the model does not", param=param
        )
    return token_ids, text


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> list[int]:
    checked = list(token_ids)
    for index, token_id in enumerate(checked):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param}[{index}] is {str(token_id)[:40]}, allowed: integers from 0 to {vocab_size - 1}", param=param
            )
    return checked


def sequence_capacity(limits: EngineLimits) -> int:
    """Tokens that one sequence can have: by the model's context and by the whole KV pool."""
    return min(limits.max_model_len, limits.num_blocks * limits.block_size)


def too_long(found: str, limits: EngineLimits, param: str) -> RequestError:
    bound = "the model's context" if limits.max_model_len <= sequence_capacity(limits) else "the KV pool"
    return PromptTooLong(f"{found}; {bound} holds {sequence_capacity(limits)} tokens in all", param=param)


def _check_prompt_text(text: Any) -> str:
    if not isinstance(text, str):
        raise InvalidRequest(f"prompt must be a string, got {type(text).__name__}", param="prompt")
    if not text:
        raise InvalidRequest("prompt is empty; send some text", param="prompt")
    return check_text(text, "prompt")


def _check_context(num_tokens: int, limits: EngineLimits, param: str, has_output: bool) -> None:
    if num_tokens + has_output > sequence_capacity(limits):
        rest = ", and at least one must be left for output" if has_output else ""
        raise too_long(f"{param} has {num_tokens} tokens{rest}", limits, param)


def _check_characters(
    tokenizer: TextTokenizer, num_chars: int, limits: EngineLimits, param: str, has_output: bool
) -> None:
    """Refuse, before the work of tokenizing it, a text that cannot fit however it is cut."""
    if tokenizer.max_token_chars is not None and num_chars + has_output > (
        tokenizer.max_token_chars * sequence_capacity(limits)
    ):
        least = -(-num_chars // tokenizer.max_token_chars)
        raise too_long(f"{param} has {num_chars} characters, at least {least} tokens", limits, param)
