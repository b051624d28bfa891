# SPDX-License-Identifier: Apache-2.0
"""Sending to peers that may be gone or slow. Knows no sockets: it is given the sending function and the time.

A peer whose queue is full gets a bounded backlog, so that its messages stay in order; past the bound in messages,
bytes or time it is given up. Nothing is ever dropped from the middle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mii_zmq.broker.records import Address
from mii_zmq.transport import PeerFull, PeerGone

MAX_BACKLOG_MESSAGES = 4096
MAX_BACKLOG_BYTES = 16 * 2**20
MAX_BACKLOG_S = 10.0


@dataclass(slots=True)
class _Backlog:
    since: float
    num_bytes: int = 0
    messages: deque[Sequence[bytes]] = field(default_factory=deque)


class Outbox:
    """The outgoing messages of one ROUTER."""

    def __init__(self, send: Callable[[Sequence[bytes]], None]) -> None:
        self._send = send
        self._backlogs: dict[Address, _Backlog] = {}
        self.num_full = 0
        self.num_unroutable = 0
        self.num_slow = 0

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlogs)

    def send(self, address: Address, frames: Sequence[bytes], now: float) -> bool:
        """Send or keep a message. False: the peer is gone, or was given up; it gets nothing more."""
        backlog = self._backlogs.get(address)
        if backlog is None:
            try:
                self._send([*address, *frames])
                return True
            except PeerGone:
                self.num_unroutable += 1
                return False
            except PeerFull:
                self.num_full += 1
                backlog = self._backlogs[address] = _Backlog(now)
        backlog.messages.append(frames)
        backlog.num_bytes += sum(map(len, frames))
        if len(backlog.messages) > MAX_BACKLOG_MESSAGES or backlog.num_bytes > MAX_BACKLOG_BYTES:
            return self._give_up(address)
        return True

    def retry(self, now: float) -> list[Address]:
        """Try the backlogs again; returns the peers that are gone or were given up."""
        return [address for address in list(self._backlogs) if not self._retry(address, now)]

    def _retry(self, address: Address, now: float) -> bool:
        backlog = self._backlogs[address]
        while backlog.messages:
            try:
                self._send([*address, *backlog.messages[0]])
            except PeerGone:
                self.num_unroutable += 1
                del self._backlogs[address]
                return False
            except PeerFull:
                return now - backlog.since <= MAX_BACKLOG_S or self._give_up(address)
            sent = backlog.messages.popleft()
            backlog.num_bytes -= sum(map(len, sent))
            backlog.since = now
        del self._backlogs[address]
        return True

    def _give_up(self, address: Address) -> bool:
        self.num_slow += 1
        del self._backlogs[address]
        return False
