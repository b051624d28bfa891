# SPDX-License-Identifier: Apache-2.0
"""HTTP clients whose sockets a test has in its hands: one that reads a stream in a thread, and raw connections."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from tests.faults.harness.baseline import GREEDY

TIMEOUT_S = 60.0


def open_post(url: str, path: str, body: dict[str, Any], *, receive_buffer: int | None = None) -> socket.socket:
    """A connection on which a POST has been sent and nothing was read."""
    address = urlsplit(url)
    peer = socket.socket()
    if receive_buffer is not None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    peer.settimeout(TIMEOUT_S)
    peer.connect((address.hostname or "", address.port or 80))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    peer.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return peer


def read_response(peer: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; the peer closes, or says how long the body is."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = peer.recv(65536)
        if not piece:
            raise ConnectionError("no answer")
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    length = int(headers["content-length"]) if "content-length" in headers else None
    while length is None or len(body) < length:
        piece = peer.recv(65536)
        if not piece:
            break
        body += piece
    return int(lines[0].split()[1]), headers, body


class Stream(threading.Thread):
    """Reads one stream of MII's door to its end, whatever that is."""

    def __init__(self, url: str, prompt: str, num_tokens: int, deployment: str = "m", **params: Any) -> None:
        super().__init__(name="stream", daemon=True)
        body = {"prompts": prompt, "stream": True, "max_new_tokens": num_tokens, **GREEDY, **params}
        self._peer = open_post(url, f"/mii/{deployment}", body)
        self.texts: list[str] = []
        self.error: dict[str, Any] | None = None
        """The error event, or {"status": ..., "message": ...} of an answer that is no stream."""
        self.final: dict[str, Any] | None = None
        self.is_done = False
        """[DONE] has come."""
        self.is_broken = False
        """The connection ended in the middle of something."""
        self._changed = threading.Condition()
        self.start()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def run(self) -> None:
        try:
            with self._peer, self._peer.makefile("rb") as file:
                self._read(file)
        except OSError:
            self.is_broken = True
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, num_texts: int, timeout_s: float = TIMEOUT_S) -> None:
        """Until so many pieces of text have come."""
        with self._changed:
            has_come = self._changed.wait_for(lambda: len(self.texts) >= num_texts or not self.is_alive(), timeout_s)
        assert has_come, f"only {len(self.texts)} pieces of text came in {timeout_s:g} s"
        assert len(self.texts) >= num_texts, f"the stream ended: {self.error}"

    def end(self, timeout_s: float = TIMEOUT_S) -> Stream:
        self.join(timeout_s)
        if self.is_alive():
            self._peer.shutdown(socket.SHUT_RDWR)
            self.join(TIMEOUT_S)
            raise AssertionError(f"the stream has not ended; {len(self.texts)} pieces of text came")
        return self

    def leave(self) -> None:
        """Close the connection in the middle."""
        self._peer.shutdown(socket.SHUT_RDWR)
        self.end()

    def _read(self, file: BinaryIO) -> None:
        status = int(file.readline().split()[1])
        headers = {}
        while line := file.readline().strip():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        if status != 200:
            body = json.loads(file.read(int(headers[b"content-length"])))
            self.error = {"status": status, **body}
            return
        while size := int(file.readline() or b"-1", 16):
            if size < 0:
                raise ConnectionError
            self._take(file.read(size))
            file.readline()
        if not (self.is_done or self.error):
            self.is_broken = True

    def _take(self, chunk: bytes) -> None:
        for line in chunk.split(b"\n\n"):
            if not line:
                continue
            if line == b"data: [DONE]":
                self.is_done = True
                continue
            event = json.loads(line.removeprefix(b"data: "))
            with self._changed:
                if "message" in event:
                    self.error = event
                elif event["finish_reason"] != "none":
                    self.final = event
                else:
                    self.texts.append(event["generated_text"])
                self._changed.notify_all()
