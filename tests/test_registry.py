# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mii_zmq.errors import ConfigError
from mii_zmq.registry import DeploymentRecord, Registry, end_deployment, process_identity


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def record_of(pid: int, name: str = "org/model") -> DeploymentRecord:
    return DeploymentRecord(deployment=name, model="m", pid=pid, identity=process_identity(pid) or "gone")


def test_a_claimed_name_is_found_until_it_is_released(run_directory: Path) -> None:
    registry, record = Registry(), record_of(os.getpid())
    directory = registry.claim(record)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    record.ready, record.rest_url = True, "http://127.0.0.1:1"
    registry.write(record)
    assert registry.find("org/model") == record
    assert registry.list_all() == [record]
    registry.release(record)
    assert registry.find("org/model") is None
    assert not list(run_directory.iterdir())


def test_a_name_is_claimed_once() -> None:
    registry = Registry()
    registry.claim(record_of(os.getpid()))
    with pytest.raises(ConfigError, match=r"deployment 'org/model' runs already \(process \d+\); end it with"):
        registry.claim(record_of(os.getpid()))
    registry.claim(record_of(os.getpid(), "other"))
    assert [record.deployment for record in registry.list_all()] == ["org/model", "other"]


def test_what_a_dead_deployment_left_is_removed(sleeper: subprocess.Popen[bytes], run_directory: Path) -> None:
    registry = Registry()
    directory = registry.claim(record_of(sleeper.pid))
    (directory / "workers").touch()
    assert registry.find("org/model") is not None
    sleeper.kill()
    sleeper.wait()
    assert registry.find("org/model") is None
    assert not list(run_directory.iterdir())


def test_a_recycled_pid_is_no_deployment(run_directory: Path) -> None:
    registry, record = Registry(), record_of(os.getpid())
    record.identity = "another boot:12345"
    registry.claim(record)
    assert registry.find("org/model") is None


def test_a_damaged_record_counts_as_dead(run_directory: Path) -> None:
    registry = Registry()
    directory = registry.claim(record_of(os.getpid()))
    (directory / "deployment.json").write_text('{"deployment": 5')
    assert registry.list_all() == []
    registry.claim(record_of(os.getpid()))


def test_a_zombie_has_no_identity(sleeper: subprocess.Popen[bytes]) -> None:
    assert process_identity(sleeper.pid) == process_identity(sleeper.pid)
    assert process_identity(sleeper.pid) != process_identity(os.getpid())
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert process_identity(sleeper.pid) is None


def test_ending_waits_for_the_end(sleeper: subprocess.Popen[bytes]) -> None:
    record = record_of(sleeper.pid)
    end_deployment(record, 60)
    assert process_identity(sleeper.pid) is None
    end_deployment(record, 60)


def test_a_stranger_is_never_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    record = record_of(sleeper.pid)
    record.identity = "another boot:12345"
    end_deployment(record, 60)
    assert sleeper.poll() is None
    os.kill(sleeper.pid, signal.SIGKILL)


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf")])
def test_a_patience_that_is_no_time_ends_nothing(timeout_s: float) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        with pytest.raises(ConfigError, match="timeout_s is"):
            end_deployment(record_of(process.pid), timeout_s)
        assert process.poll() is None
        process.kill()
