# SPDX-License-Identifier: Apache-2.0
"""GET /openapi.json: an OpenAPI 3.1 description of what this gateway serves, made from its routes and field tables.

Routes come from the router, bodies from the doors' tables (`openapi_requests`), errors from the exception tree, the
rest from `openapi_operations`; nothing is listed twice. Examples name a deployment that is served right now, so that
they can be sent as they are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mii_zmq.errors import BrokerUnavailable, MiiError
from mii_zmq.gateway import page
from mii_zmq.gateway.http_errors import ANTHROPIC_PREFIX, JSON, OPENAI_PREFIXES, openai_error
from mii_zmq.gateway.middlewares import REQUEST_ID_HEADER
from mii_zmq.gateway.openapi_answers import ANSWERS
from mii_zmq.gateway.openapi_operations import REQUEST_ID, TERMS, TEXT, TRACE_CONTEXT, Operation, operation_of
from mii_zmq.gateway.openapi_requests import Schema, component_schemas, ref
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.state import GATEWAY
from mii_zmq.version import __version__

OPENAPI_VERSION = "3.1.0"
IGNORED_FIELDS = "x-ignored-fields"
ANY_MODEL = "model"
"""In examples, while nothing is served."""
_WORD = re.compile(r"\w+")
_DESCRIPTION = (
    "Language models served by mii_zmq. A model is a deployment. Unknown fields and impossible values are refused with "
    "400 and named; a method that a path does not have with 405. A stream that has begun reports an error as its last "
    "event."
)


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    handler: Callable[..., Any]


async def openapi(request: web.Request) -> web.Response:
    """Handler of GET /openapi.json."""
    try:
        served = sorted((await request.app[GATEWAY].status()).deployments)
    except BrokerUnavailable:
        served = []
    body = _encoded(routes_of(request.app), served[0] if served else ANY_MODEL)
    return web.Response(body=body, content_type=JSON, headers={"Cache-Control": "no-cache"})


def routes_of(app: web.Application) -> tuple[Route, ...]:
    """In the order in which they were added; HEAD goes without saying where there is GET."""
    return tuple(
        Route(route.method, route.resource.canonical, route.handler)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    )


def describe(routes: tuple[Route, ...], model: str = ANY_MODEL) -> dict[str, Any]:
    """The document. `model` is the deployment that its examples name."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = operation_of(route.method, route.path, route.handler)
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, operation, model)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "mii_zmq",
            "version": __version__,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [],
        "paths": paths,
        "components": {"schemas": component_schemas(ANSWERS)},
    }


@functools.lru_cache(maxsize=4)
def _encoded(routes: tuple[Route, ...], model: str) -> bytes:
    return encode(describe(routes, model))


def _operation(route: Route, operation: Operation, model: str) -> dict[str, Any]:
    answers = {"200": _response("The answer.", operation.answers)}
    answers |= _errors(route.path, operation.errors)
    _add_errors_of_http(answers)
    for status, (meaning, bodies) in operation.others.items():
        answers[str(status)] = _response(meaning, bodies)
    found: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *_WORD.findall(route.path)]),
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": _parameters(route.path, operation, model),
        "responses": dict(sorted(answers.items())),
    }
    if operation.request is not None:
        answers["200"]["headers"][IGNORED_FIELDS] = {"description": "Fields that had no effect.", "schema": TEXT}
        content: dict[str, Any] = {"schema": operation.request}
        if operation.examples:
            named = {"model": model} if operation.names_model and "{deployment}" not in route.path else {}
            content["examples"] = {name: {"value": {**named, **body}} for name, body in operation.examples.items()}
        found["requestBody"] = {"required": operation.needs_body, "content": {JSON: content}}
    return found


def _parameters(path: str, operation: Operation, model: str) -> list[Schema]:
    examples = {"model": model, "deployment": model, "name": page.PAGE}
    found = []
    for part in path.split("/"):
        if part.startswith("{"):
            name = part.strip("{}")
            parameter: dict[str, Any] = {"name": name, "in": "path", "required": True}
            parameter["schema"] = {"type": "string", "minLength": 1}
            if name in examples:
                parameter["example"] = examples[name]
            found.append(parameter)
    return [*found, *operation.parameters, *(TERMS if operation.has_terms else ()), REQUEST_ID, *TRACE_CONTEXT]


def _errors(path: str, kinds: tuple[type[MiiError], ...]) -> dict[str, Any]:
    """The statuses of these errors, each with the codes that it can mean."""
    meanings: dict[int, dict[str, str]] = {}
    for kind in kinds:
        code = openai_error(kind(""))["error"]["code"]
        meaning = (kind.__doc__ or "").strip().partition("\n")[0]
        meanings.setdefault(kind.http_status, {}).setdefault(code, meaning)
    bodies = {JSON: ref(_error_schema(path))}
    return {
        str(status): _response(" ".join(f"`{code}`: {meaning}" for code, meaning in codes.items()), bodies, status)
        for status, codes in meanings.items()
    }


def _add_errors_of_http(answers: dict[str, Any]) -> None:
    """What the HTTP server answers by itself, before any route is looked up: plain text, and no request id."""
    plain = {"text/plain": {"schema": TEXT}}
    bad = answers.setdefault("400", {"description": ""})
    bad["description"] = (
        f"{bad['description']} Plain text: this is not HTTP, or a line of its head is too long.".strip()
    )
    bad["content"] = bad.get("content", {}) | plain
    answers["417"] = {"description": "An `Expect` header that is not 100-continue.", "content": plain}


def _error_schema(path: str) -> str:
    """As `http_errors.error_response` decides."""
    if path.startswith(ANTHROPIC_PREFIX):
        return "AnthropicErrorAnswer"
    return "OpenAIErrorAnswer" if path.startswith(OPENAI_PREFIXES) else "MiiErrorAnswer"


def _response(meaning: str, bodies: Any, status: int = 200) -> dict[str, Any]:
    headers = {REQUEST_ID_HEADER: {"required": status != 400, "schema": TEXT}}
    if status in (429, 503):
        headers["Retry-After"] = {"required": True, "schema": {"type": "integer", "minimum": 1}}
    found: dict[str, Any] = {"description": meaning, "headers": headers}
    if bodies:
        found["content"] = {kind: {"schema": schema} for kind, schema in bodies.items()}
    return found
