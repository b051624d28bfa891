# SPDX-License-Identifier: Apache-2.0
"""Truthful health: live means that the event loop moves, started that a model was loaded, ready that a request sent now
would be taken: a broker that does not shut down, a group that does not drain, and room in the queue.

`/healthz` keeps the original's path and body. `/health/ready?deployment=NAME` asks for one deployment.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from aiohttp import web

from mii_zmq.errors import BrokerUnavailable, Draining, MiiError, NoWorkers, UnknownDeployment
from mii_zmq.gateway.http_errors import JSON
from mii_zmq.gateway.metrics import CONTENT_TYPE
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.state import GATEWAY, Gateway


async def index(request: web.Request) -> web.Response:
    """Handler of GET / for programs; browsers get the page."""
    routes = [route for route in request.app.router.routes() if route.resource is not None and route.method != "HEAD"]
    facts = {
        "service": "mii_zmq gateway",
        "documentation": "/openapi.json describes all endpoints; README.md and PROTOCOL.md of mii_zmq tell the rest",
        "endpoints": [f"{route.method} {route.resource.canonical}" for route in routes if route.resource is not None],
    }
    return web.Response(body=encode(facts), content_type=JSON)


async def healthz(request: web.Request) -> web.Response:
    """Handler of GET /healthz: the original's "ok", but only while a broker is connected."""
    gateway = request.app[GATEWAY]
    is_well = gateway.client.is_connected and not gateway.is_leaving
    return web.Response(
        status=200 if is_well else 503, text="ok" if is_well else "not connected", content_type="text/html"
    )


async def live(request: web.Request) -> web.Response:
    """Handler of GET /health/live: 503 when the event loop was held up until just now."""
    lag = request.app[GATEWAY].loop_lag
    facts = {"event_loop_lag_s": round(lag.worst_s, 3)}
    if lag.is_moving:
        return _report(200, {"status": "live", **facts})
    return _report(503, {"status": "stalled", **facts})


async def started(request: web.Request) -> web.Response:
    """Handler of GET /health/started: some worker group has loaded its model and registered; then it stays so."""
    gateway = request.app[GATEWAY]
    if not gateway.was_ready:
        with contextlib.suppress(MiiError):
            await gateway.status()
    if gateway.was_ready:
        return _report(200, {"status": "started"})
    return _report(503, {"status": "starting", "message": "no worker group has registered with the broker yet"})


async def ready(request: web.Request) -> web.Response:
    """Handler of GET /health/ready and GET /health."""
    deployment = request.query.get("deployment")
    try:
        names = await _ready_deployments(request.app[GATEWAY], deployment)
    except UnknownDeployment:
        raise
    except MiiError as error:
        return _report(503, {"status": "not ready", "code": error.code, "message": error.message})
    return _report(200, {"status": "ready", "deployments": names})


async def metrics(request: web.Request) -> web.Response:
    """Handler of GET /metrics."""
    gateway = request.app[GATEWAY]
    try:
        status = await gateway.status()
    except MiiError:
        status = None
    own = {"event_loop_lag_seconds": gateway.loop_lag.worst_s, "open_fds": float(len(os.listdir("/proc/self/fd")))}
    page = gateway.metrics.render(status, gateway.client.is_connected, own)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})


async def _ready_deployments(gateway: Gateway, deployment: str | None) -> list[str]:
    if gateway.is_leaving:
        raise Draining("the gateway is shutting down")
    if not gateway.client.is_connected:
        raise BrokerUnavailable("the gateway has no connection to a broker")
    status = await gateway.status()
    if deployment is not None and deployment not in status.deployments:
        raise UnknownDeployment(f"there is no deployment {deployment[:200]!r}", param="deployment")
    asked = sorted(status.deployments) if deployment is None else [deployment]
    names = [name for name in asked if status.is_ready(name)]
    if not names:
        of = f" of deployment {deployment!r}" if deployment else ""
        raise NoWorkers(f"no worker group{of} can take a request: there is none, it drains, or its queue is full")
    return names


def _report(status: int, facts: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=encode(facts), content_type=JSON, headers={"Cache-Control": "no-store"})
