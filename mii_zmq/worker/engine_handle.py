# SPDX-License-Identifier: Apache-2.0
"""The actor's hold on its engine process: starts it, talks to it over the private channel, and sees it end.

The engine's loss is noticed at once, through the end of its announcement pipe, whatever ended it. A lost connection
means a lost group: nothing ever connects a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from mii_zmq import transport
from mii_zmq.command_line import to_arguments
from mii_zmq.config import EngineConfig
from mii_zmq.errors import InternalError, MiiError, StartupError
from mii_zmq.process import describe_exit, spawn
from mii_zmq.worker.engine_channel import (
    AddSequence,
    CancelSequences,
    EngineFailed,
    FromEngine,
    ResetPrefixCache,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
)
from mii_zmq.worker.plan import SequenceRequest

EXIT_POLL_S = 0.01
EXIT_CODE_WAIT_S = 1.0
MAX_ANNOUNCED_BYTES = 2**16
FAILURE_WAIT_S = 0.2
"""How long an engine that has exited may still have its last message under way."""

log = logging.getLogger(__name__)


class EngineHandle:
    """One engine process. Belongs to the event loop's thread, which must live as long as the engine should."""

    def __init__(self, context: Any, config: EngineConfig, on_message: Callable[[FromEngine], None]) -> None:
        self.lost: asyncio.Future[MiiError] = asyncio.get_running_loop().create_future()
        """Why the engine is gone; set once, also when `stop` ended it."""
        self._on_message = on_message
        self._unsent_cancels: list[int] = []
        self._watcher: asyncio.Task[None] | None = None
        socket, endpoint = transport.bind_pair(context)
        self._socket = transport.AsyncSocket(socket, self._on_frames)
        self._announced = b""
        try:
            self._child = spawn(
                "mii_zmq.worker.engine_process", [f"--endpoint={endpoint}", *to_arguments(config)], "engine"
            )
        except BaseException:
            self._socket.close(linger_ms=0)
            raise
        os.set_blocking(self._child.announce_fd, False)
        asyncio.get_running_loop().add_reader(self._child.announce_fd, self._on_announce_pipe)

    @property
    def pid(self) -> int:
        return self._child.pid

    def add(self, request: SequenceRequest) -> None:
        """Raises PeerFull when the engine has not read for so long that its queue is full."""
        self._send(AddSequence(request))

    def reset_prefix_cache(self, number: int) -> None:
        """Answered by PrefixCacheReset; raises PeerFull or PeerGone when the engine does not read."""
        self._send(ResetPrefixCache(number))

    def cancel(self, seq_ids: Sequence[int]) -> None:
        """Never lost: what the queue does not take now is sent with the engine's next message."""
        self._unsent_cancels.extend(seq_ids)
        try:
            self._send(CancelSequences(self._unsent_cancels))
        except (transport.PeerFull, transport.PeerGone):
            return
        self._unsent_cancels = []

    def declare_lost(self, error: MiiError) -> None:
        """Kill an engine that still runs but does not work."""
        self._lose(error)
        self._child.process.kill()

    async def stop(self, timeout_s: float = 5.0) -> int:
        """End the process in order if it listens, by force if not. Returns its exit code."""
        if self._child.is_alive:
            try:
                self._send(Shutdown())
            except (transport.PeerFull, transport.PeerGone):
                self._child.process.kill()
        await self._wait_exit(timeout_s)
        return self.kill()

    def kill(self) -> int:
        """End the process at once and close everything. Returns its exit code."""
        if self._child.announce_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._child.announce_fd)
        if self._watcher is not None:
            self._watcher.cancel()
        self._child.kill()
        self._socket.close(linger_ms=0)
        return self._child.process.returncode

    def _send(self, message: ToEngine) -> None:
        self._socket.send(encode(message))

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            message = decode_from_engine(frames)
            if isinstance(message, EngineFailed):
                self._lose(message.error)
                return
            self._on_message(message)
        except Exception as error:
            log.exception("the actor failed on a message of its engine")
            self._lose(InternalError(f"the actor failed on a message of its engine: {error}"))
        if self._unsent_cancels:
            self.cancel(())

    def _on_announce_pipe(self) -> None:
        try:
            data = os.read(self._child.announce_fd, 65536)
        except BlockingIOError:
            return
        if data:
            self._announced = (self._announced + data)[-MAX_ANNOUNCED_BYTES:]
            return
        asyncio.get_running_loop().remove_reader(self._child.announce_fd)
        self._watcher = asyncio.ensure_future(self._report_exit())

    async def _report_exit(self) -> None:
        await self._wait_exit(EXIT_CODE_WAIT_S)
        error = self._announced_error()
        if error is not None:
            self._lose(InternalError(error))
            return
        await asyncio.wait([self.lost], timeout=FAILURE_WAIT_S)
        self._lose(StartupError(f"the engine process {describe_exit(self._child)}"))

    def _announced_error(self) -> str | None:
        """Why an engine ended that had no time for a message: one of its threads hangs, or a rank of its is lost."""
        for line in reversed(self._announced.splitlines()):
            with contextlib.suppress(ValueError):
                error = json.loads(line).get("error")
                if error is not None:
                    return str(error)
        return None

    async def _wait_exit(self, timeout_s: float) -> None:
        for _ in range(int(timeout_s / EXIT_POLL_S)):
            if not self._child.is_alive:
                return
            await asyncio.sleep(EXIT_POLL_S)

    def _lose(self, error: MiiError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)
