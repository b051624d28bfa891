# SPDX-License-Identifier: Apache-2.0
"""What a worker answers with its tokenizer alone, without the engine: token ids of a prompt, text of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mii_zmq.errors import InvalidRequest, PromptTooLong
from mii_zmq.tokenizer import TextTokenizer
from mii_zmq.worker.plan import EngineLimits
from mii_zmq.worker.prompt_text import PromptInput, encode_prompt

MAX_TEXT = 2**19
"""Characters or tokens; a rendered conversation is limited by its messages' characters before it is rendered."""


@dataclass(frozen=True, slots=True)
class TextAnswer:
    token_ids: Sequence[int]
    text: str
    """The prompt as it was tokenized (messages rendered by the template), or what the ids stand for."""


def answer_text_task(tokenizer: TextTokenizer, limits: EngineLimits, task: str, prompt: PromptInput) -> TextAnswer:
    """Answer "tokenize" or "detokenize"; a prompt may be longer than the model's context.

    Raises:
        InvalidRequest: the prompt is empty or malformed, or is none of token ids where those are asked for.
        PromptTooLong: it is longer than anybody tokenizes while others wait.
    """
    if prompt.text is not None and len(prompt.text) > MAX_TEXT:
        raise PromptTooLong(
            f"prompt has {len(prompt.text)} characters, allowed: {MAX_TEXT}; tokenize it in parts", param="prompt"
        )
    if prompt.token_ids is not None and len(prompt.token_ids) > MAX_TEXT:
        raise PromptTooLong(
            f"prompt_token_ids has {len(prompt.token_ids)} tokens, allowed: {MAX_TEXT}", param="prompt_token_ids"
        )
    if task == "detokenize" and prompt.token_ids is None:
        raise InvalidRequest("detokenize takes prompt_token_ids, not text", param="prompt_token_ids")
    if prompt.messages is not None and len(str(prompt.messages)) > 2 * MAX_TEXT:
        raise PromptTooLong(f"messages are longer than {MAX_TEXT} characters; count them in parts", param="messages")
    token_ids, text = encode_prompt(tokenizer, limits, prompt, must_fit=False)
    return TextAnswer(token_ids, tokenizer.decode(token_ids) if text is None else text)
