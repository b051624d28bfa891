# SPDX-License-Identifier: Apache-2.0
"""OpenAI's door: /v1/models, /v1/chat/completions, /v1/completions and /v1/responses, streamed and not.

A model is a deployment. Handlers only; requests are understood in `openai_schemas` and `responses_schemas`, fields are
listed in `openai_fields` and `responses_fields`, answers made in `openai_answers` and `responses_answers`.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from mii_zmq.errors import UnknownDeployment
from mii_zmq.gateway.broker_status import DeploymentStatus
from mii_zmq.gateway.http_errors import JSON
from mii_zmq.gateway.openai_answers import ChatAnswer, CompletionAnswer
from mii_zmq.gateway.openai_schemas import OWNER, parse_chat, parse_completion
from mii_zmq.gateway.responses_answers import ResponsesAnswer
from mii_zmq.gateway.responses_schemas import parse_responses
from mii_zmq.gateway.serving import serve
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.state import GATEWAY


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Handler of POST /v1/chat/completions."""
    return await serve(request, parse_chat, ChatAnswer)


async def completions(request: web.Request) -> web.StreamResponse:
    """Handler of POST /v1/completions."""
    return await serve(request, parse_completion, CompletionAnswer)


async def responses(request: web.Request) -> web.StreamResponse:
    """Handler of POST /v1/responses."""
    return await serve(request, parse_responses, ResponsesAnswer)


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
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
