# SPDX-License-Identifier: Apache-2.0
"""`python -m mii_zmq.gateway` as a process: ready before its broker, one clear line on failure, an orderly end."""

from __future__ import annotations

import http.client
import json
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mii_zmq.errors import StartupError
from mii_zmq.gateway.app import listen
from mii_zmq.process import spawn

pytestmark = pytest.mark.slow


PATIENCE_S = 60


def get(url: str, path: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_starts_without_a_broker_and_ends_in_order(tmp_path: Path) -> None:
    child = spawn("mii_zmq.gateway", ["--port", "0", "--brokers", f"ipc://{tmp_path}/none"], "gateway")
    try:
        url = child.wait_ready(PATIENCE_S)["url"]
        assert get(url, "/health/live")[0] == 200
        assert get(url, "/health/ready")[0] == 503
        assert get(url, "/healthz")[0] == 503
        status, body = get(url, "/nothing")
        assert (status, list(json.loads(body))) == (404, ["message"])
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(PATIENCE_S) == 0
    finally:
        child.kill()


def test_a_taken_port_is_one_line_and_exit_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        child = spawn("mii_zmq.gateway", ["--port", str(port), "--brokers", f"ipc://{tmp_path}/none"], "gateway")
        try:
            with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{port}"):
                child.wait_ready(PATIENCE_S)
            assert child.process.wait(PATIENCE_S) == 1
        finally:
            child.kill()


def test_gateways_that_share_a_port(tmp_path: Path) -> None:
    """The second one gets no connections before it is ready; when the first one leaves, it has them all."""
    arguments = ["--share-port", "--brokers", f"ipc://{tmp_path}/none"]
    first = spawn("mii_zmq.gateway", ["--port", "0", *arguments], "gateway")
    url = first.wait_ready(PATIENCE_S)["url"]
    second = spawn("mii_zmq.gateway", ["--port", url.rpartition(":")[2], *arguments], "gateway")
    try:
        assert second.wait_ready(PATIENCE_S)["url"] == url
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(PATIENCE_S) == 0
        for _ in range(20):
            assert get(url, "/health/live")[0] == 200
        with pytest.raises(StartupError, match="Address already in use"):
            listen("127.0.0.1", int(url.rpartition(":")[2]))
    finally:
        first.kill()
        second.kill()


def test_an_open_address_needs_consent() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mii_zmq.gateway", "--host", "0.0.0.0", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--insecure" in done.stderr


def test_starts_fast_and_without_the_heavy_libraries() -> None:
    code = "import sys, mii_zmq.gateway.__main__; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == "[]"
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 5
