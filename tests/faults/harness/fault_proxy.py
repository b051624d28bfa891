# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that misbehaves on command: between any two of client, gateway, broker and worker.

Each direction (`to_server`, `to_client`) has its own `Line`: delay with jitter, a pause (bytes wait and arrive later,
as in a network partition), loss (bytes vanish; the connection is cut when the line heals, since TCP has no holes), a
rate in bytes per second, and a cut after a number of bytes. `is_half_open` hides the end of one side from the other.
Runs in a thread of its own, so that synchronous tests can use it; settings may change from any thread at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

CHUNK_BYTES = 65536
POLL_S = 0.005


@dataclass(slots=True)
class Line:
    """How one direction behaves. Plain attributes: the pumps look at them before every chunk."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """A further delay per chunk, drawn between 0 and this; bytes never overtake each other."""
    is_paused: bool = False
    """Nothing is read: bytes wait in the sender's and the kernel's buffers."""
    is_lossy: bool = False
    """Bytes are read and thrown away."""
    bytes_per_s: float | None = None
    cut_after: int | None = None
    """Bytes that still pass before both sides are reset."""
    num_bytes: int = 0
    """That have passed, over all connections."""
    num_lost: int = 0


@dataclass(slots=True, eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def abort(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()


class FaultProxy:
    """Listens on a free port of loopback and connects every connection to `target` ("tcp://HOST:PORT" or "HOST:PORT").

    Usable as a context manager.
    """

    def __init__(self, target: str, *, seed: int = 0) -> None:
        host, _, port = target.removeprefix("tcp://").removeprefix("http://").rstrip("/").rpartition(":")
        self._target = host, int(port)
        self.to_server, self.to_client = Line(), Line()
        self.is_half_open = False
        """The end of one side is not passed on: the other keeps a connection to nobody."""
        self.num_accepted = 0
        self._random = random.Random(seed)
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def lines(self) -> tuple[Line, Line]:
        return self.to_server, self.to_client

    @property
    def num_open(self) -> int:
        return len(self._connections)

    def partition(self, *, lossy: bool = False) -> None:
        """Nothing passes either way."""
        for line in self.lines:
            line.is_lossy, line.is_paused = lossy, not lossy

    def heal(self) -> None:
        """Everything passes again; connections that have lost bytes are reset."""
        had_losses = any(line.is_lossy and line.num_lost for line in self.lines)
        for line in self.lines:
            line.delay_s = line.jitter_s = 0.0
            line.is_paused = line.is_lossy = False
            line.bytes_per_s = line.cut_after = None
            line.num_lost = 0
        self.is_half_open = False
        if had_losses:
            self.cut()

    def cut(self) -> None:
        """Reset all connections."""
        self._loop.call_soon_threadsafe(self._cut)

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _cut(self) -> None:
        for connection in list(self._connections):
            connection.abort()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _end(self) -> None:
        self._server.close()
        tasks = [task for connection in self._connections for task in connection.tasks]
        self._cut()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, server_writer)
        self._connections.add(connection)
        connection.tasks = [
            asyncio.create_task(self._pump(reader, server_writer, self.to_server)),
            asyncio.create_task(self._pump(server_reader, writer, self.to_client)),
        ]
        try:
            await asyncio.gather(*connection.tasks, return_exceptions=True)
            while self.is_half_open:
                await asyncio.sleep(POLL_S)
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                while line.is_paused:
                    await asyncio.sleep(POLL_S)
                data = await reader.read(_chunk_bytes(line))
                if not data:
                    break
                while line.is_paused:
                    await asyncio.sleep(POLL_S)
                await self._pass_on(data, writer, line)
        while self.is_half_open:
            await asyncio.sleep(POLL_S)
        # One side has ended; a reset tells the other at once.
        if not writer.is_closing():
            writer.close()

    async def _pass_on(self, data: bytes, writer: asyncio.StreamWriter, line: Line) -> None:
        wait_s = line.delay_s + (self._random.uniform(0, line.jitter_s) if line.jitter_s else 0.0)
        if line.bytes_per_s is not None:
            wait_s += len(data) / line.bytes_per_s
        if wait_s:
            await asyncio.sleep(wait_s)
        if line.is_lossy:
            line.num_lost += len(data)
            return
        if line.cut_after is not None:
            data = data[: line.cut_after]
            line.cut_after -= len(data)
        if data:
            writer.write(data)
            line.num_bytes += len(data)
            await writer.drain()
        if line.cut_after == 0:
            line.cut_after = None
            self._cut()
            raise ConnectionResetError


def _chunk_bytes(line: Line) -> int:
    """With a rate, small enough for several chunks per second; with a limit, not beyond it."""
    if line.bytes_per_s is None:
        return CHUNK_BYTES
    return max(1, int(line.bytes_per_s / 10))
