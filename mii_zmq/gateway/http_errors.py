# SPDX-License-Identifier: Apache-2.0
"""Errors that exist only in HTTP, and the three shapes in which the doors answer any error.

Anthropic's door (`/v1/messages...`) answers with Anthropic's error object, OpenAI's (the rest of `/v1/...`) with
OpenAI's, everything else with MII's `{"message": ...}`. A peer
that should come back later gets `Retry-After`. Knows nothing of requests that went well.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from aiohttp import web

from mii_zmq.errors import MiiError, RequestError

OPENAI_PREFIXES = ("/v1/", "/v2/", "/tokenize", "/detokenize", "/score", "/rerank")
ANTHROPIC_PREFIX = "/v1/messages"
JSON = "application/json"
_OPENAI_CODES = {"unknown_deployment": "model_not_found", "tenant_overloaded": "rate_limit_exceeded"}
_OPENAI_TYPES = {403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class UnsupportedMediaType(RequestError):
    """The body is not plain JSON (content type, compression)."""

    code = "unsupported_media_type"
    http_status = 415


class BodyTimeout(RequestError):
    """The body did not arrive in time."""

    code = "body_timeout"
    http_status = 408


class ForbiddenOrigin(RequestError):
    """A web page of another origin sent the request."""

    code = "forbidden_origin"
    http_status = 403


class EndpointDisabled(RequestError):
    """The gateway was started without what this asks for."""

    code = "endpoint_disabled"
    http_status = 403


class NotFound(RequestError):
    """No such path."""

    code = "not_found"
    http_status = 404


class MethodNotAllowed(RequestError):
    """The path exists, but not for this method."""

    code = "method_not_allowed"
    http_status = 405


def openai_error(error: MiiError) -> dict[str, Any]:
    """OpenAI's error object, as a response body and as an event of a stream."""
    status = error.http_status
    kind = "server_error" if status >= 500 else _OPENAI_TYPES.get(status, "invalid_request_error")
    code = _OPENAI_CODES.get(error.code, error.code)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def anthropic_error(error: MiiError) -> dict[str, Any]:
    """Anthropic's error object, as a response body and as an event of a stream."""
    status = error.http_status
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def mii_message(message: str) -> bytes:
    """MII's error body, in its exact spelling."""
    return json.dumps({"message": message}).encode() + b"\n"


def error_response(request: web.Request, error: MiiError, headers: dict[str, str] | None = None) -> web.Response:
    """The answer to a request that failed before its first byte; the connection closes where the body is unread."""
    if request.path.startswith(ANTHROPIC_PREFIX):
        body = msgspec.json.encode(anthropic_error(error))
    elif request.path.startswith(OPENAI_PREFIXES):
        body = msgspec.json.encode(openai_error(error))
    else:
        body = mii_message(error.message)
    response = web.Response(status=error.http_status, body=body, content_type=JSON, headers=headers)
    if error.http_status in (429, 503):
        response.headers["Retry-After"] = str(max(1, -(-(error.retry_after_ms or 0) // 1000)))
    if request.body_exists and not request.content.is_eof():
        response.force_close()
    return response
