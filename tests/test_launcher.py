# SPDX-License-Identifier: Apache-2.0
"""Deployments of real processes with the fake engine: supervision in this process, and detached ones."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mii_zmq.config import EngineConfig, LaunchConfig
from mii_zmq.errors import ConfigError, StartupError
from mii_zmq.launcher import add_group_command, start_detached
from mii_zmq.mii_client import MIIClient
from mii_zmq.mii_settings import serve_settings
from mii_zmq.registry import Registry, end_deployment, process_identity
from mii_zmq.supervisor import Supervisor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("deployments")]

LAUNCH = LaunchConfig(deployment="d", rest=False)
ENGINE = EngineConfig(model="fake:")
SLOW_ENGINE = EngineConfig(model="fake:step_ms=10")

Script = Callable[[Supervisor, MIIClient], None]


def supervise(script: Script, launch: LaunchConfig = LAUNCH, engine: EngineConfig = ENGINE, stops: int = 1) -> int:
    """Run a supervisor here; when it is ready, `script` runs in a thread, and then the signals come."""
    with ThreadPoolExecutor(1) as threads:
        outcome: Any = None

        def report(facts: dict[str, Any]) -> None:
            nonlocal outcome
            if facts.get("ready"):
                outcome = threads.submit(play)

        def play() -> None:
            record = Registry(root).find(launch.deployment)
            assert record is not None
            try:
                with MIIClient(record) as client:
                    script(supervisor, client)
            finally:
                for _ in range(stops):
                    os.kill(os.getpid(), signal.SIGTERM)

        root = Registry().root
        supervisor = Supervisor(launch, engine, report, registry=Registry(root))
        code = supervisor.run()
        if outcome is not None:
            outcome.result()
        return code


def pid_of(supervisor: Supervisor, name: str) -> int:
    record = supervisor._record
    return record.processes[name]


def wait_for_restart(supervisor: Supervisor, name: str, old_pid: int, timeout_s: float = 60.0) -> float:
    """Seconds until another process has taken the place of `old_pid`."""
    started = time.monotonic()
    while pid_of(supervisor, name) == old_pid:
        assert time.monotonic() - started < timeout_s, f"{name} did not come back"
        time.sleep(0.01)
    return time.monotonic() - started


def test_an_ordered_life() -> None:
    def script(supervisor: Supervisor, client: MIIClient) -> None:
        (response,) = client.generate("hello", max_new_tokens=8)
        assert response.generated_length == 8

    assert supervise(script) == 0


def test_a_killed_broker_is_back_at_once_and_no_stream_breaks() -> None:
    def script(supervisor: Supervisor, client: MIIClient) -> None:
        (undisturbed,) = client.generate("hello", max_new_tokens=100)
        old_pid = pid_of(supervisor, "broker")
        parts = []
        for index, part in enumerate(client.stream("hello", max_new_tokens=100)):
            parts.append(part.generated_text)
            if index == 10:
                os.kill(old_pid, signal.SIGKILL)
        assert "".join(parts) == undisturbed.generated_text
        # On a busy machine all of it may have been under way before the kill.
        wait_for_restart(supervisor, "broker", old_pid)

    assert supervise(script, engine=SLOW_ENGINE) == 0


def test_a_killed_worker_group_is_started_again() -> None:
    def script(supervisor: Supervisor, client: MIIClient) -> None:
        old_pid = pid_of(supervisor, "worker 1")
        os.kill(old_pid, signal.SIGKILL)
        wait_for_restart(supervisor, "worker 1", old_pid)
        assert client.generate("hello", max_new_tokens=4)[0].generated_length == 4

    assert supervise(script) == 0


def test_a_killed_gateway_is_back_on_its_port() -> None:
    def script(supervisor: Supervisor, client: MIIClient) -> None:
        old_pid = pid_of(supervisor, "gateway")
        os.kill(old_pid, signal.SIGKILL)
        wait_for_restart(supervisor, "gateway", old_pid)
        port = int(str(supervisor._record.rest_url).rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), 60).close()

    assert supervise(script, launch=replace(LAUNCH, rest=True, port=0)) == 0


def test_the_last_group_that_cannot_load_ends_the_deployment_with_its_reason() -> None:
    def script(supervisor: Supervisor, client: MIIClient) -> None:
        for worker in supervisor._workers:
            worker.delay_s, worker.max_failed_starts = 0.001, 1
        supervisor._engines = [replace(ENGINE, model="fake:bogus=1")]
        os.kill(pid_of(supervisor, "worker 1"), signal.SIGKILL)

    with pytest.raises(StartupError, match=r"worker 1 failed 2 times in a row while starting: .*bogus=1"):
        # No signal: it has to end by itself.
        supervise(script, stops=0)


def test_a_failed_start_is_forgotten_when_the_next_one_succeeds() -> None:
    def script(supervisor: Supervisor, client: MIIClient) -> None:
        worker, good = supervisor._workers[0], supervisor._engines
        worker.delay_s = 0.001
        supervisor._engines = [replace(ENGINE, model="fake:bogus=1")]
        old_pid = pid_of(supervisor, "worker 1")
        os.kill(old_pid, signal.SIGKILL)
        while not worker.failed_starts:
            time.sleep(0.01)
        supervisor._engines = good
        wait_for_restart(supervisor, "worker 1", old_pid)
        assert worker.failed_starts == 0, "a rolling restart would take it for a failure of its own"

    assert supervise(script) == 0


def test_a_group_that_dies_while_its_successor_loads_is_succeeded_all_the_same() -> None:
    def script(supervisor: Supervisor, client: MIIClient) -> None:
        worker = supervisor._workers[0]
        worker.delay_s = worker.max_delay_s = 60.0
        old_pid = pid_of(supervisor, "worker 1")
        os.kill(os.getpid(), signal.SIGUSR1)
        while not supervisor._successors:
            time.sleep(0.005)
        os.kill(old_pid, signal.SIGKILL)
        wait_for_restart(supervisor, "worker 1", old_pid)
        assert client.generate("hello", max_new_tokens=4)[0].generated_length == 4
        assert worker.restart_at is None

    assert supervise(script) == 0


def test_a_running_request_is_finished_at_the_end() -> None:
    def script(supervisor: Supervisor, client: MIIClient) -> None:
        (response,) = client.generate("hello", max_new_tokens=100)
        stream = client.stream("hello", max_new_tokens=100)
        text = next(stream).generated_text
        os.kill(os.getpid(), signal.SIGTERM)
        text += "".join(part.generated_text for part in stream)
        assert text == response.generated_text

    assert supervise(script, engine=SLOW_ENGINE, stops=0) == 0


def test_the_second_signal_ends_at_once() -> None:
    ended = 0.0

    def script(supervisor: Supervisor, client: MIIClient) -> None:
        nonlocal ended
        stream = client.stream("hello", max_new_tokens=5000)
        next(stream)
        ended = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    assert supervise(script, engine=SLOW_ENGINE, stops=0) == 0
    assert time.monotonic() - ended < LAUNCH.drain_timeout_s, "the stream alone would have taken longer"


def test_a_group_that_cannot_load_fails_the_start_in_its_own_words(deployments: Path) -> None:
    engine = replace(ENGINE, model="fake:bogus=1")
    with pytest.raises(StartupError, match="worker 1: .*bogus=1"):
        Supervisor(LAUNCH, engine, lambda facts: None).run()
    assert not list(deployments.iterdir())


def test_a_signal_while_starting_ends_the_start() -> None:
    def report(facts: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert Supervisor(LAUNCH, ENGINE, report).run() == 130


def test_a_taken_port_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = replace(LAUNCH, rest=True, port=port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            Supervisor(launch, ENGINE, lambda facts: None).run()


def test_a_detached_deployment_is_ended_from_its_record(deployments: Path) -> None:
    seen: list[dict[str, Any]] = []
    record = start_detached(LAUNCH, ENGINE, seen.append)
    assert record.ready
    assert seen[-1]["ready"]
    assert Registry().find("d") == record
    assert "registered" in Path(str(record.log_path)).read_text()
    with pytest.raises(ConfigError, match="'d' runs already"):
        start_detached(LAUNCH, ENGINE, seen.append)
    end_deployment(record, 60)
    assert process_identity(record.pid) is None
    assert not list(deployments.iterdir())


def test_nothing_outlives_a_killed_supervisor() -> None:
    record = start_detached(LAUNCH, ENGINE, lambda facts: None)
    os.kill(record.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(process_identity(pid) for pid in record.processes.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Registry().find("d") is None


def test_a_detached_start_reports_its_error(deployments: Path) -> None:
    with pytest.raises(StartupError, match="worker 1: .*bogus=1"):
        start_detached(LAUNCH, replace(ENGINE, model="fake:bogus=1"), lambda facts: None)
    assert not list(deployments.iterdir())


def test_an_interrupted_start_leaves_nothing() -> None:
    def interrupt(facts: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_detached(LAUNCH, ENGINE, interrupt)


def test_a_deployment_whose_starter_dies_while_it_loads_ends() -> None:
    script = (
        "import os, signal\n"
        "from mii_zmq.config import EngineConfig, LaunchConfig\n"
        "from mii_zmq.launcher import start_detached\n"
        "launch, engine = LaunchConfig(deployment='d', rest=False), EngineConfig(model='fake:')\n"
        "start_detached(launch, engine, lambda facts: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60, stderr=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while (record := Registry().find("d")) is not None:
        assert time.monotonic() < deadline
        assert not record.ready
        time.sleep(0.02)


def test_logs_and_traces_are_passed_on_to_every_process() -> None:
    settings = {"log_format": "json", "otlp_endpoint": "http://a:4318", "trace_ratio": 0.5}
    launch = LaunchConfig(deployment="m", access_log=False, **settings)
    engine = EngineConfig(model="fake:")
    supervisor = Supervisor(launch, engine, lambda facts: None)
    supervisor._client_endpoints, supervisor._worker_endpoints = ["tcp://127.0.0.1:2"], ["tcp://127.0.0.1:1"]
    expected = {"--log-format=json", "--otlp-endpoint=http://a:4318", "--trace-ratio=0.5"}
    for arguments in (
        supervisor._broker_arguments(0),
        supervisor._gateway_arguments(),
        supervisor._worker_arguments(0),
        add_group_command(launch, engine, ["tcp://127.0.0.1:1"]).split(),
    ):
        assert expected <= set(arguments)
    assert "--no-access-log" in supervisor._gateway_arguments()
    _, from_python = serve_settings("fake:", None, None, settings)
    assert from_python.telemetry == launch.telemetry
