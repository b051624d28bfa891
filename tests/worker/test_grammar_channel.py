# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import msgpack
import pytest

from mii_zmq.errors import ProtocolError
from mii_zmq.worker.grammar_channel import GrammarChannel, socket_pair


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket_pair()
    with first, second:
        yield first, second


def test_messages_of_any_size_arrive_whole_and_sending_never_blocks(ends: tuple[socket.socket, socket.socket]):
    sender, receiver = GrammarChannel(ends[0]), GrammarChannel(ends[1])
    messages = [["masks", [[1, 2, bytes(range(256)) * 40_000]]], ["ping"], ["close", [1, 2]]]
    for kind, *values in messages:
        sender.send(kind, *values)
    assert sender.poll_events & select.POLLOUT
    received: list[object] = []
    while len(received) < 3:
        received += receiver.receive()
        sender.flush()
    assert received == messages
    assert sender.poll_events == select.POLLIN


def test_the_other_end_is_known_to_be_gone_when_all_was_read(ends: tuple[socket.socket, socket.socket]):
    sender, receiver = GrammarChannel(ends[0]), GrammarChannel(ends[1])
    sender.send("ready")
    sender.close()
    assert list(receiver.receive()) == [["ready"]]
    assert receiver.is_closed
    receiver.send("ping")
    assert list(receiver.receive()) == []


@pytest.mark.parametrize("value", [b"\xc1", msgpack.packb({"a": 1}), msgpack.packb([]), msgpack.packb([1])])
def test_what_is_no_message_is_refused(ends: tuple[socket.socket, socket.socket], value: bytes):
    receiver = GrammarChannel(ends[1])
    ends[0].sendall(len(value).to_bytes(4, "little") + value)
    with pytest.raises(ProtocolError):
        list(receiver.receive())
