# SPDX-License-Identifier: Apache-2.0
"""The broker as a process: announcement, taken ports, signals, what it leaves behind and what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mii_zmq.errors import StartupError
from mii_zmq.process import spawn

pytestmark = pytest.mark.slow


def test_start_and_ordered_end(tmp_path: Path) -> None:
    socket_file = tmp_path / "w"
    broker = spawn(
        "mii_zmq.broker", ["--client-endpoint=tcp://127.0.0.1:0", f"--worker-endpoint=ipc://{socket_file}"], "broker"
    )
    try:
        ready = broker.wait_ready(60)
        assert ready["client_endpoint"].startswith("tcp://127.0.0.1:")
        assert ready["worker_endpoint"] == f"ipc://{socket_file}"
        taken = spawn("mii_zmq.broker", [f"--client-endpoint={ready['client_endpoint']}"], "second broker")
        with pytest.raises(StartupError, match="cannot listen on"):
            taken.wait_ready(60)
        assert taken.process.wait(60) == 1
        taken.close()
    finally:
        assert broker.stop(60) == 0
    assert not socket_file.exists()


def test_bad_setting_is_one_line() -> None:
    command = [sys.executable, "-m", "mii_zmq.broker", "--client-endpoint=tcp://0.0.0.0:1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "--insecure" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_imports_stay_light() -> None:
    heavy = {"torch", "transformers", "aiohttp", "numpy"}
    code = f"import sys, mii_zmq.broker.__main__; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]"
