# SPDX-License-Identifier: Apache-2.0
"""The page for people: chat and live status, and GET /status, the JSON that it (and `mii_zmq top`) shows.

The page is plain files in `page_files/`, read once; a request names one of them in a table, never a path on the disk.
Nothing is loaded from elsewhere, and the Content-Security-Policy has the browser refuse whatever would be: scripts and
styles of this origin only, none inline, and no text that becomes markup. Programs that ask for / get the JSON index.
"""

from __future__ import annotations

import functools
import hashlib
import time
from dataclasses import dataclass
from importlib import resources
from typing import Any

from aiohttp import web

from mii_zmq.gateway import health
from mii_zmq.gateway.http_errors import JSON, NotFound
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.state import GATEWAY

PAGE = "page.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""no-cache: kept, but asked for again by its ETag, so that an upgraded gateway is never shown by an older page."""


@dataclass(frozen=True, slots=True)
class PageFile:
    content_type: str
    body: bytes
    etag: str


def routes() -> list[web.RouteDef]:
    return [web.get("/", index), web.get("/page/{name}", static_file), web.get("/status", status)]


async def index(request: web.Request) -> web.StreamResponse:
    """Handler of GET /: the page where HTML is asked for, as browsers do, else the list of endpoints."""
    wants_page = "text/html" in request.headers.get("Accept", "")
    response = _answer(request, page_files()[PAGE]) if wants_page else await health.index(request)
    response.headers["Vary"] = "Accept"
    return response


async def static_file(request: web.Request) -> web.Response:
    """Handler of GET /page/{name}."""
    found = page_files().get(request.match_info["name"])
    if found is None:
        raise NotFound("the page has no such file")
    return _answer(request, found)


async def status(request: web.Request) -> web.Response:
    """Handler of GET /status: the broker's STATUS body (PROTOCOL.md; `epoch` in hex), its age, and the gateway's part.

    Shared with the probes and at most STATUS_MAX_AGE_S old. 503 while no broker answers.
    """
    gateway = request.app[GATEWAY]
    body: dict[str, Any] = dict((await gateway.status()).body)
    if isinstance(body.get("epoch"), bytes):
        body["epoch"] = body["epoch"].hex()
    own = {
        "uptime_s": time.time() - gateway.started_at,
        "num_in_flight": gateway.metrics.num_in_flight,
        "is_leaving": gateway.is_leaving,
        "event_loop_lag_s": gateway.loop_lag.worst_s,
    }
    answer = {"age_ms": int(gateway.status_age_s * 1000), "gateway": own, "broker": body}
    headers = {"Cache-Control": "no-store", "Cross-Origin-Resource-Policy": "same-origin"}
    return web.Response(body=encode(answer), content_type=JSON, headers=headers)


@functools.cache
def page_files() -> dict[str, PageFile]:
    """By name. Only the kinds in CONTENT_TYPES, so that an editor's leftovers are not served."""
    found = {}
    for path in (resources.files("mii_zmq.gateway") / "page_files").iterdir():
        content_type = CONTENT_TYPES.get(path.name[path.name.rfind(".") :])
        if content_type is not None and path.is_file():
            body = path.read_bytes()
            found[path.name] = PageFile(content_type, body, hashlib.sha256(body).hexdigest()[:32])
    return found


def _answer(request: web.Request, file: PageFile) -> web.Response:
    known = request.if_none_match or ()
    is_known = any(tag.value == file.etag for tag in known)
    headers = {**HEADERS, "Content-Type": file.content_type}
    response = web.Response(status=304, headers=HEADERS) if is_known else web.Response(body=file.body, headers=headers)
    response.etag = file.etag
    return response
