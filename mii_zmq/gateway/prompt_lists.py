# SPDX-License-Identifier: Apache-2.0
"""OpenAI's way to say one prompt or many in one field: a string, token ids, or a list of either. Pure."""

from __future__ import annotations

from typing import Any

from mii_zmq.errors import InvalidRequest
from mii_zmq.protocol import GenerateBody

MAX_TOKEN_ID = 2**31 - 1

Prompt = str | list[int]


def read_prompts(value: str | list[Any], param: str, max_prompts: int) -> list[Prompt]:
    """The prompts of a field called `param`. Raises InvalidRequest."""
    if isinstance(value, list) and value and isinstance(value[0], int):
        value = [value]
    prompts = [value] if isinstance(value, str) else value
    if not prompts:
        raise InvalidRequest(f"{param} is an empty list; send at least one prompt", param=param)
    # Before anything is done for each of them, on the loop that serves everybody.
    if len(prompts) > max_prompts:
        raise InvalidRequest(f"{param} holds {len(prompts)} prompts; the limit is {max_prompts}", param=param)
    kind = type(prompts[0])
    for index, entry in enumerate(prompts):
        if type(entry) is not kind:
            raise InvalidRequest(f"{param} mixes kinds at index {index}; send strings or lists of ids", param=param)
        if not entry:
            raise InvalidRequest(f"{param} is empty at index {index}; send some text or token ids", param=param)
        if isinstance(entry, list):
            _check_token_ids(entry, param)
    return prompts


def prompt_body(prompt: Prompt, add_special_tokens: bool, **fields: Any) -> GenerateBody:
    """A prompt as it is sent, with further fields of the body."""
    if isinstance(prompt, str):
        return GenerateBody(prompt=prompt, add_special_tokens=add_special_tokens, **fields)
    return GenerateBody(prompt_token_ids=prompt, **fields)


def _check_token_ids(token_ids: list[Any], param: str) -> None:
    for token_id in token_ids:
        if not isinstance(token_id, int) or not 0 <= token_id <= MAX_TOKEN_ID:
            shown = str(token_id)[:40] if isinstance(token_id, int) else repr(token_id)[:40]
            raise InvalidRequest(f"{param} holds {shown}, allowed: token ids from 0", param=param)
