# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence

import pytest

from mii_zmq.broker.outbox import MAX_BACKLOG_MESSAGES, MAX_BACKLOG_S, Outbox
from mii_zmq.transport import PeerFull, PeerGone

PEER = (b"p", b"")


class Wire:
    """A ROUTER of which the state of its one peer is set by hand."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []
        self.problem: type[Exception] | None = None

    def send(self, frames: Sequence[bytes]) -> None:
        if self.problem is not None:
            raise self.problem("no")
        self.sent.append(list(frames))


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_full_peer_gets_everything_later_in_order(wire: Wire) -> None:
    outbox = Outbox(wire.send)
    assert outbox.send(PEER, [b"1"], 0)
    wire.problem = PeerFull
    assert outbox.send(PEER, [b"2"], 0)
    wire.problem = None
    assert outbox.send(PEER, [b"3"], 0)
    assert wire.sent == [[b"p", b"", b"1"]]
    assert outbox.has_backlog
    assert outbox.retry(1) == []
    assert [frames[-1] for frames in wire.sent] == [b"1", b"2", b"3"]
    assert not outbox.has_backlog
    assert outbox.num_full == 1


def test_gone_peer(wire: Wire) -> None:
    outbox = Outbox(wire.send)
    wire.problem = PeerFull
    assert outbox.send(PEER, [b"1"], 0)
    wire.problem = PeerGone
    assert outbox.retry(0) == [PEER]
    assert not outbox.send(PEER, [b"2"], 0)
    assert outbox.num_unroutable == 2


def test_backlog_is_bounded_in_messages_bytes_and_time(wire: Wire) -> None:
    outbox = Outbox(wire.send)
    wire.problem = PeerFull
    assert all(outbox.send(PEER, [b"x"], 0) for _ in range(MAX_BACKLOG_MESSAGES))
    assert not outbox.send(PEER, [b"x"], 0)
    assert outbox.send(PEER, [bytes(2**23)], 0)
    assert not outbox.send(PEER, [bytes(2**23 + 1)], 0)
    assert outbox.send(PEER, [b"x"], 0)
    assert outbox.retry(MAX_BACKLOG_S) == []
    assert outbox.retry(MAX_BACKLOG_S + 0.1) == [PEER]
    assert outbox.num_slow == 3
