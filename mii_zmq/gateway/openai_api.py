# SPDX-License-Identifier: Apache-2.0
"""OpenAI's door: /v1/models, /v1/chat/completions and /v1/completions, streamed and not.

A model is a deployment. Handlers only; requests are understood in `openai_schemas`, fields are listed in
`openai_fields`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiohttp import web

from mii_zmq.errors import MiiError, UnknownDeployment
from mii_zmq.gateway.broker_status import DeploymentStatus
from mii_zmq.gateway.generations import collect, submitted
from mii_zmq.gateway.http_errors import JSON
from mii_zmq.gateway.metrics import StreamClock
from mii_zmq.gateway.middlewares import route_of
from mii_zmq.gateway.openai_schemas import (
    OWNER,
    Envelope,
    OpenAIEvents,
    OpenAIRequest,
    parse_chat,
    parse_completion,
)
from mii_zmq.gateway.request_body import read_fields
from mii_zmq.gateway.sse import encode, respond
from mii_zmq.gateway.state import GATEWAY
from mii_zmq.gateway.terms import Terms, terms_of


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Handler of POST /v1/chat/completions."""
    clock, terms = StreamClock(request.app[GATEWAY].metrics, route_of(request)), terms_of(request)
    return await _answer(request, parse_chat(await read_fields(request)), terms, clock, is_chat=True)


async def completions(request: web.Request) -> web.StreamResponse:
    """Handler of POST /v1/completions."""
    clock, terms = StreamClock(request.app[GATEWAY].metrics, route_of(request)), terms_of(request)
    return await _answer(request, parse_completion(await read_fields(request)), terms, clock, is_chat=False)


async def list_models(request: web.Request) -> web.Response:
    """Handler of GET /v1/models."""
    gateway = request.app[GATEWAY]
    status = await gateway.status()
    models = [_model(status.deployments[name], gateway.started_at) for name in sorted(status.deployments)]
    return web.Response(body=encode({"object": "list", "data": models}), content_type=JSON)


async def get_model(request: web.Request) -> web.Response:
    """Handler of GET /v1/models/{model}."""
    gateway = request.app[GATEWAY]
    name = request.match_info["model"]
    status = await gateway.status()
    if name not in status.deployments:
        raise UnknownDeployment(f"there is no model {name[:200]!r}; /v1/models lists what is served", param="model")
    return web.Response(body=encode(_model(status.deployments[name], gateway.started_at)), content_type=JSON)


async def _answer(
    request: web.Request, asked: OpenAIRequest, terms: Terms, clock: StreamClock, *, is_chat: bool
) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    if asked.priority:
        terms = replace(terms, priority=asked.priority)
    sent = submitted(gateway.client, asked.model, asked.bodies(), terms, stream=asked.stream)
    try:
        with gateway.running(), sent as generations:
            prefix = "chatcmpl" if is_chat else "cmpl"
            envelope = Envelope(asked, f"{prefix}-{generations[0].request_id.hex()}", is_chat)
            if asked.stream:
                events = OpenAIEvents(envelope)
                return await respond(request, asked.model, generations, events, clock, asked.headers)
            results = await collect(generations, gateway.metrics, asked.model, clock)
            return web.Response(body=envelope.body(results), content_type=JSON, headers=asked.headers)
    except MiiError as error:
        raise asked.rename(error) from None


def _model(deployment: DeploymentStatus, created: float) -> dict[str, Any]:
    name = deployment.name
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": OWNER,
        "root": name,
        "parent": None,
        "max_model_len": deployment.max_model_len,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": int(created),
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": False,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
