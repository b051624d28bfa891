# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.faults.harness.fault_proxy import FaultProxy

TIMEOUT_S = 10.0


class Echo:
    """A server that sends back what it gets, and counts."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.received = bytearray()
        self.num_ended = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                while data := peer.recv(65536):
                    self.received += data
                    peer.sendall(data)
            except OSError:
                pass
            self.num_ended += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.target) as proxy:
        yield proxy


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S)


def read(peer: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = peer.recv(num_bytes - len(data))
        if not piece:
            break
        data += piece
    return data


def is_cut(peer: socket.socket) -> bool:
    try:
        return not peer.recv(1)
    except ConnectionError:
        return True


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_passes_bytes_and_ends(echo: Echo, proxy: FaultProxy) -> None:
    with connect(proxy) as peer:
        peer.sendall(b"x" * 200_000)
        assert read(peer, 200_000) == b"x" * 200_000
    wait_for(lambda: echo.num_ended == 1 and proxy.num_open == 0)
    assert proxy.to_server.num_bytes == proxy.to_client.num_bytes == 200_000


def test_delays_one_way(proxy: FaultProxy) -> None:
    proxy.to_client.delay_s = 0.05
    with connect(proxy) as peer:
        started = time.monotonic()
        peer.sendall(b"ping")
        assert read(peer, 4) == b"ping"
        assert time.monotonic() - started >= 0.05


def test_a_pause_keeps_bytes_and_heals(echo: Echo, proxy: FaultProxy) -> None:
    with connect(proxy) as peer:
        proxy.to_client.is_paused = True
        peer.sendall(b"late")
        wait_for(lambda: bytes(echo.received) == b"late")
        peer.settimeout(0.05)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        peer.settimeout(TIMEOUT_S)
        proxy.heal()
        assert read(peer, 4) == b"late"


def test_loss_one_way_ends_in_a_reset(echo: Echo, proxy: FaultProxy) -> None:
    with connect(proxy) as peer:
        proxy.to_client.is_lossy = True
        peer.sendall(b"gone")
        wait_for(lambda: proxy.to_client.num_lost == 4)
        assert bytes(echo.received) == b"gone"
        proxy.heal()
        assert is_cut(peer)
    wait_for(lambda: proxy.num_open == 0)


def test_cuts_after_so_many_bytes(echo: Echo, proxy: FaultProxy) -> None:
    proxy.to_server.cut_after = 3
    with connect(proxy) as peer:
        peer.sendall(b"abcdef")
        wait_for(lambda: echo.num_ended == 1)
    assert bytes(echo.received) == b"abc"


def test_a_rate_limits_bytes(proxy: FaultProxy) -> None:
    proxy.to_client.bytes_per_s = 200
    with connect(proxy) as peer:
        started = time.monotonic()
        peer.sendall(b"x" * 40)
        assert read(peer, 20) == b"x" * 20
        assert time.monotonic() - started >= 0.08


def test_half_open_hides_an_end(echo: Echo, proxy: FaultProxy) -> None:
    peer = connect(proxy)
    peer.sendall(b"x")
    read(peer, 1)
    proxy.is_half_open = True
    peer.close()
    time.sleep(0.05)
    assert echo.num_ended == 0
    proxy.heal()
    wait_for(lambda: echo.num_ended == 1)


def test_a_target_that_is_not_there_resets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"127.0.0.1:{listener.getsockname()[1]}"
    with FaultProxy(target) as proxy, connect(proxy) as peer:
        assert is_cut(peer)
