# SPDX-License-Identifier: Apache-2.0
"""The one place that touches zmq: socket options, ownership, and the bridge to asyncio.

Every socket gets finite high-water marks and a short linger, and where strangers may be at the other end a maximum
frame size and ZMTP heartbeats. ROUTER sockets run with ROUTER_MANDATORY and every send is non-blocking, so a peer that
is gone (`PeerGone`) or full (`PeerFull`) is an answer and never silence. A socket belongs to one thread; `AsyncSocket`
to one event loop. Routing ids are never set by us, so that they cannot collide, and a ROUTER hands on only messages
whose routing id libzmq itself made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket as stdlib_socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from mii_zmq.errors import ConfigError, MiiError
from mii_zmq.protocol import MAX_RAW_BYTES

HIGH_WATER_MARK = 10_000
MAX_FRAME_BYTES = MAX_RAW_BYTES
MAX_IPC_PATH = 100
"""A Unix socket path must fit sun_path (108 bytes)."""
_MESSAGES_PER_TURN = 256
"""Messages read before other callbacks of the event loop get their turn."""
_TURN_S = 0.02
"""The same in time: where handling a message is slow, timers and other sockets do not wait for hundreds of them."""

Frames = Sequence[bytes]


class PeerGone(MiiError):
    """The routing id is no longer connected."""

    code = "peer_gone"


class PeerFull(MiiError):
    """The peer's queue is at its high-water mark; nothing was queued."""

    code = "peer_full"


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """One per process, made after any fork."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    return context


def bind_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> tuple[zmq.Socket[bytes], str]:
    """A ROUTER bound to `endpoint`; port 0 takes a free one. Returns the socket and the endpoint to announce."""
    socket = context.socket(zmq.ROUTER)
    _set_common(socket)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.ROUTER_HANDOVER, 0)
    socket.set(zmq.BACKLOG, 1024)
    return socket, _bind(socket, endpoint)


def connect_dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A DEALER connected to one endpoint (never several: a dead one would swallow its share of the messages)."""
    socket = context.socket(zmq.DEALER)
    _set_common(socket)
    socket.set(zmq.IMMEDIATE, 1)
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)
    socket.set(zmq.CONNECT_TIMEOUT, 3000)
    socket.connect(endpoint)
    return socket


def bind_pair(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], str]:
    """The parent's end of a private channel to a child: the actor's to its engine, rank 0's to another rank.

    An abstract socket: it has no file, which a killed process would leave behind. In place of a directory's mode, the
    kernel's word on who connects keeps other users out.
    """
    socket = context.socket(zmq.PAIR)
    _set_private(socket)
    socket.set(zmq.IPC_FILTER_UID, os.geteuid())
    return socket, _bind(socket, f"ipc://@mii_zmq-{os.getpid()}-{secrets.token_hex(8)}")


