# SPDX-License-Identifier: Apache-2.0
"""The supervisor of one deployment on this host: broker, worker groups and gateway as its children.

Start-up is all or nothing: the first failure ends it with that child's own words. Afterwards a child that dies is
started again, on the same endpoints and with growing delays; a deployment whose last worker group cannot be
started any more ends. The end is ordered (gateway, broker, worker groups) and leaves no process and no file.
Everything happens in the main thread, because a child lives only as long as the thread that spawned it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from mii_zmq.config import (
    DEFAULT_REST_PORT,
    BrokerConfig,
    EngineConfig,
    LaunchConfig,
    WorkerConfig,
    to_arguments,
)
from mii_zmq.errors import ConfigError, StartupError
from mii_zmq.process import Child, spawn
from mii_zmq.registry import DeploymentRecord, Registry, process_identity

POLL_S = 0.1
STABLE_S = 60.0
"""A child that ran this long after it was ready starts again with a clean record."""
MAX_FAILED_STARTS = 5
"""Deaths in a row, none of them after it was ready, that a child is allowed; one more and it is given up."""
CONTROL_START_S = 30.0
"""Broker and gateway start in a second; one that takes this long hangs."""

log = logging.getLogger(__name__)
Report = Callable[[dict[str, Any]], None]


@dataclass(slots=True, eq=False)
class Member:
    """The place of one child; successive processes fill it."""

    name: str
    module: str
    arguments: Callable[[], list[str]]
    """Made anew at every start: endpoints are known by then."""
    delay_s: float
    """Before the first restart; doubles with every further death that is not preceded by a stable time."""
    max_delay_s: float
    start_timeout_s: float
    child: Child | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What the child announced when it became ready."""
    is_ready: bool = False
    max_failed_starts: int = MAX_FAILED_STARTS
    failed_starts: int = 0
    deaths: int = 0
    started_at: float = 0.0
    ready_at: float = 0.0
    restart_at: float | None = None
    last_error: str | None = None

    @property
    def is_given_up(self) -> bool:
        return self.child is None and self.restart_at is None


