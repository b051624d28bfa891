# SPDX-License-Identifier: Apache-2.0
"""Fleets for the fault suite. After every test on one, the service must work, be idle and have kept nothing."""

from __future__ import annotations

import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import _children, _command, _wait_until_empty
from tests.faults.harness.baseline import Baseline
from tests.faults.harness.fleet import FAST_HEARTBEATS, Fleet

FAST = "fake:step_ms=4"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "allowed_log(*patterns): expected exceptions in the logs")


@pytest.fixture(scope="package", autouse=True)
def run_directory() -> Iterator[Path]:
    """One for the whole suite, since a fleet is shared by many tests; at the end nothing may be left."""
    directory = Path(tempfile.mkdtemp(prefix="mz-", dir="/tmp"))
    children = _children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MII_ZMQ_RUN_DIR", str(directory))
        yield directory
    leaked = _wait_until_empty(lambda: _children() - children)
    sockets = [str(path) for path in directory.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    shutil.rmtree(directory, ignore_errors=True)
    assert not leaked, f"processes left behind: {[_command(pid) for pid in leaked]}"
    assert not sockets, f"socket files left behind: {sockets}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Seeded anew for every run, from FAULT_SEED where that is set; printed, so that a failure can be repeated."""
    seed = int(os.environ.get("FAULT_SEED") or random.SystemRandom().getrandbits(32))
    print(f"FAULT_SEED={seed} {request.node.nodeid}")
    return random.Random(seed)


@pytest.fixture(scope="package")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory, run_directory: Path) -> Iterator[tuple[Fleet, Baseline]]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), broker_options=FAST_HEARTBEATS)
    try:
        fleet.start(model=FAST, groups=2)
        yield fleet, Baseline.take(fleet)
    finally:
        fleet.close()


@pytest.fixture
def fleet(shared_fleet: tuple[Fleet, Baseline], request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A broker, two groups and a gateway, shared by all tests that leave them as they found them. What a test has
    killed is started again; `@pytest.mark.allowed_log` names exceptions that a test causes."""
    fleet, baseline = shared_fleet
    yield fleet
    fleet.revive()
    try:
        baseline.check(fleet, _allowed(request))
    finally:
        baseline.log_sizes = {name: len(fleet.log(name)) for name in fleet.members}


@pytest.fixture
def new_fleet(tmp_path: Path, run_directory: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Fleet]]:
    """Makes a fleet for one test; what is alive of it at the end is checked like the shared one, without a baseline of
    descriptors where the test did not take one."""
    fleets: list[Fleet] = []

    def make(**options: object) -> Fleet:
        directory = tmp_path / str(len(fleets))
        directory.mkdir()
        fleets.append(Fleet(directory, **{"broker_options": FAST_HEARTBEATS, **options}))  # type: ignore[arg-type]
        return fleets[-1]

    try:
        yield make
        for fleet in fleets:
            Baseline().check(fleet, _allowed(request))
    finally:
        for fleet in fleets:
            fleet.close()


def _allowed(request: pytest.FixtureRequest) -> list[str]:
    return [str(pattern) for mark in request.node.iter_markers("allowed_log") for pattern in mark.args]
