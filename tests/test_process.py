# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from mii_zmq.errors import StartupError
from mii_zmq.process import Child, ChildLink, spawn

pytestmark = pytest.mark.slow


@pytest.fixture
def start() -> Iterator[Any]:
    children: list[Child] = []

    def start_child(what: str) -> Child:
        children.append(spawn("tests.process_child", [what], "the child"))
        return children[-1]

    yield start_child
    for child in children:
        child.kill()


def is_gone(pid: int, timeout_s: float = 60.0) -> bool:
    """Wait for the end of a process that need not be our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def test_progress_comes_before_readiness(start: Any) -> None:
    seen: list[dict[str, Any]] = []
    child = start("serve")
    assert child.wait_ready(60, seen.append) == {"ready": True, "answer": 42}
    assert seen == [{"progress": "half way", "fraction": 0.5}]
    assert child.is_alive
    assert child.stop() == -signal.SIGTERM
    assert not child.is_alive


def test_an_announced_error_is_raised_in_its_own_words(start: Any) -> None:
    with pytest.raises(StartupError, match="the child: the disk is on fire"):
        start("fail").wait_ready(60)


def test_an_unexpected_end_names_the_exit_code(start: Any) -> None:
    with pytest.raises(StartupError, match="the child ended with exit code 7 while starting"):
        start("exit").wait_ready(60)


def test_a_child_that_says_nothing_is_given_up(start: Any) -> None:
    with pytest.raises(StartupError, match="the child was not ready within 0 s"):
        start("silent").wait_ready(0.2)


def test_a_child_that_ignores_the_signal_is_killed(start: Any) -> None:
    child = start("stubborn")
    child.wait_ready(60)
    assert child.stop(timeout_s=0.2) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_its_parent(start: Any, number: signal.Signals) -> None:
    parent = start("parent")
    grandchild = parent.wait_ready(60)["grandchild"]
    os.kill(parent.pid, number)
    assert is_gone(grandchild)


def test_closing_the_death_pipe_ends_the_child(start: Any) -> None:
    child = start("stubborn")
    child.wait_ready(60)
    child.close()
    assert child.process.wait(60) == 1


def test_announcing_without_a_parent_goes_nowhere() -> None:
    ChildLink().announce(ready=True)


def test_announcing_to_a_parent_that_stopped_reading_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    ChildLink(announce_fd=write).announce(ready=True)
    os.close(write)
