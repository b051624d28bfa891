# SPDX-License-Identifier: Apache-2.0
"""MII's own door: POST /mii/{deployment}, with the original's request fields and, on success, its exact bytes.

One flat object: `prompts` (a string or a list) beside the fields of SamplingParams. The answer is a list with one
entry per prompt and choice. Beyond the original: `"stream": true` answers with events, errors are 4xx that name
the field, and entries hold log-probabilities where they are asked for.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from mii_zmq.client import fan_out
from mii_zmq.errors import InvalidRequest, MiiError
from mii_zmq.gateway.constraints import check_compiler
from mii_zmq.gateway.generations import build, check_count, collect, submitted
from mii_zmq.gateway.http_errors import JSON
from mii_zmq.gateway.logprob_bodies import LogprobView
from mii_zmq.gateway.metrics import StreamClock
from mii_zmq.gateway.middlewares import route_of
from mii_zmq.gateway.request_body import Fields, decode_field, read_fields
from mii_zmq.gateway.request_record import RECORD
from mii_zmq.gateway.serving import find_deployment
from mii_zmq.gateway.sse import DONE, encode, respond
from mii_zmq.gateway.state import GATEWAY
from mii_zmq.gateway.terms import terms_of
from mii_zmq.protocol import GenerateBody
from mii_zmq.sampling_params import IGNORED_FIELDS, SamplingParams, unknown_field

if TYPE_CHECKING:
    from mii_zmq.client import Completion
    from mii_zmq.protocol import FinalBody

_STRINGS = str | list[str] | None
FIELD_KINDS: dict[str, Any] = {
    **typing.get_type_hints(SamplingParams),
    "stop": _STRINGS,
    "bad_words": _STRINGS,
    "stop_token_ids": list[int] | None,
    "logit_bias": dict[int, float] | None,
    "prompts": str | list[str],
    "stream": bool | None,
    **dict.fromkeys(IGNORED_FIELDS, Any),
}


@dataclass(frozen=True, slots=True)
class MiiRequest:
    prompts: list[str]
    params: SamplingParams
    stream: bool

    @property
    def logprobs(self) -> LogprobView:
        return LogprobView(is_chat=True, num_top=self.params.logprobs, num_prompt_top=self.params.prompt_logprobs)

    def bodies(self) -> list[GenerateBody]:
        """One per entry of the answer: all choices of the first prompt, then of the second ..."""
        choices = fan_out(self.params)
        return [GenerateBody(prompt=prompt, params=choice) for prompt in self.prompts for choice in choices]


async def generate(request: web.Request) -> web.StreamResponse:
    """Handler of POST /mii/{deployment}."""
    gateway = request.app[GATEWAY]
    deployment = request.match_info["deployment"]
    clock = StreamClock(gateway.metrics, route_of(request), request[RECORD])
    terms = terms_of(request)
    asked = parse(await read_fields(request))
    if asked.params.structured_output is not None:
        check_compiler(asked.params, await find_deployment(gateway, deployment))
    request[RECORD].num_choices = asked.params.n
    with (
        gateway.running(),
        submitted(gateway.client, deployment, asked.bodies(), terms, stream=asked.stream) as generations,
    ):
        if asked.stream:
            return await respond(request, deployment, generations, MiiEvents(asked.logprobs), clock)
        results = await collect(generations, gateway.metrics, deployment, clock)
        body = await build(lambda: response_body(results, asked.logprobs), results)
        return web.Response(body=body, content_type=JSON)


def parse(fields: Fields) -> MiiRequest:
    """Raises InvalidRequest; `param` names the field."""
    values: dict[str, Any] = {}
    for name, raw in fields.items():
        if name not in FIELD_KINDS:
            raise unknown_field(name, FIELD_KINDS)
        if name not in IGNORED_FIELDS:
            values[name] = decode_field(name, raw, FIELD_KINDS[name])
    if "prompts" not in values:
        raise InvalidRequest("prompts is missing; send a string or a list of strings", param="prompts")
    prompts = values.pop("prompts")
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not prompts:
        raise InvalidRequest("prompts is an empty list; send at least one prompt", param="prompts")
    check_count(len(prompts), 1, "prompts")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequest(f"prompts holds an empty string at index {index}; send some text", param="prompts")
    stream = bool(values.pop("stream", None))
    params = SamplingParams.from_mapping(values)
    check_count(len(prompts), params.n, "prompts")
    return MiiRequest(prompts, params, stream)


def response_body(results: Sequence[Completion], view: LogprobView) -> bytes:
    """The original's bytes: sorted keys, no spaces, everything beyond ASCII escaped, a newline."""
    entries = [
        {
            "finish_reason": result.finish_reason,
            "generated_length": result.generated_length,
            "generated_text": result.text,
            "prompt_length": result.prompt_length,
            **view.entry(result.logprobs),
        }
        for result in results
    ]
    return json.dumps(entries, sort_keys=True, separators=(",", ":")).encode() + b"\n"


class MiiEvents:
    """Events in MII's words. `finish_reason` is "none" up to a choice's last event, which has no text but the lengths;
    `index` is the entry's place in the list that the same request without `stream` would return."""

    def __init__(self, logprobs: LogprobView) -> None:
        self._logprobs = logprobs

    def first(self, index: int, prompt_length: int) -> bytes:
        return b""

    def count(self, index: int, num_tokens: int) -> None:
        """Usage is told at the end."""

    def delta(self, index: int, text: bytes, logprobs: bytes = b"") -> bytes:
        more = b""
        if logprobs:
            more = b"," + encode(self._logprobs.entry(logprobs))[1:-1]
        return b'data: {"finish_reason":"none","generated_text":%b,"index":%d%b}\n\n' % (text, index, more)

    def last(self, index: int, final: FinalBody) -> bytes:
        event = {
            "finish_reason": final.finish_reason,
            "generated_length": final.generated_length,
            "generated_text": "",
            "index": index,
            "prompt_length": final.prompt_length,
        }
        return b"data: %b\n\n" % encode(event)

    def end(self, finals: Sequence[FinalBody]) -> bytes:
        return DONE

    def error(self, error: MiiError) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode({"message": error.message, "code": error.code})
