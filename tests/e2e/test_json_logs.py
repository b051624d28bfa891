# SPDX-License-Identifier: Apache-2.0
"""All processes of a deployment log JSON, a request can be followed through them, and its text is in none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from tests.stack import PATIENCE_S, Stack, http

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SECRET = "sesame"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_request_is_found_in_the_logs(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MII_ZMQ_LOG_LEVEL", "DEBUG")
    stack = Stack(broker_options=["--log-format", "json"])
    try:
        stack.start_group("g1", "fake:alphabet=letters", "--tensor-parallel", "2", "--log-format", "json")
        stack.start_gateway("--log-format", "json")
        headers = {
            "X-Request-ID": "mine",
            "traceparent": PARENT,
            "Authorization": f"Bearer {SECRET}",
            "Content-Type": "application/json",
        }
        body = json.dumps({"model": "m", "prompt": SECRET, "max_tokens": 5, "user": SECRET}).encode()
        request = urllib.request.Request(f"{stack.url}/v1/completions?key={SECRET}", body, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            assert response.headers["X-Request-ID"] == "mine"
        assert http(stack.url + "/v1/completions", {"model": "m", "prompt": SECRET, "temperature": -1})[0] == 400
    finally:
        stack.close()
    text = capfd.readouterr().err
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    assert SECRET not in text
    assert {line["role"] for line in lines} >= {"broker", "gateway", "worker"}
    assert all({"time", "level", "pid", "logger", "message"} <= line.keys() for line in lines)
    about = [line for line in lines if line.get("request_id") == "mine"]
    assert {line["role"] for line in about} == {"gateway", "worker"}
    assert {line["group"] for line in about if line["role"] == "worker"} == {"g1"}
    (access,) = [line for line in about if line["logger"] == "mii_zmq.access"]
    assert access["trace_id"] == PARENT.split("-")[1]
    expected = {"method": "POST", "path": "/v1/completions", "status": 200, "model": "m", "finish_reason": "length"}
    assert expected.items() <= access.items()
    assert (access["prompt_tokens"], access["output_tokens"]) == (len(SECRET), 5)


@pytest.mark.long
def test_serve_writes_nothing_but_json_to_standard_error(deployments: object) -> None:
    command = [sys.executable, "-m", "mii_zmq", "serve", "fake:", "--deployment-name", "d", "--port", "0"]
    environment = {**os.environ, "MII_ZMQ_LOG_LEVEL": "INFO"}
    with subprocess.Popen(
        [*command, "--log-format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("End it: Ctrl-C"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "Ending; running requests get up to" in out
    assert {json.loads(line)["role"] for line in err.splitlines()} >= {"broker", "gateway", "worker"}
