# SPDX-License-Identifier: Apache-2.0
"""Worker groups that die, stall or hang, before and in the middle of streams."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mii_zmq.client import BackgroundLoop
from tests.faults.harness.baseline import Baseline
from tests.faults.harness.expectation import expect
from tests.faults.harness.fleet import Fleet, is_running, wait_until
from tests.faults.harness.history import History
from tests.faults.harness.load import Load
from tests.faults.harness.mayhem import send
from tests.faults.harness.reader import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DETECT_S = 3.0


def text_of(prompt: str, num_tokens: int) -> str:
    return expect(prompt, max_new_tokens=num_tokens, ignore_eos=True).text


def group_of(fleet: Fleet, stream: Stream) -> str:
    """The group that runs the only stream."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [name for name, group in fleet.groups_status().items() if group["num_requests"]]
        return bool(found)

    wait_until(look, "some group runs the stream")
    return found[0]


def test_a_stream_goes_on_when_its_group_is_killed(fleet: Fleet) -> None:
    """Row 3."""
    stream = Stream(fleet.url(), "row 3", 400)
    stream.wait_for(7)
    fleet.kill(group_of(fleet, stream))
    stream.end()
    assert stream.error is None
    assert stream.is_done
    assert stream.text == text_of("row 3", 400)


@pytest.mark.long
def test_a_killed_engine_or_actor_costs_no_stream(fleet: Fleet) -> None:
    """Row 3, for the processes of a group and several streams at once."""
    streams = [Stream(fleet.url(), f"row 3 {index}", 300) for index in range(8)]
    for stream in streams:
        stream.wait_for(3)
    pids = fleet.pids()
    send(pids["group 1 engine"], signal.SIGKILL)
    for index, stream in enumerate(streams):
        stream.end()
        assert (stream.error, stream.text) == (None, text_of(f"row 3 {index}", 300))


@pytest.mark.long
def test_the_only_group_is_killed(new_fleet: Callable[..., Fleet]) -> None:
    """Row 4: an error event, then the end, without [DONE]; and nothing wrong before it."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=4", groups=1)
    stream = Stream(fleet.url(), "row 4", 2000)
    stream.wait_for(7)
    fleet.kill("group 1")
    started = time.monotonic()
    stream.end()
    assert stream.error is not None
    assert stream.error["code"] in ("worker_lost", "no_workers")
    assert not stream.is_done
    assert time.monotonic() - started < 10.0 + DETECT_S
    assert text_of("row 4", 2000).startswith(stream.text)
    fleet.restart("group 1")
    wait_until(lambda: fleet.is_serving(1), "the fleet serves again")


@pytest.mark.long
def test_a_kill_every_300_ms_under_load(new_fleet: Callable[..., Fleet], rng: random.Random) -> None:
    """Row 5: engines die faster than groups come back; every request ends once, and what is delivered is right."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=2", groups=3)
    history = History()
    load = Load(history, "m", [fleet.url()], fleet.client_endpoints, rng.getrandbits(32), max_tokens=100)
    loop = BackgroundLoop("load")
    driver = threading.Thread(target=lambda: loop.run(load.run({"http_stream": 4, "zmq_stream": 4, "zmq_whole": 4})))
    driver.start()
    num_kills = 0
    try:
        for _ in range(66):
            time.sleep(0.3)
            for name in fleet.bury():
                fleet.spawn(name)
            for name in fleet.groups:
                fleet.poll_ready(name)
            pids = fleet.pids()
            ready = [name for name in fleet.groups if fleet.members[name].is_ready]
            victims = [role for role in pids if " ".join(role.split()[:2]) in ready]
            if victims:
                role = rng.choice(victims)
                send(pids[role], signal.SIGKILL)
                num_kills += 1
        fleet.revive()
    finally:
        load.is_stopping = True
        driver.join(120)
        loop.close()
    verdict = history.check()
    print(f"{num_kills} kills: {verdict.as_dict()}")
    assert history.unfinished() == []
    assert verdict.violations == []
    assert verdict.num_requests > 100
    assert num_kills > 10