def connect_pair(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """The child's end of the private channel."""
    socket = context.socket(zmq.PAIR)
    _set_private(socket)
    socket.connect(endpoint)
    return socket


class AsyncSocket:
    """A zmq socket on the running event loop: received messages go to a callback, sends never wait.

    zmq signals readiness once per edge, so the socket is drained until empty, and checked again after every send.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._is_router = socket.type == zmq.ROUTER
        self._scheduled = False
        self._closed = False
        self._fd = int(socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._schedule()

    def send(self, frames: Frames) -> None:
        """Queue one message.

        Raises:
            PeerGone: a ROUTER has no such peer.
            PeerFull: the peer's queue (or, on a DEALER without connection, the socket) takes no more.
        """
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            raise PeerFull("the peer's queue is full") from None
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.ENOTSOCK, zmq.ETERM):
                raise PeerGone("the peer is not connected") from None
            raise
        finally:
            self._schedule()

    def close(self, linger_ms: int = 500) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._scheduled = True
            self._loop.call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        end = time.monotonic() + _TURN_S
        for _ in range(_MESSAGES_PER_TURN):
            # Asking also lets libzmq notice the end of a connection here, between two messages. Left to itself it looks
            # once per 100 frames received, and where that meets the middle of a message on a DEALER with IMMEDIATE, it
            # loses the rest of it and aborts the process after the next connection.
            if self._closed or not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                    return
                raise
            if not self._is_router or is_own_routing_id(frames[0]):
                try:
                    self._on_message(frames)
                except BaseException:
                    self._schedule()
                    raise
            if time.monotonic() > end:
                break
        self._schedule()


class BlockingSocket:
    """A zmq socket for a plain loop (the engine's): poll with a timeout, then read all there is."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def receive(self, timeout_ms: int = 0) -> list[bytes] | None:
        """The next message, or None when none came within `timeout_ms` (0: do not wait; -1: wait for ever)."""
        if timeout_ms != 0 and not self._socket.poll(timeout_ms):
            return None
        try:
            return self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def wait(self, timeout_ms: int, descriptors: Sequence[tuple[int, int]] = ()) -> None:
        """Wait until there is a message, or one of the other (file descriptor, `select.poll` events) is ready."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for fd, events in descriptors:
            poller.register(fd, events)
        poller.poll(timeout_ms)

    def send(self, frames: Frames) -> None:
        """Send one message; raises PeerFull when the peer has stopped reading for 10 s."""
        try:
            self._socket.send_multipart(frames)
        except zmq.Again:
            raise PeerFull("the peer has not read for 10 s") from None

    def try_send(self, frames: Frames) -> bool:
        """Send one message if that is possible now: a peer is connected and its queue has room."""
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 500) -> None:
        self._socket.close(linger=linger_ms)


def is_own_routing_id(routing_id: bytes) -> bool:
    """True for the five-byte ids that libzmq makes for peers that set none; others are dropped."""
    return len(routing_id) == 5 and routing_id[0] == 0


def close_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End the context; all sockets must have been closed."""
    context.destroy(linger=200)


def remove_socket_file(endpoint: str) -> None:
    """Delete the file of an ipc endpoint; zmq leaves it behind when the process was killed."""
    if endpoint.startswith("ipc://"):
        with contextlib.suppress(FileNotFoundError):
            Path(endpoint.removeprefix("ipc://")).unlink()


def _set_common(socket: zmq.Socket[bytes]) -> None:
    socket.set(zmq.LINGER, 500)
    socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.set(zmq.SNDTIMEO, 10_000)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, 5000)
    socket.set(zmq.HEARTBEAT_IVL, 2000)
    socket.set(zmq.HEARTBEAT_TIMEOUT, 6000)
    socket.set(zmq.HEARTBEAT_TTL, 10_000)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 60)


def _set_private(socket: zmq.Socket[bytes]) -> None:
    _set_common(socket)
    # A process that was stopped for a while must find its messages: no reconnection, which could lose some.
    socket.set(zmq.HEARTBEAT_IVL, 0)
    # No stranger is at the other end, and a plan holds all tokens of the sequences that start in its step.
    socket.set(zmq.MAXMSGSIZE, -1)


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and len(os.fsencode(path)) > MAX_IPC_PATH:
        socket.close(linger=0)
        raise ConfigError(
            f"the socket path {path} is longer than {MAX_IPC_PATH} bytes; set MII_ZMQ_RUN_DIR to a short one"
        )
    if _has_listener(endpoint):
        socket.close(linger=0)
        raise ConfigError(f"cannot listen on {endpoint}: another process does; choose another path")
    try:
        if endpoint.startswith("tcp://") and endpoint.endswith(":0"):
            socket.bind(endpoint[:-2] + ":*")
        else:
            socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}; choose another address or port") from None
    return bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def _has_listener(endpoint: str) -> bool:
    """True when a live process listens on an ipc endpoint: zmq would replace its socket file without a word."""
    if not endpoint.startswith("ipc://"):
        return False
    with stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM) as probe:
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            return False
        return True
