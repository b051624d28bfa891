# SPDX-License-Identifier: Apache-2.0
"""Around every request: an id, a line in the log, a span, a count, an answer to whatever went wrong, and no service to
foreign web pages.

`MIDDLEWARES` is in calling order, outermost first. An error that reaches this module met a response whose first byte
was not sent; a started stream reports its errors itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

from mii_zmq.errors import InternalError, MiiError
from mii_zmq.gateway import access_log, request_span
from mii_zmq.gateway.delivery import deliver
from mii_zmq.gateway.http_errors import ForbiddenOrigin, MethodNotAllowed, NotFound, error_response
from mii_zmq.gateway.request_record import RECORD, RequestRecord
from mii_zmq.gateway.state import GATEWAY
from mii_zmq.logs import about
from mii_zmq.trace_context import request_name

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
REQUEST_ID_HEADER = "X-Request-ID"
CLIENT_GONE = "499"


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Takes the client's request id where it is harmless, else makes one; `add_headers` sends it back.

    The door is told that a header has come.
    """
    gateway = request.app[GATEWAY]
    request_id = request_name(request.headers.get(REQUEST_ID_HEADER), uuid.uuid4().bytes)
    record = RequestRecord(request_id, time.monotonic())
    request[REQUEST_ID], request[RECORD] = request_id, record
    request_span.enter(request, record, gateway.tracing)
    trace_id = None if record.trace is None else record.trace.trace_id
    serving = contextlib.nullcontext() if gateway.door is None else gateway.door.serving(request.transport)
    with about(request_id=request_id, trace_id=trace_id), serving:
        return await handler(request)


@web.middleware
async def account(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Says at the end how the request went: in the access log, and as a span."""
    record, status = request[RECORD], 500
    try:
        response = await handler(request)
        status = response.status
    except (asyncio.CancelledError, ConnectionError):
        status, record.is_gone = int(CLIENT_GONE), True
        raise
    except web.HTTPException as error:
        status = error.status
        raise
    finally:
        _account(request, record, status, time.monotonic())
    return response


def _account(request: web.Request, record: RequestRecord, status: int, now: float) -> None:
    gateway = request.app[GATEWAY]
    try:
        if gateway.config.access_log:
            access_log.write_line(request, record, status, now - record.started)
        if gateway.tracing is not None:
            request_span.leave(request, record, gateway.tracing, route_of(request), status, now)
    except Exception:
        # The answer is not to suffer for it.
        log.exception("request %s could not be accounted for", record.request_id)


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
async def send_whole(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Sends what is no stream, errors included, within the time that a reader has; what follows knows how that went."""
    return await deliver(request, await handler(request))


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except MiiError as error:
        if isinstance(error, InternalError):
            log.error("request %s: %s", request[REQUEST_ID], error)
        return _answer(request, error)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        answer = MethodNotAllowed(f"{request.method} is not allowed here; allowed: {allowed}")
        return _answer(request, answer, {"Allow": allowed})
    except web.HTTPNotFound:
        return _answer(request, NotFound("there is nothing at this path; see / for what there is"))
    except web.HTTPException:
        raise
    except ConnectionError:
        raise
    except Exception:
        log.exception("request %s failed", request[REQUEST_ID])
        return _answer(request, InternalError("internal error; the gateway's log has the details"))


def _answer(request: web.Request, error: MiiError, headers: dict[str, str] | None = None) -> web.Response:
    request[RECORD].error_code = error.code
    return error_response(request, error, headers)


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


MIDDLEWARES = (identify, account, count, send_whole, answer_errors, refuse_cross_origin)
