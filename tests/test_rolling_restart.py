# SPDX-License-Identifier: Apache-2.0
"""Restarting one after the other: the order of things by example, and with real processes behind a client that retries
connections only."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from typing import Any

import pytest

from mii_zmq.config import EngineConfig, LaunchConfig
from mii_zmq.errors import MiiError
from mii_zmq.launcher import start_detached
from mii_zmq.member import Member
from mii_zmq.mii_client import MIIClient
from mii_zmq.process import Child
from mii_zmq.registry import Registry, end_deployment, restart_deployment
from mii_zmq.rolling_restart import SETTLE_S, RollingRestart


class FakeChild(Child):
    """Alive until told otherwise."""

    def __init__(self, pid: int) -> None:
        self.fake_pid = pid

    @property
    def pid(self) -> int:
        return self.fake_pid


def ready_member(name: str, pid: int) -> Member:
    return Member(name, "", list, 0, 0, 0, child=FakeChild(pid), is_ready=True)


class FakeHost:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.successor: Member | None = None

    def start_beside(self, member: Member) -> Member:
        self.events.append(f"start {member.name}")
        self.successor = ready_member(member.name, 1000)
        self.successor.is_ready = False
        return self.successor

    def put_in_place(self, member: Member, successor: Member) -> None:
        self.events.append(f"place {member.name}")
        member.child = successor.child

    def dismiss(self, successor: Member) -> None:
        self.events.append(f"dismiss {successor.name}")

    def leave(self, member: Member) -> None:
        self.events.append(f"leave {member.name}")


def test_one_after_the_other_each_in_its_way() -> None:
    host, broker, gateway = FakeHost(), ready_member("broker", 1), ready_member("gateway", 2)
    restart = RollingRestart(host, [broker, gateway], lambda member: member is gateway, patience_s=60)
    restart.turn(0.0)
    assert (host.events, restart.current) == (["leave broker"], "broker")
    broker.is_ready = False
    restart.turn(1.0)
    broker.child, broker.is_ready = FakeChild(3), True
    restart.turn(2.0)
    restart.turn(2.1)
    assert host.events == ["leave broker"], "its peers have not found it yet"
    restart.turn(2.1 + SETTLE_S)
    restart.turn(4.0)
    assert host.events[1:] == ["start gateway"]
    restart.turn(5.0)
    assert host.successor is not None
    host.successor.is_ready = True
    restart.turn(6.0)
    assert host.events[2:] == ["place gateway"]
    restart.turn(6.0 + SETTLE_S)
    restart.turn(8.0)
    assert (restart.is_finished, restart.error, restart.current) == (True, None, "")


def test_a_successor_that_does_not_come_leaves_the_old_one_in_place() -> None:
    host, gateway = FakeHost(), ready_member("gateway", 2)
    restart = RollingRestart(host, [gateway, ready_member("other", 3)], lambda member: True, patience_s=60)
    restart.turn(0.0)
    assert host.successor is not None
    host.successor.child, host.successor.last_error = None, "no memory"
    restart.turn(1.0)
    assert host.events == ["start gateway", "dismiss gateway"]
    assert restart.is_finished
    assert restart.error is not None
    assert "no memory" in restart.error


def test_one_that_does_not_come_back_ends_it() -> None:
    host, worker = FakeHost(), ready_member("worker 1", 2)
    restart = RollingRestart(host, [worker], lambda member: False, patience_s=60)
    restart.turn(0.0)
    worker.is_ready, worker.failed_starts, worker.last_error = False, 1, "bad checkpoint"
    restart.turn(1.0)
    assert restart.error is not None
    assert "bad checkpoint" in restart.error


def test_one_that_is_down_anyway_is_waited_for() -> None:
    host, worker = FakeHost(), ready_member("worker 1", 2)
    child, worker.child, worker.restart_at = worker.child, None, 5.0
    restart = RollingRestart(host, [worker], lambda member: False, patience_s=60)
    restart.turn(0.0)
    assert host.events == []
    worker.child = child
    restart.turn(1.0)
    assert host.events == ["leave worker 1"]


def ask(port: int, prompt: str, num_tokens: int, failures: list[str]) -> str:
    """Over a connection of its own, made again as long as that fails; anything else is a failure."""
    body = json.dumps({"prompts": prompt, "max_new_tokens": num_tokens, "ignore_eos": True})
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", "/mii/d", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        except (ConnectionError, http.client.RemoteDisconnected):
            continue
        finally:
            connection.close()
        if response.status != 200:
            failures.append(f"{response.status}: {answer.decode()}")
            return ""
        text: str = json.loads(answer)[0]["generated_text"]
        return text


class Load:
    """Clients that ask all the time, over HTTP and over ZeroMQ."""

    def __init__(self, port: int, client: MIIClient) -> None:
        self.failures: list[str] = []
        self.num_answers = 0
        self._stop = threading.Event()
        self._texts: dict[str, str] = {}
        self._threads = [threading.Thread(target=self._run_http, args=(port, seed)) for seed in range(3)]
        self._threads += [threading.Thread(target=self._run_zmq, args=(client, seed)) for seed in range(3, 5)]
        for thread in self._threads:
            thread.start()

    def _check(self, prompt: str, text: str) -> None:
        self.num_answers += 1
        if self._texts.setdefault(prompt, text) != text:
            self.failures.append(f"two texts for {prompt!r}")

    def _run_http(self, port: int, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            prompt, num_tokens = f"http {rng.randrange(5)}", 60
            self._check(prompt, ask(port, prompt, num_tokens, self.failures))

    def _run_zmq(self, client: MIIClient, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            prompt = f"zmq {rng.randrange(5)}"
            try:
                parts = [part.generated_text for part in client.stream(prompt, max_new_tokens=60, ignore_eos=True)]
            except MiiError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                return
            self._check(prompt, "".join(parts))

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def pids(name: str = "d") -> dict[str, int]:
    record = Registry().find(name)
    assert record is not None
    return record.processes


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("deployments")
@pytest.mark.parametrize(
    ("replicas", "brokers", "gateways"),
    [pytest.param(3, 2, 2, id="several of each", marks=pytest.mark.long), pytest.param(1, 2, 1, id="one of each")],
)
def test_nobody_notices(replicas: int, brokers: int, gateways: int) -> None:
    launch = LaunchConfig(deployment="d", replicas=replicas, brokers=brokers, gateways=gateways, port=0)
    record = start_detached(launch, EngineConfig(model="fake:step_ms=5"), lambda facts: None)
    try:
        assert len(record.client_endpoints) == brokers
        before = pids()
        assert len(before) == replicas + brokers + gateways
        with MIIClient(record) as client:
            load = Load(int(str(record.rest_url).rpartition(":")[2]), client)
            try:
                seen = list(restart_deployment(record))
            finally:
                load.end()
        assert load.failures == []
        assert load.num_answers > 50
        after = pids()
        assert after.keys() == before.keys() == set(seen)
        assert not set(after.values()) & set(before.values())
    finally:
        end_deployment(record, 60)


@pytest.mark.slow
@pytest.mark.usefixtures("deployments")
def test_each_dead_process_is_started_again_alone_and_soon() -> None:
    launch = LaunchConfig(deployment="d", brokers=2, gateways=2, port=0)
    record = start_detached(launch, EngineConfig(model="fake:step_ms=5"), lambda facts: None)
    port = int(str(record.rest_url).rpartition(":")[2])
    try:
        for name in ("broker 1", "gateway 2", "broker 2", "gateway 1"):
            before = pids()
            os.kill(before[name], signal.SIGKILL)
            started = time.monotonic()
            failures: list[str] = []
            assert ask(port, "x", 20, failures)
            assert failures == []
            while pids()[name] == before[name]:
                assert time.monotonic() - started < 30
                time.sleep(0.02)
            print(f"{name} was back after {time.monotonic() - started:.2f} s")
            after: dict[str, Any] = {**pids(), name: None}
            assert after == {**before, name: None}
    finally:
        end_deployment(record, 60)
