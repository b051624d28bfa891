# SPDX-License-Identifier: Apache-2.0
"""Around every request: an id, a count, an answer to whatever went wrong, and no service to foreign web pages.

`MIDDLEWARES` is in calling order, outermost first. An error that reaches this module met a response whose first byte
was not sent; a started stream reports its errors itself.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from mii_zmq.errors import InternalError, MiiError
from mii_zmq.gateway.http_errors import ForbiddenOrigin, MethodNotAllowed, NotFound, error_response
from mii_zmq.gateway.state import GATEWAY

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
REQUEST_ID_HEADER = "X-Request-ID"
CLIENT_GONE = "499"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Takes the client's request id where it is harmless, else makes one; `add_headers` sends it back.

    The door is told that a header has come.
    """
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    door = request.app[GATEWAY].door
    if door is None:
        return await handler(request)
    with door.serving(request.transport):
        return await handler(request)


@web.middleware
async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
    counts = request.app[GATEWAY].metrics.http_requests
    try:
        response = await handler(request)
    except (asyncio.CancelledError, ConnectionError):
        counts[route_of(request), CLIENT_GONE] += 1
        raise
    counts[route_of(request), str(response.status)] += 1
    return response


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except MiiError as error:
        if isinstance(error, InternalError):
            log.error("request %s: %s", request[REQUEST_ID], error)
        return error_response(request, error)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        answer = MethodNotAllowed(f"{request.method} is not allowed here; allowed: {allowed}")
        return error_response(request, answer, {"Allow": allowed})
    except web.HTTPNotFound:
        return error_response(request, NotFound("there is nothing at this path; see / for what there is"))
    except web.HTTPException:
        raise
    except ConnectionError:
        raise
    except Exception:
        log.exception("request %s failed", request[REQUEST_ID])
        return error_response(request, InternalError("internal error; the gateway's log has the details"))


@web.middleware
async def refuse_cross_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A browser names the page's origin; a page of another host must not reach a server on the user's machine."""
    origin = request.headers.get("Origin")
    if origin is not None and _authority(origin) != request.headers.get("Host", "").lower():
        raise ForbiddenOrigin("requests from web pages of another origin are refused")
    return await handler(request)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler, before the headers of any response leave."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[REQUEST_ID_HEADER] = request_id
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Server"] = "mii_zmq"
    if request.app[GATEWAY].is_leaving:
        response.force_close()
        response.headers["Connection"] = "close"  # aiohttp has written its own by now


def route_of(request: web.Request) -> str:
    """The route's pattern, a label of bounded variety."""
    resource = request.match_info.route.resource
    return "unmatched" if resource is None else resource.canonical


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


MIDDLEWARES = (identify, count, answer_errors, refuse_cross_origin)
