# SPDX-License-Identifier: Apache-2.0
"""Real processes in numbers: brokers, worker groups of several ranks, gateways; each can be killed, stopped and started
again in its place, on the same endpoints.

Everything started here dies with the thread that made it. The output of each member and its descendants goes to a file
of its own, so that the log can be searched afterwards. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mii_zmq.client import AsyncClient, BackgroundLoop
from mii_zmq.errors import MiiError
from mii_zmq.process import Child, spawn
from tests.stack import PATIENCE_S, http, unused_endpoint, unused_port

FAST_HEARTBEATS = ("--heartbeat-ms", "100", "--liveness", "10")
"""Death is noticed within a second, and a busy machine is no death."""
LOAD_S = 180.0


@dataclass(slots=True, eq=False)
class Member:
    """The place of one process; successive ones fill it."""

    name: str
    module: str
    arguments: Callable[[], list[str]]
    log_path: Path
    child: Child | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    num_starts: int = 0
    is_ready: bool = False


class Fleet:
    """Started piece by piece, or as a whole by `start`. Belongs to one thread, but for the methods that only ask."""

    def __init__(
        self,
        directory: Path,
        *,
        deployment: str = "m",
        broker_options: Sequence[str] = (),
        output_path: Path | None = None,
        error_path: Path | None = None,
    ) -> None:
        """`output_path` and `error_path` take the processes' outputs in place of the log files."""
        self.deployment = deployment
        self.directory = directory
        self.members: dict[str, Member] = {}
        self._broker_options = tuple(broker_options)
        self._output_path, self._error_path = output_path, error_path

    def start(
        self,
        *,
        model: str,
        groups: int,
        ranks: int = 1,
        brokers: int = 1,
        gateways: int = 1,
        options: Sequence[str] = (),
    ) -> None:
        """All of it at the same time; returns when requests are served."""
        for index in range(brokers):
            self.add_broker(f"broker {index + 1}")
        for index in range(groups):
            self.add_group(f"group {index + 1}", model, *options, "--tensor-parallel", str(ranks), wait=False)
        for index in range(gateways):
            self.add_gateway(f"gateway {index + 1}", wait=False)
        for member in self.members.values():
            self.wait_ready(member.name)
        wait_until(lambda: self.is_serving(groups), "the fleet serves")

    # One member each.

    def add_broker(self, name: str = "broker 1", *options: str) -> Member:
        endpoints = {"client_endpoint": unused_endpoint(), "worker_endpoint": unused_endpoint()}

        def arguments() -> list[str]:
            named = [f"--{key.replace('_', '-')}={value}" for key, value in endpoints.items()]
            return [*named, *self._broker_options, *options]

        member = self._add(name, "mii_zmq.broker", arguments)
        self.spawn(name)
        self.wait_ready(name)
        return member

    def add_group(
        self, name: str, model: str, *options: str, brokers: Sequence[str] | None = None, wait: bool = True
    ) -> Member:
        def arguments() -> list[str]:
            endpoints = ",".join(brokers if brokers is not None else self.worker_endpoints)
            named = [f"--model={model}", f"--deployment={self.deployment}", f"--group={name}", f"--brokers={endpoints}"]
            return [*named, *options]

        member = self._add(name, "mii_zmq.worker", arguments)
        self.spawn(name)
        if wait:
            self.wait_ready(name)
            wait_until(lambda: name in self.group_states(), f"{name} is registered")
        return member

    def add_gateway(
        self, name: str = "gateway 1", *options: str, brokers: Sequence[str] | None = None, wait: bool = True
    ) -> Member:
        port = unused_port()

        def arguments() -> list[str]:
            endpoints = ",".join(brokers if brokers is not None else self.client_endpoints)
            return [f"--port={port}", f"--brokers={endpoints}", *options]

        member = self._add(name, "mii_zmq.gateway", arguments)
        self.spawn(name)
        if wait:
            self.wait_ready(name)
            wait_until(lambda: http(self.url(name) + "/health/ready")[0] == 200, f"{name} is ready")
        return member

    def spawn(self, name: str) -> None:
        """Start the next process in this place."""
        member = self.members[name]
        with _outputs_to(self._output_path or member.log_path, self._error_path or member.log_path):
            member.child = spawn(member.module, member.arguments(), name)
        member.num_starts += 1
        member.is_ready = False

    def wait_ready(self, name: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        member = self.members[name]
        if not member.is_ready:
            assert member.child is not None
            member.facts |= member.child.wait_ready(timeout_s)
            member.is_ready = True
        return member.facts

    def poll_ready(self, name: str) -> bool:
        """Whether the process has said that it is ready, without waiting."""
        member = self.members[name]
        if not member.is_ready and member.child is not None and member.child.is_alive:
            for announcement in member.child.announcements(0.001):
                if announcement.get("ready"):
                    member.facts |= announcement
                    member.is_ready = True
        return member.is_ready

    def kill(self, name: str) -> None:
        """SIGKILL to the member's own process, and wait for its end."""
        member = self.members[name]
        if member.child is not None:
            member.child.kill()
            member.child = None
        member.is_ready = False

    def restart(self, name: str) -> None:
        """A new process in the place of one that is gone."""
        self.kill(name)
        self.spawn(name)
        self.wait_ready(name)

    def terminate(self, name: str, timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM, and the exit code."""
        member = self.members[name]
        assert member.child is not None
        code = member.child.stop(timeout_s)
        member.child = None
        member.is_ready = False
        return code

    def is_alive(self, name: str) -> bool:
        child = self.members[name].child
        return child is not None and child.is_alive

    def bury(self) -> list[str]:
        """The members whose processes have ended, now waited for; their places are empty."""
        dead = [name for name, member in self.members.items() if member.child is not None and not member.child.is_alive]
        for name in dead:
            self.kill(name)
        return dead

    def revive(self, timeout_s: float = PATIENCE_S) -> None:
        """Start again whatever is dead, or dies meanwhile, and wait until all of it serves."""

        def is_back() -> bool:
            self.bury()
            for name, member in self.members.items():
                if member.child is None:
                    self.spawn(name)
            ready = [self.poll_ready(name) for name in self.members]
            return all(ready) and self.is_serving(len(self.groups))

        wait_until(is_back, "all of the fleet serves again", timeout_s)

    def close(self) -> None:
        """From the doors inwards."""
        for kind in ("gateway", "broker", "group"):
            children = [m.child for name, m in self.members.items() if name.startswith(kind) and m.child is not None]
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGCONT)
                    child.process.terminate()
            for child in children:
                child.stop(PATIENCE_S)
        for member in self.members.values():
            member.child = None

    # Questions.

    @property
    def brokers(self) -> list[str]:
        return [name for name in self.members if name.startswith("broker")]

    @property
    def groups(self) -> list[str]:
        return [name for name in self.members if name.startswith("group")]

    @property
    def gateways(self) -> list[str]:
        return [name for name in self.members if name.startswith("gateway")]

    @property
    def client_endpoints(self) -> list[str]:
        return [self.members[name].facts["client_endpoint"] for name in self.brokers]

    @property
    def worker_endpoints(self) -> list[str]:
        return [self.members[name].facts["worker_endpoint"] for name in self.brokers]

    def url(self, name: str = "gateway 1") -> str:
        return str(self.members[name].facts["url"]).rstrip("/")

    def pids(self) -> dict[str, int]:
        """By role: members, and the engines and ranks below groups ("group 1 engine", "group 1 rank 1")."""
        found: dict[str, int] = {}
        for name, member in list(self.members.items()):
            child = member.child
            if child is None or not child.is_alive:
                continue
            found[name] = child.pid
            for pid, command in descendants(child.pid):
                role = role_of(command)
                if role is not None:
                    found[f"{name} {role}"] = pid
        return found

    def statuses(self) -> dict[str, dict[str, Any]]:
        """STATUS by broker; brokers that do not answer are left out."""
        found = {}
        for name in self.brokers:
            with contextlib.suppress(MiiError):
                found[name] = ask_status(self.members[name].facts["client_endpoint"])
        return found

    def status(self) -> dict[str, Any]:
        return ask_status(self.members[self.brokers[0]].facts["client_endpoint"])

    def groups_status(self) -> dict[str, dict[str, Any]]:
        found = self.status()["deployments"].get(self.deployment, {"groups": []})["groups"]
        return {group["group"]: group for group in found}

    def group_states(self) -> dict[str, str]:
        return {name: group["state"] for name, group in self.groups_status().items()}

    def load(self, name: str, counter: str) -> int:
        """Of a group, as the first broker knows it; 0 for one that it does not know at the moment."""
        return int(self.groups_status().get(name, {"load": {}})["load"].get(counter, 0))

    def is_serving(self, num_groups: int) -> bool:
        """All gateways are ready, and all brokers know this many groups."""
        statuses = self.statuses()
        counts = [len(s["deployments"].get(self.deployment, {"groups": []})["groups"]) for s in statuses.values()]
        if len(counts) < len(self.brokers) or any(count < num_groups for count in counts):
            return False
        try:
            return all(http(self.url(name) + "/health/ready")[0] == 200 for name in self.gateways)
        except OSError:
            return False

    def log(self, name: str) -> str:
        path = self.members[name].log_path
        return path.read_text(errors="replace") if path.exists() else ""

    def _add(self, name: str, module: str, arguments: Callable[[], list[str]]) -> Member:
        assert name not in self.members
        member = Member(name, module, arguments, self.directory / f"{name.replace(' ', '-')}.log")
        self.members[name] = member
        return member


def role_of(command: str) -> str | None:
    """What a descendant of a group is, by its command line."""
    if "mii_zmq.worker.engine_process" in command:
        return "engine"
    if "mii_zmq.worker.rank_process" in command:
        rank = next((word.partition("=")[2] for word in command.split("\0") if word.startswith("--rank=")), "?")
        return f"rank {rank}"
    return None


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Children and their children: pid and command line (words separated by NUL)."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                with contextlib.suppress(OSError):
                    yield child, Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
                yield from descendants(child)


def ask_status(endpoint: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """Raises MiiError when the broker does not answer."""

    async def ask() -> dict[str, Any]:
        client = AsyncClient([endpoint], name="observer")
        try:
            await client.connect(timeout_s)
            return await client.status(timeout_s)
        finally:
            await client.close()

    loop = BackgroundLoop("observer")
    try:
        return loop.run(ask())
    finally:
        loop.close()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S, poll_s: float = 0.02) -> float:
    """Poll until `condition` holds; returns the seconds it took."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"after {timeout_s:g} s it is still not so that {what}")
        time.sleep(poll_s)
    return time.monotonic() - started


def is_running(pid: int) -> bool:
    """False for the dead and for those that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def _outputs_to(output_path: Path, error_path: Path) -> Iterator[None]:
    """What is started meanwhile writes there."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    logs = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in (output_path, error_path)]
    try:
        os.dup2(logs[0], 1)
        os.dup2(logs[1], 2)
        yield
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for fd in (*kept, *logs):
            os.close(fd)
