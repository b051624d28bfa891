# SPDX-License-Identifier: Apache-2.0
"""Bytes on their way to a client that may read slowly, or not at all: streams and whole answers alike.

What a client does not take stays in this process's memory, so everything is written in pieces, and each of them has the
gateway's write timeout: who reads slowly gets the whole, who takes nothing is cut. Knows no door and no format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from aiohttp import web

from mii_zmq.gateway.state import GATEWAY

UNTIMED_WRITE_BYTES = 16 * 1024
"""A write of at most this much into an empty buffer cannot block (transports block at 64 KiB): no timer is needed."""
PIECE_BYTES = 64 * 1024
"""Of a whole answer; what a reader has to take within the write timeout."""


class ReaderGone(ConnectionError):
    """The client does not read, or is not there."""


class Delivery:
    """One response; its headers leave with its first bytes."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._request = request
        self._response = response

    @property
    def is_started(self) -> bool:
        return self._response.prepared

    async def send(self, data: bytes | memoryview) -> None:
        """Raises ConnectionError when the client is gone or did not read in time."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ReaderGone("the client is gone")
        if len(data) <= UNTIMED_WRITE_BYTES and transport.get_write_buffer_size() == 0:
            await self._response.write(data)
            return
        await self._in_time(self._response.write(data))

    async def finish(self) -> web.StreamResponse:
        """Send what is left of the response. Raises as `send`."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._in_time(self._response.write_eof())
        return self._response

    async def _in_time(self, writing: Awaitable[None]) -> None:
        gateway, transport = self._request.app[GATEWAY], self._request.transport
        try:
            async with asyncio.timeout(gateway.write_timeout_s):
                await writing
        except TimeoutError:
            if transport is not None:
                transport.abort()
            gateway.metrics.count_slow_reader()
            raise ReaderGone(f"the client has not read enough for {gateway.write_timeout_s:g} s") from None


async def deliver(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Send a whole response; one that is on its way already is left alone.

    Raises:
        ConnectionError: the client is gone or did not read in time.
    """
    if response.prepared:
        return response
    body = response.body if isinstance(response, web.Response) else None
    if not isinstance(body, bytes) or len(body) <= PIECE_BYTES or request.method == "HEAD":
        return await Delivery(request, response).finish()
    pieces = web.StreamResponse(status=response.status, reason=response.reason, headers=response.headers)
    pieces.content_length = len(body)
    delivery = Delivery(request, pieces)
    with memoryview(body) as view:
        for begin in range(0, len(view), PIECE_BYTES):
            await delivery.send(view[begin : begin + PIECE_BYTES])
    return await delivery.finish()
