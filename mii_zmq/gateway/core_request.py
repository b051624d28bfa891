# SPDX-License-Identifier: Apache-2.0
"""The one request that every door with a conversation or a prompt translates into, and the way back for errors.

Pure. A door adds its own fields by deriving from `CoreRequest`; what they are called there stays in `names`, so that an
error speaks the door's language.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from mii_zmq.client import fan_out
from mii_zmq.errors import InvalidRequest, MiiError, RequestError, UnknownDeployment
from mii_zmq.gateway.answers import ToolUse
from mii_zmq.protocol import GenerateBody
from mii_zmq.sampling_params import SamplingParams

MAX_PRIORITY = 2**31 - 1
MAX_DEPTH = 64
"""Of a tool's schema and of a call's arguments."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRequest:
    """A request, ready to be sent."""

    model: str
    prompts: list[GenerateBody]
    """Without params."""
    params: SamplingParams
    stream: bool
    priority: int = 0
    ignored: list[str]
    names: dict[str, str]
    """The engine's name of a field, and the one that this request used."""
    tools: ToolUse | None = None

    def bodies(self) -> list[GenerateBody]:
        """All choices of the first prompt, then of the second ..."""
        choices = fan_out(self.params)
        return [msgspec.structs.replace(prompt, params=choice) for prompt in self.prompts for choice in choices]

    def rename(self, error: MiiError) -> MiiError:
        """The same error in the names of this door."""
        if isinstance(error, UnknownDeployment):
            return UnknownDeployment(error.message, param="model")
        return renamed(error, self.names)

    @property
    def headers(self) -> dict[str, str]:
        return {"x-ignored-fields": ", ".join(self.ignored)} if self.ignored else {}


def chat_body(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
    *,
    is_continued: bool = False,
    add_generation_prompt: bool = True,
) -> GenerateBody:
    """A conversation for the worker's template. `is_continued`: the model goes on with the last message."""
    return GenerateBody(
        messages=messages,
        tools=tools,
        chat_template_kwargs=variables,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=is_continued,
        return_reasoning_start=True,
    )


def checked_params(values: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """Raises InvalidRequest in the names of the door."""
    try:
        return SamplingParams.from_mapping(dict(values))
    except InvalidRequest as error:
        raise renamed(error, names) from None


def shared_params(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that need more than another name: OpenAI's signed seeds, and top_k's two ways to say "all"."""
    params = {}
    if values.get("top_k", 0) not in (0, -1):
        params["top_k"] = values["top_k"]
    if "seed" in values:
        seed = values["seed"]
        if not -(2**63) <= seed < 2**63:
            raise InvalidRequest(f"seed is {str(seed)[:40]}, allowed: -2^63 to 2^63 - 1", param="seed")
        params["seed"] = seed % 2**63
    return params


def check_priority(priority: int) -> int:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"priority is {priority}, allowed: +/-{MAX_PRIORITY}", param="priority")
    return priority


def check_plain(value: T, where: str) -> T:
    """JSON that every process can pass on: not nested too deeply, no integers beyond 64 bits.

    Raises:
        InvalidRequest: `param` is `where`.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise InvalidRequest(f"{where} holds an integer of more than 64 bits", param=where)
            if isinstance(item, (dict, list)):
                below += item.values() if isinstance(item, dict) else item
        level = below
    if level:
        raise InvalidRequest(f"{where} is nested too deeply; at most {MAX_DEPTH} levels", param=where)
    return value


def renamed(error: MiiError, names: Mapping[str, str]) -> MiiError:
    """An error of the engine's side in the names of a door."""
    if not isinstance(error, RequestError) or error.param is None:
        return error
    message, param = error.message, error.param
    for ours, theirs in names.items():
        name = re.compile(rf"\b{ours}\b")
        message, param = name.sub(theirs, message), name.sub(theirs, param)
    return type(error)(message, param=param, retry_after_ms=error.retry_after_ms, emitted_tokens=error.emitted_tokens)
