# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from mii_zmq.chat import answer_over_http, run_chat
from mii_zmq.errors import Overloaded, ServiceError
from mii_zmq.mii_client import Chat


def chat(lines: str, seen: list[Chat], system: str | None = None) -> tuple[int, str]:
    def answer(messages: Chat) -> Iterator[str]:
        seen.append(list(messages))
        yield "to "
        if messages[-1]["content"] == "fail":
            raise Overloaded("too much")
        if messages[-1]["content"] == "interrupt":
            raise KeyboardInterrupt
        yield messages[-1]["content"]

    sink = io.StringIO()
    return run_chat(answer, system, io.StringIO(lines), sink), sink.getvalue()


def test_the_history_goes_along_until_a_reset() -> None:
    seen: list[Chat] = []
    assert chat("one\n\n  two  \n/reset\nthree\n/exit\nfour\n", seen, "be kind") == (0, "to one\nto two\nto three\n")
    system = {"role": "system", "content": "be kind"}
    assert seen[1] == [
        system,
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "to one"},
        {"role": "user", "content": "two"},
    ]
    assert seen[2] == [system, {"role": "user", "content": "three"}]


def test_a_failed_answer_is_reported_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Chat] = []
    assert chat("fail\nagain\n", seen) == (1, "to \nto again\n")
    assert "error: too much" in capsys.readouterr().err
    assert seen[1] == [{"role": "user", "content": "again"}]


def test_an_interrupt_ends_one_answer() -> None:
    seen: list[Chat] = []
    assert chat("interrupt\nnext", seen) == (0, "to \nto next\n")
    assert seen[1][1] == {"role": "assistant", "content": "to "}


class _Server(BaseHTTPRequestHandler):
    """Sends what the class was given, and closes."""

    sent = b""
    length: int | None = None

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        if self.length is not None:
            self.send_header("Content-Length", str(self.length))
        self.end_headers()
        self.wfile.write(self.sent)

    def log_message(self, format: str, *args: object) -> None:
        pass


EVENT = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'


@pytest.mark.parametrize(
    ("sent", "length", "error"),
    [
        (EVENT + b"data: [DONE]\n\n", None, None),
        (EVENT, None, "broke off"),
        (EVENT, 1000, "broke off"),
        (EVENT + b"data: {\n\n", None, "broke off"),
        (EVENT + b'data: {"error": {"message": "no more"}}\n\n', None, "no more"),
    ],
)
def test_half_an_answer_over_http_is_an_error(sent: bytes, length: int | None, error: str | None) -> None:
    handler = type("Handler", (_Server,), {"sent": sent, "length": length})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        pieces = answer_over_http(f"http://127.0.0.1:{server.server_port}", "m", {})([{"role": "user", "content": "a"}])
        assert next(pieces) == "hi"
        with pytest.raises(StopIteration) if error is None else pytest.raises(ServiceError, match=error):
            next(pieces)
        thread.join()
