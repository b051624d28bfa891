# SPDX-License-Identifier: Apache-2.0
"""vLLM's /tokenize and /detokenize: token ids of a prompt or a conversation, and back.

The workers have the tokenizers: a request goes to a group of its deployment like any other, and is answered there
without the engine. Takes the fields of OpenAI's chat and text completions, of which those that say how to sample change
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from mii_zmq.errors import InvalidRequest, MiiError
from mii_zmq.gateway.core_request import renamed
from mii_zmq.gateway.generations import submitted
from mii_zmq.gateway.http_errors import JSON
from mii_zmq.gateway.openai_schemas import parse_chat, parse_completion
from mii_zmq.gateway.request_body import Fields, decode_field, read_fields
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.state import GATEWAY
from mii_zmq.gateway.terms import Terms, terms_of
from mii_zmq.protocol import GenerateBody
from mii_zmq.sampling_params import unknown_field

if TYPE_CHECKING:
    from mii_zmq.client import Completion

DETOKENIZE_FIELDS = {"model": str, "tokens": list[int]}


async def tokenize(request: web.Request) -> web.Response:
    """Handler of POST /tokenize."""
    terms, fields = terms_of(request), await read_fields(request)
    if "return_token_strs" in fields and decode_field("return_token_strs", fields["return_token_strs"], bool | None):
        raise InvalidRequest(
            "return_token_strs is not supported; send single tokens to /detokenize", param="return_token_strs"
        )
    fields.pop("return_token_strs", None)
    asked = parse_chat(fields) if "messages" in fields else parse_completion(fields)
    if len(asked.prompts) != 1:
        raise InvalidRequest(f"prompt holds {len(asked.prompts)} prompts; send one at a time", param="prompt")
    try:
        answer = await ask(request, terms, asked.model, msgspec.structs.replace(asked.prompts[0], task="tokenize"))
    except MiiError as error:
        raise asked.rename(error) from None
    deployment = (await request.app[GATEWAY].status()).deployments.get(asked.model)
    facts = {
        "count": len(answer.token_ids),
        "max_model_len": None if deployment is None else deployment.max_model_len,
        "tokens": answer.token_ids,
        "token_strs": None,
    }
    return web.Response(body=encode(facts), content_type=JSON, headers=asked.headers)


async def detokenize(request: web.Request) -> web.Response:
    """Handler of POST /detokenize."""
    terms, values = terms_of(request), _decode(await read_fields(request))
    body = GenerateBody(prompt_token_ids=values["tokens"], task="detokenize")
    try:
        answer = await ask(request, terms, values["model"], body)
    except MiiError as error:
        raise renamed(error, {"prompt_token_ids": "tokens"}) from None
    return web.Response(body=encode({"prompt": answer.text}), content_type=JSON)


async def ask(request: web.Request, terms: Terms, model: str, body: GenerateBody) -> Completion:
    """One group's answer to a task that generates nothing."""
    gateway = request.app[GATEWAY]
    with gateway.running(), submitted(gateway.client, model, [body], terms, stream=False) as generations:
        return await generations[0].result()


def _decode(fields: Fields) -> dict[str, Any]:
    for name in fields:
        if name not in DETOKENIZE_FIELDS:
            raise unknown_field(name, DETOKENIZE_FIELDS)
    for name in DETOKENIZE_FIELDS:
        if name not in fields:
            raise InvalidRequest(f"{name} is missing", param=name)
    return {name: decode_field(name, fields[name], kind) for name, kind in DETOKENIZE_FIELDS.items()}
