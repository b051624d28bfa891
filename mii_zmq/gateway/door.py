# SPDX-License-Identifier: Apache-2.0
"""The listening socket and the connections made through it: how long a header may take to come, and the rest of an
answer to be read; and how the door is closed.

Knows HTTP only as far as that: aiohttp's handler does the rest, behind a protocol object that passes everything on.
A header that is not complete in time (nobody sends one that slowly by mistake) ends the connection, as does the rest of
an answer, written into this process's buffer already, of which nothing is taken for a while. Closing first takes
in the connections that the kernel has made already, since those would be reset otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import cast

from aiohttp import web

HEADER_TIMEOUT_S = 20.0
"""From the connection, or from a header's first byte, to its last one."""


class Door:
    """Belongs to one event loop. `make_handler` gives one aiohttp handler per connection."""

    def __init__(
        self,
        listener: socket.socket,
        make_handler: Callable[[], web.RequestHandler],
        *,
        on_unread: Callable[[], None],
        unread_timeout_s: float,
    ) -> None:
        """`on_unread` hears of connections that are cut since nothing of the rest of an answer was read for so long."""
        self.header_timeout_s = HEADER_TIMEOUT_S
        self.unread_timeout_s, self.on_unread = unread_timeout_s, on_unread
        self.num_late_headers = 0
        self.connections: dict[asyncio.BaseTransport, Connection] = {}
        self._listener = listener
        self._make_handler = make_handler
        self._server: asyncio.AbstractServer | None = None

    async def open(self, backlog: int) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._make_connection, sock=self._listener, backlog=backlog)

    async def close(self) -> None:
        """Stop listening; every connection that was made is served. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        loop = asyncio.get_running_loop()
        made = []
        with contextlib.suppress(OSError):
            while True:
                made.append(self._listener.accept()[0])
        # Without a turn of the loop in between: nobody may come to the queue unseen.
        server.close()
        for connection in made:
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                await loop.connect_accepted_socket(self._make_connection, connection)

    def close_idle(self) -> None:
        """End the connections on which no request is under way."""
        for transport, connection in list(self.connections.items()):
            if connection.is_idle:
                connection.handler.close()
                # What it still has to send of the last answer is sent.
                transport.close()

    @contextlib.contextmanager
    def serving(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Around the handling of a request: its header is complete."""
        connection = self.connections.get(transport) if transport is not None else None
        if connection is None:
            yield
            return
        connection.header_is_complete()
        try:
            yield
        finally:
            connection.is_serving = False
            connection.is_idle = True
            connection.expect_reading()

    def _make_connection(self) -> Connection:
        return Connection(self, self._make_handler())


class Connection(asyncio.Protocol):
    """One connection; watches over the header that is arriving."""

    def __init__(self, door: Door, handler: web.RequestHandler) -> None:
        self.is_idle = True
        """Nothing of a request has come, or the last one has been answered."""
        self.is_serving = False
        self._door = door
        self.handler = handler
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def header_is_complete(self) -> None:
        self.is_serving = True
        # It may have come while the request before it was answered.
        self.is_idle = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Whoever writes the next answer watches; what is left of that one is another matter than what was left before.
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def expect_reading(self) -> None:
        """An answer has been written; what is left of it is watched until the client has taken it."""
        num_unread = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if num_unread:
            loop = asyncio.get_running_loop()
            self._unread_timer = loop.call_later(self._door.unread_timeout_s, self._on_unread, num_unread)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._door.connections[transport] = self
        self._expect_header()
        self.handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self.is_serving:
            self.is_idle = False
            if self._timer is None:
                self._expect_header()
        self.handler.data_received(data)

    def eof_received(self) -> None:
        self.handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        if self._transport is not None:
            self._door.connections.pop(self._transport, None)
        self.handler.connection_lost(exc)

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()

    def _expect_header(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._door.header_timeout_s, self._on_late)

    def _on_late(self) -> None:
        self._timer = None
        self._door.num_late_headers += 1
        if self._transport is not None:
            self._transport.abort()

    def _on_unread(self, num_before: int) -> None:
        self._unread_timer = None
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() < num_before:
            self.expect_reading()
        else:
            self._door.on_unread()
            self._transport.abort()
