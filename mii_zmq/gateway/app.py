# SPDX-License-Identifier: Apache-2.0
"""Puts the gateway together: routes, middlewares, the broker client's life, and how the server treats sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiohttp import http_exceptions, web

from mii_zmq.errors import BrokerUnavailable, StartupError
from mii_zmq.gateway import admin_api, anthropic_api, embeddings_api, health, openai_api, openapi, page, rest, token_api
from mii_zmq.gateway.door import Door
from mii_zmq.gateway.middlewares import MIDDLEWARES, add_headers
from mii_zmq.gateway.state import GATEWAY, Gateway

if TYPE_CHECKING:
    from mii_zmq.client import AsyncClient
    from mii_zmq.config import GatewayConfig
    from mii_zmq.tracing import Tracing

KEEPALIVE_TIMEOUT_S = 75.0
LINGERING_S = 2.0
"""How long the rest of a refused body is read and thrown away, so that the client sees the answer."""
SEND_BUFFER_BYTES = 64 * 1024
"""Kernel buffer per connection: what a reader that does not read can pile up there."""
BACKLOG = 1024
CONNECT_ATTEMPT_S = 10.0

log = logging.getLogger(__name__)


def make_app(config: GatewayConfig, client: AsyncClient, tracing: Tracing | None = None) -> web.Application:
    """The application owns `client`: it connects it in the background and closes it at the end. `tracing` is not its
    to close."""
    app = web.Application(middlewares=MIDDLEWARES)
    app[GATEWAY] = Gateway(config, client, tracing)
    app.add_routes(
        [
            *page.routes(),
            web.get("/openapi.json", openapi.openapi),
            web.get("/healthz", health.healthz),
            web.get("/health", health.ready),
            web.get("/health/live", health.live),
            web.get("/health/ready", health.ready),
            web.get("/health/started", health.started),
            web.get("/metrics", health.metrics),
            web.post("/mii/{deployment:.+}", rest.generate),
            web.get("/v1/models", openai_api.list_models),
            web.get("/v1/models/{model:.+}", openai_api.get_model),
            web.post("/v1/chat/completions", openai_api.chat_completions),
            web.post("/v1/completions", openai_api.completions),
            web.post("/v1/responses", openai_api.responses),
            web.post("/v1/embeddings", embeddings_api.embeddings),
            web.post("/score", embeddings_api.score),
            web.post("/v1/score", embeddings_api.score),
            web.post("/rerank", embeddings_api.rerank),
            web.post("/v1/rerank", embeddings_api.rerank),
            web.post("/v2/rerank", embeddings_api.rerank),
            web.post("/v1/messages", anthropic_api.messages),
            web.post("/v1/messages/count_tokens", anthropic_api.count_tokens),
            web.post("/abort_request", admin_api.abort_request),
            web.post("/reset_prefix_cache", admin_api.reset_prefix_cache),
            web.post("/tokenize", token_api.tokenize),
            web.post("/detokenize", token_api.detokenize),
        ]
    )
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_broker_client)
    return app


class _NoNoise(logging.Filter):
    """What is no HTTP is answered with 400, and clients leave when they like: no tracebacks in the log for either."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (http_exceptions.HttpProcessingError, ConnectionError))


_NO_NOISE = _NoNoise()


async def open_door(runner: web.AppRunner, listener: socket.socket) -> Door:
    """Serve the application of `runner` (which has been set up) on `listener`."""
    server = runner.server
    assert server is not None
    gateway = runner.app[GATEWAY]
    door = Door(listener, server, on_unread=gateway.metrics.count_slow_reader, unread_timeout_s=gateway.write_timeout_s)
    gateway.door = door
    await door.open(BACKLOG)
    return door


def make_runner(app: web.Application) -> web.AppRunner:
    """A vanished client cancels its handler; bodies arrive as they were sent (nothing is decompressed)."""
    logging.getLogger("aiohttp.server").addFilter(_NO_NOISE)
    return web.AppRunner(
        app,
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        lingering_time=LINGERING_S,
        auto_decompress=False,
        access_log=None,
        shutdown_timeout=1.0,
    )


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """A bound, listening socket; connections inherit its small send buffer.

    `share`: bound together with others that say so too, and not listening yet, so that they get all connections until
    the door opens.

    Raises:
        StartupError: the address is taken or not ours.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
    except (OSError, UnicodeError) as error:
        raise StartupError(f"cannot listen on {host}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        if not share:
            listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port (0: any free one) or --host"
        ) from None
    return listener


async def _broker_client(app: web.Application) -> AsyncIterator[None]:
    client = app[GATEWAY].client
    connecting = asyncio.create_task(_connect(client))
    lag = app[GATEWAY].loop_lag
    lag.start()
    yield
    lag.stop()
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await client.close()


async def _connect(client: AsyncClient) -> None:
    while True:
        try:
            await client.connect(CONNECT_ATTEMPT_S)
        except BrokerUnavailable as error:
            log.warning("%s; still trying", error)
        else:
            log.info("connected to the broker")
            return