class Supervisor:
    """Runs one deployment until a signal, or until it cannot go on. `run` belongs to the main thread."""

    def __init__(
        self,
        launch: LaunchConfig,
        engine: EngineConfig,
        report: Report,
        *,
        registry: Registry | None = None,
        starter_fd: int | None = None,
        log_path: str | None = None,
    ) -> None:
        self._launch = launch
        self._engine = _share_threads(engine, launch.replicas)
        self._report = report
        self._starter_fd = starter_fd
        """A pipe whose reader wants this deployment; while starting, its end is a reason to stop."""
        self._registry = registry or Registry()
        self._record = DeploymentRecord(
            deployment=launch.deployment,
            model=engine.model,
            pid=os.getpid(),
            identity=process_identity(os.getpid()) or "",
            replicas=launch.replicas,
            started_at=time.time(),
            log_path=log_path,
        )
        self._stops = 0
        self._selector = selectors.DefaultSelector()
        self._broker = Member("broker", "mii_zmq.broker", self._broker_arguments, 0.05, 0.5, CONTROL_START_S)
        self._gateway = Member("gateway", "mii_zmq.gateway", self._gateway_arguments, 0.2, 2.0, CONTROL_START_S)
        self._workers = [
            Member(
                f"worker {i + 1}",
                "mii_zmq.worker",
                functools.partial(self._worker_arguments, i + 1),
                0.5,
                30.0,
                launch.load_timeout_s,
            )
            for i in range(launch.replicas)
        ]
        self._client_endpoint = f"tcp://127.0.0.1:{launch.broker_port}"
        self._worker_endpoint = ""
        self._rest_port = 0

    @property
    def _members(self) -> list[Member]:
        gateways = [self._gateway] if self._launch.rest else []
        return [self._broker, *gateways, *self._workers]

    def run(self) -> int:
        """Start, supervise, end. Returns 0 after an ordered end, 130 when told to stop before it was ready.

        Raises:
            MiiError: start-up failed, or no worker group can be started any more.
        """
        with _signals(self._on_signal):
            if self._launch.rest:
                self._rest_port = _choose_port(self._launch.host, self._launch.port)
            directory = self._registry.claim(self._record)
            # Children keep their sockets in the deployment's directory, which disappears as a whole.
            with _environment("MII_ZMQ_RUN_DIR", str(directory)):
                self._worker_endpoint = f"ipc://{directory}/workers"
                try:
                    self._start()
                    while not self._stops:
                        self._turn()
                    return 0 if self._record.ready else 130
                finally:
                    self._end()
                    self._selector.close()
                    self._registry.release(self._record)

    def _start(self) -> None:
        if self._starter_fd is not None:
            self._selector.register(self._starter_fd, selectors.EVENT_READ, None)
        self._spawn(self._broker)
        while not self._broker.is_ready and not self._stops:
            self._turn()
        for member in self._members[1:]:
            if not self._stops:
                self._spawn(member)

    def _turn(self) -> None:
        """One round: read what children announce, notice deaths and hangs, start what is due."""
        for key, _ in self._selector.select(POLL_S):
            if key.data is None:
                self._selector.unregister(key.fileobj)
                if not self._record.ready:
                    log.warning("the process that started this deployment is gone; ending")
                    self._stops += 1
            else:
                self._read(key.data)
        now = time.monotonic()
        for member in self._members:
            if member.child is not None and not member.child.is_alive:
                self._read(member)
                self._on_death(member, f"ended with exit code {member.child.process.returncode}")
            elif member.child is not None and not member.is_ready and now - member.started_at > member.start_timeout_s:
                self._on_death(member, f"was not ready within {member.start_timeout_s:.0f} s")
            elif member.restart_at is not None and now >= member.restart_at:
                self._spawn(member)
        if not self._record.ready and all(member.is_ready for member in self._members):
            self._on_all_ready()

    def _spawn(self, member: Member) -> None:
        member.child = spawn(member.module, member.arguments(), member.name)
        member.started_at = time.monotonic()
        member.restart_at = member.last_error = None
        member.is_ready = False
        self._selector.register(member.child.announce_fd, selectors.EVENT_READ, member)

    def _read(self, member: Member) -> None:
        assert member.child is not None
        for announcement in member.child.announcements(0.001):
            if announcement.get("ready"):
                self._on_ready(member, announcement)
            elif "error" in announcement:
                member.last_error = str(announcement["error"])
            elif not self._record.ready:
                self._report({**announcement, "name": member.name})

    def _on_ready(self, member: Member, facts: dict[str, Any]) -> None:
        member.facts = facts
        member.is_ready = True
        member.ready_at = time.monotonic()
        if member is self._broker:
            # A restarted broker must come back where clients and workers look for it.
            self._client_endpoint = facts.get("client_endpoint", self._client_endpoint)
            self._worker_endpoint = facts.get("worker_endpoint", self._worker_endpoint)
        elif member is self._gateway:
            self._rest_port = urlsplit(facts["url"]).port or self._rest_port
        if self._record.ready:
            log.warning("%s is back (process %d)", member.name, member.child.pid if member.child else 0)
            self._write_record()

    def _on_death(self, member: Member, how: str) -> None:
        assert member.child is not None
        self._selector.unregister(member.child.announce_fd)
        member.child.kill()
        member.child = None
        reason = member.last_error or f"{how}; its log lines above say more"
        if not self._record.ready:
            raise StartupError(f"{member.name}: {reason}")
        was_stable = member.is_ready and time.monotonic() - member.ready_at > STABLE_S
        member.deaths = 1 if was_stable else member.deaths + 1
        member.failed_starts = 0 if member.is_ready else member.failed_starts + 1
        member.is_ready = False
        if member.failed_starts > member.max_failed_starts:
            summary = f"{member.name} failed {member.failed_starts} times in a row while starting: {reason}"
            if member not in self._workers or all(worker.is_given_up for worker in self._workers):
                raise StartupError(summary)
            log.error("%s; it is given up", summary)
            return
        delay_s = min(member.max_delay_s, member.delay_s * 2 ** min(member.deaths - 1, 20))
        log.warning("%s: %s; starting it again in %.2g s", member.name, reason, delay_s)
        member.restart_at = time.monotonic() + delay_s

    def _on_all_ready(self) -> None:
        self._record.ready = True
        self._record.client_endpoint = self._client_endpoint
        self._record.worker_endpoint = self._worker_endpoint
        if self._launch.rest:
            self._record.rest_url = f"http://{_reachable_host(self._launch.host)}:{self._rest_port}"
        self._write_record()
        self._report(
            {
                "ready": True,
                "rest_url": self._record.rest_url,
                "client_endpoint": self._client_endpoint,
                "worker_endpoint": self._worker_endpoint,
                "workers": [worker.facts for worker in self._workers],
            }
        )

    def _write_record(self) -> None:
        self._record.processes = {member.name: member.child.pid for member in self._members if member.child}
        self._registry.write(self._record)

    def _end(self) -> None:
        """From the doors inwards, so that what was accepted still finds everything that it needs: the gateway, then the
        broker, which waits for its running and queued requests, then the groups."""
        patience_s = self._launch.drain_timeout_s + 5
        if self._record.ready and self._stops < 2:
            self._report({"ending": self._launch.drain_timeout_s})
        for members in ([self._gateway], [self._broker], self._workers):
            self._stop(members, patience_s)

    def _stop(self, members: Sequence[Member], patience_s: float) -> None:
        children = [member.child for member in members if member.child is not None]
        for child in children:
            if child.is_alive:
                child.process.terminate()
        deadline = time.monotonic() + patience_s
        # The second signal means: now.
        while any(child.is_alive for child in children) and time.monotonic() < deadline and self._stops < 2:
            time.sleep(0.02)
        for member in members:
            if member.child is not None:
                member.child.kill()
                member.child = None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stops += 1

    def _broker_arguments(self) -> list[str]:
        broker = BrokerConfig(
            client_endpoint=self._client_endpoint,
            worker_endpoint=self._worker_endpoint,
            drain_timeout_s=self._launch.drain_timeout_s,
        )
        return to_arguments(broker)

    def _gateway_arguments(self) -> list[str]:
        return to_arguments(self._launch.gateway((self._client_endpoint,), self._rest_port))

    def _worker_arguments(self, number: int) -> list[str]:
        worker = WorkerConfig(
            deployment=self._launch.deployment,
            brokers=(self._worker_endpoint,),
            group=f"{socket.gethostname()}-{os.getpid()}-{number}",
            drain_timeout_s=self._launch.drain_timeout_s,
            load_timeout_s=self._launch.load_timeout_s,
        )
        return [*to_arguments(self._engine), *to_arguments(worker)]


def _choose_port(host: str, port: int | None) -> int:
    """The port for the gateway, checked before minutes go into loading a model. Raises ConfigError when taken."""
    if port == 0:
        return 0
    wanted = DEFAULT_REST_PORT if port is None else port
    family, kind, protocol, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if port is None:
                log.info("port %d is taken; using a free one", wanted)
                return 0
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one"
            ) from None
    return wanted


def _reachable_host(host: str) -> str:
    """What a client on this host types to reach an address that may be a wildcard."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown


def _share_threads(engine: EngineConfig, replicas: int) -> EngineConfig:
    """Groups on one host divide its cores instead of each taking all."""
    if engine.num_threads is not None or replicas == 1:
        return engine
    return replace(engine, num_threads=max(1, len(os.sched_getaffinity(0)) // replicas))


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