@pytest.mark.long
def test_a_stalled_group_is_replaced_and_fenced(fleet: Fleet) -> None:
    """Row 6: stopped as a whole for longer than its heartbeats; awake again, it disturbs nobody and is taken back."""
    stream = Stream(fleet.url(), "row 6", 600)
    stream.wait_for(5)
    name = group_of(fleet, stream)
    pids = [pid for role, pid in fleet.pids().items() if role.startswith(name)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        wait_until(lambda: name not in fleet.group_states(), "the group counts as dead")
        assert time.monotonic() - started < DETECT_S
        stream.wait_for(len(stream.texts) + 5)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    stream.end()
    assert (stream.error, stream.text) == (None, text_of("row 6", 600))
    wait_until(lambda: name in fleet.group_states(), "the group is taken back")


@pytest.mark.long
@pytest.mark.parametrize("is_busy", [True, False], ids=["in a step", "idle"])
def test_a_hung_engine_is_replaced(new_fleet: Callable[..., Fleet], is_busy: bool) -> None:
    """Row 7: the actor lives and answers, but its engine does not move: no health is reported, nothing new goes there,
    and the group is ended so that a new one can take its place."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=4", groups=2, options=["--step-timeout-s=2"])
    streams = [Stream(fleet.url(), f"row 7 {index}", 1000) for index in range(4 if is_busy else 0)]
    for stream in streams:
        stream.wait_for(3)
    pid = fleet.pids()["group 1 engine"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: "group 1" not in fleet.group_states(), "the group counts as dead", 20)
        for index, stream in enumerate(streams):
            stream.end()
            assert (stream.error, stream.text) == (None, text_of(f"row 7 {index}", 1000))
        wait_until(lambda: not fleet.is_alive("group 1"), "the group has ended", 30)
        assert not is_running(pid)
    finally:
        send(pid, signal.SIGCONT)
        fleet.kill("group 1")


def test_nothing_of_a_group_outlives_its_actor(fleet: Fleet) -> None:
    """Row 10."""
    pids = [pid for role, pid in fleet.pids().items() if role.startswith("group 1")]
    assert len(pids) == 2
    fleet.kill("group 1")
    wait_until(lambda: not any(map(is_running, pids)), "all processes of the group are gone")


def test_the_name_of_a_live_group_cannot_be_taken(fleet: Fleet, tmp_path: Path) -> None:
    """Row 27: the second one is refused in words, and the first works on."""
    incarnation = fleet.groups_status()["group 1"]["incarnation"]
    twin = Fleet(tmp_path)
    twin.add_group("group 1", "fake:", brokers=fleet.worker_endpoints, wait=False)
    try:
        wait_until(lambda: "duplicate" in twin.log("group 1"), "the refusal is in the log")
        assert fleet.groups_status()["group 1"]["incarnation"] == incarnation
    finally:
        twin.close()


def test_a_group_that_is_killed_while_it_starts_leaves_nothing(fleet: Fleet, run_directory: Path) -> None:
    """Row 10, before the engine has connected."""
    fleet.kill("group 1")
    before = set(run_directory.iterdir())
    fleet.spawn("group 1")
    wait_until(lambda: "group 1 engine" in fleet.pids(), "its engine is being started", poll_s=0.001)
    engine = fleet.pids()["group 1 engine"]
    fleet.kill("group 1")
    wait_until(lambda: not is_running(engine), "its engine is gone")
    assert set(run_directory.iterdir()) == before


@pytest.mark.long
def test_a_small_baseline_survives_many_kills(new_fleet: Callable[..., Fleet], rng: random.Random) -> None:
    """Rows 1 and 2 over and over: descriptors and threads of broker and gateway do not grow with the dead."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=1", groups=2)
    baseline = Baseline.take(fleet)
    for index in range(6):
        stream = Stream(fleet.url(), f"kill {index}", 50)
        name = rng.choice(fleet.groups)
        fleet.restart(name)
        stream.end()
        assert (stream.error, stream.text) == (None, text_of(f"kill {index}", 50))
        wait_until(lambda: fleet.is_serving(2), "both groups are back")
    baseline.check(fleet)
