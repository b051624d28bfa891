# SPDX-License-Identifier: Apache-2.0
"""Anthropic's door: POST /v1/messages, streamed and not, and /v1/messages/count_tokens.

A model is a deployment. Handlers only; requests are understood in `anthropic_schemas`, fields are listed in
`anthropic_fields`, answers made in `anthropic_answers`. The headers of Anthropic's clients (x-api-key,
anthropic-version, anthropic-beta) have no meaning here.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from mii_zmq.errors import MiiError
from mii_zmq.gateway.anthropic_answers import MessagesAnswer
from mii_zmq.gateway.anthropic_schemas import parse_counting, parse_messages
from mii_zmq.gateway.http_errors import JSON
from mii_zmq.gateway.request_body import read_fields
from mii_zmq.gateway.serving import serve
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.terms import terms_of
from mii_zmq.gateway.token_api import ask


async def messages(request: web.Request) -> web.StreamResponse:
    """Handler of POST /v1/messages."""
    return await serve(request, parse_messages, MessagesAnswer)


async def count_tokens(request: web.Request) -> web.Response:
    """Handler of POST /v1/messages/count_tokens: the prompt's length as the model's template and tokenizer make it."""
    terms, asked = terms_of(request), parse_counting(await read_fields(request))
    try:
        answer = await ask(request, terms, asked.model, msgspec.structs.replace(asked.prompts[0], task="tokenize"))
    except MiiError as error:
        raise asked.rename(error) from None
    return web.Response(body=encode({"input_tokens": answer.prompt_length}), content_type=JSON, headers=asked.headers)
