# SPDX-License-Identifier: Apache-2.0
"""The private channel between an engine and its grammar process: messages of msgpack over a pair of connected sockets.

A message is its length in four bytes and one msgpack value `[kind, ...]`. The engine's end never blocks: what the
socket does not take now is kept, and sent when it has room. Both ends are always of the same version, so nothing is
negotiated; a message that does not decode is a bug (`ProtocolError`). Knows nothing of what the messages mean.

To the grammar process:

- `open`, seq_id, row of the `MaskTable` or nil, kind and text of the grammar, `SequenceLimits` as a map, output tokens:
  follow this sequence
- `advance`, [[seq_id, newest output token], ...]
- `close`, [seq_id, ...]: they have ended
- `ping`: answered by `pong`, when all before it is done

From it:

- `ready`: tokenizer and library are loaded
- `masks`, [[seq_id, number of output tokens, mask], ...]: what may come next. True: it is in the sequence's row; bytes:
  itself, where there is no row; nil: the output is complete
- `failed`, seq_id, error as `MiiError.to_wire`: this sequence cannot go on
- `pong`
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any

import msgpack

from mii_zmq.errors import ProtocolError
from mii_zmq.protocol import pack

MAX_MESSAGE_BYTES = 2**30
READ_BYTES = 2**20
_LENGTH = struct.Struct("<I")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends: ours, and one for a child to inherit."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class GrammarChannel:
    """One end. `send` never blocks; `receive` waits only where told to."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(False)
        self._unsent = bytearray()
        self._received = bytearray()
        self.is_closed = False
        """The other end is gone."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def poll_events(self) -> int:
        """What to wait for at `fileno` (see `select.poll`)."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def send(self, *message: Any) -> None:
        """Queue one message, and send what there is room for."""
        data = pack(list(message))
        self._unsent += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send what is queued as far as there is room."""
        while self._unsent and not self.is_closed:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.is_closed = True
                return
            del self._unsent[:sent]

    def receive(self) -> list[list[Any]]:
        """The messages that are there.

        Raises:
            ProtocolError: one of them does not decode.
        """
        while not self.is_closed:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_closed = True
            self._received += data
        messages = []
        begin, end = 0, len(self._received)
        while end - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, begin)
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a message of {length} bytes on the grammar channel")
            if end - begin - _LENGTH.size < length:
                break
            begin += _LENGTH.size + length
            messages.append(_decode(bytes(self._received[begin - length : begin])))
        del self._received[:begin]
        return messages

    def close(self) -> None:
        self._socket.close()
        self.is_closed = True


def _decode(data: bytes) -> list[Any]:
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message on the grammar channel does not decode: {error}") from None
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ProtocolError("a message on the grammar channel is no list that begins with its kind")
    return value
