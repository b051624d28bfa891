# SPDX-License-Identifier: Apache-2.0
"""The supervisor of one deployment on this host: brokers, worker groups and gateways as its children.

Start-up is all or nothing: the first failure ends it with that child's own words. Afterwards a child that dies is
started again, on the same endpoints and with growing delays; a deployment whose last worker group cannot be
started any more ends. SIGUSR1 restarts them all, one after the other, while the deployment serves
(`rolling_restart`). The end is ordered (gateways, brokers, worker groups) and leaves no process and no file.
Everything happens in the main thread, because a child lives only as long as the thread that spawned it.
"""

from __future__ import annotations

import functools
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from mii_zmq.command_line import to_arguments
from mii_zmq.config import BrokerConfig, EngineConfig, LaunchConfig, WorkerConfig
from mii_zmq.errors import StartupError
from mii_zmq.member import Member
from mii_zmq.placement import count_gpus, place_groups
from mii_zmq.ports import choose_port, reachable_host
from mii_zmq.process import Child, environment, signals, spawn
from mii_zmq.registry import DeploymentRecord, Registry, process_identity
from mii_zmq.rolling_restart import RollingRestart

POLL_S = 0.1
STABLE_S = 60.0
"""A child that ran this long after it was ready starts again with a clean record."""
CONTROL_START_S = 30.0
"""Broker and gateway start in a second; one that takes this long hangs."""

log = logging.getLogger(__name__)
Report = Callable[[dict[str, Any]], None]


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
        self._engines = place_groups(engine, launch.replicas)
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
        self._wants_restart = False
        self._restart: RollingRestart | None = None
        self._successors: list[Member] = []
        self._leaving: list[tuple[Child, float]] = []
        """Processes that were replaced and finish what they have, and since when."""
        self._selector = selectors.DefaultSelector()
        self._brokers = [
            Member(name, "mii_zmq.broker", functools.partial(self._broker_arguments, i), 0.05, 0.5, CONTROL_START_S)
            for i, name in enumerate(_numbered("broker", launch.brokers))
        ]
        self._gateways = [
            Member(name, "mii_zmq.gateway", self._gateway_arguments, 0.1, 2.0, CONTROL_START_S)
            for name in _numbered("gateway", launch.gateways if launch.rest else 0)
        ]
        self._workers = [
            Member(
                f"worker {i + 1}",
                "mii_zmq.worker",
                functools.partial(self._worker_arguments, i),
                0.5,
                30.0,
                launch.load_timeout_s,
            )
            for i in range(launch.replicas)
        ]
        first = launch.broker_port
        self._client_endpoints = [f"tcp://127.0.0.1:{first + i if first else 0}" for i in range(launch.brokers)]
        self._worker_endpoints: list[str] = []
        self._rest_port = 0

    @property
    def _members(self) -> list[Member]:
        return [*self._brokers, *self._gateways, *self._workers]

    def run(self) -> int:
        """Start, supervise, end. Returns 0 after an ordered end, 130 when told to stop before it was ready.

        Raises:
            MiiError: start-up failed, or no worker group can be started any more.
        """
        with signals(self._on_signal):
            if self._launch.rest:
                self._rest_port = choose_port(self._launch.host, self._launch.port)
            directory = self._registry.claim(self._record)
            # Children keep their sockets in the deployment's directory, which disappears as a whole.
            with environment("MII_ZMQ_RUN_DIR", str(directory)):
                names = _numbered("workers", len(self._brokers))
                self._worker_endpoints = [f"ipc://{directory}/{name.replace(' ', '-')}" for name in names]
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
        for broker in self._brokers:
            self._spawn(broker)
        self._wait_for(self._brokers)
        if self._gateways and not self._rest_port:
            # The first one finds a port, which the others share.
            self._spawn(self._gateways[0])
            self._wait_for(self._gateways[:1])
        for member in [*self._gateways, *self._workers]:
            if not self._stops and member.child is None:
                self._spawn(member)

    def _wait_for(self, members: Sequence[Member]) -> None:
        while not all(member.is_ready for member in members) and not self._stops:
            self._turn()

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
        self._replace(now)

    def _replace(self, now: float) -> None:
        """Advance a rolling restart, and bury those who have left."""
        for successor in self._successors:
            if successor.child is not None and not successor.child.is_alive:
                self._read(successor)
                self._bury(successor)
        patience_s = self._launch.drain_timeout_s + 5
        for member in self._members:
            if member.is_leaving and member.child is not None and now - member.left_at > patience_s:
                member.child.process.kill()
        for child, since in list(self._leaving):
            if not child.is_alive or now - since > patience_s:
                child.kill()
                self._leaving.remove((child, since))
        if self._wants_restart and self._record.ready and self._restart is None:
            # Groups first: brokers and gateways are away for a moment only.
            members = [*self._workers, *self._brokers, *self._gateways]
            patience_s = self._launch.drain_timeout_s + self._launch.load_timeout_s
            self._restart = RollingRestart(self, members, self._fits_beside, patience_s)
            self._wants_restart = False
        if self._restart is not None:
            before = self._restart.current
            self._restart.turn()
            if self._restart.is_finished:
                self._record.num_restarts += 1
                self._record.restart_error = self._restart.error
                self._restart, before = None, "?"
            self._record.restarting = self._restart.current if self._restart is not None else ""
            if self._record.restarting != before:
                self._write_record()

    # What a rolling restart needs.

    def start_beside(self, member: Member) -> Member:
        member.incarnation += 1
        successor = replace(
            member, name=f"next {member.name}", child=None, is_ready=False, failed_starts=0, deaths=0, facts={}
        )
        self._successors.append(successor)
        self._spawn(successor)
        return successor

    def put_in_place(self, member: Member, successor: Member) -> None:
        # None when it died by itself meanwhile.
        old = member.child
        assert successor.child is not None
        if old is not None:
            self._selector.unregister(old.announce_fd)
        self._selector.modify(successor.child.announce_fd, selectors.EVENT_READ, member)
        self._successors.remove(successor)
        member.child, member.facts = successor.child, successor.facts
        member.started_at, member.ready_at, member.is_ready = successor.started_at, successor.ready_at, True
        member.deaths, member.restart_at = 0, None
        if old is not None:
            old.process.terminate()
            self._leaving.append((old, time.monotonic()))
        self._write_record()

    def dismiss(self, successor: Member) -> None:
        if successor.child is not None:
            self._bury(successor)
        self._successors.remove(successor)

    def leave(self, member: Member) -> None:
        assert member.child is not None
        member.is_leaving = True
        member.left_at = time.monotonic()
        member.child.process.terminate()

    def _fits_beside(self, member: Member) -> bool:
        """Brokers cannot share their endpoints. Of a model, two copies at a time are made only where the deployment has
        but one, and where memory is not what a GPU has been filled with."""
        if member in self._workers:
            engine = self._engines[0]
            is_on_gpu = engine.device != "cpu" and not engine.model.startswith("fake:") and count_gpus() > 0
            return len(self._workers) == 1 and not is_on_gpu
        return member in self._gateways

    def _bury(self, member: Member) -> None:
        assert member.child is not None
        self._selector.unregister(member.child.announce_fd)
        member.child.kill()
        member.child = None

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
        member.failed_starts = 0
        if member in self._brokers:
            # A restarted broker must come back where clients and workers look for it.
            index = self._brokers.index(member)
            self._client_endpoints[index] = facts.get("client_endpoint", self._client_endpoints[index])
            self._worker_endpoints[index] = facts.get("worker_endpoint", self._worker_endpoints[index])
        elif member in self._gateways:
            self._rest_port = urlsplit(facts["url"]).port or self._rest_port
        if self._record.ready and member in self._members:
            log.warning("%s is back (process %d)", member.name, member.child.pid if member.child else 0)
            self._write_record()

    def _on_death(self, member: Member, how: str) -> None:
        assert member.child is not None
        self._bury(member)
        if member.is_leaving:
            member.is_leaving = False
            self._spawn(member)
            return
        reason = member.last_error or f"{how}; its log lines above say more"
        if not self._record.ready:
            raise StartupError(f"{member.name}: {reason}")
        was_stable = member.is_ready and time.monotonic() - member.ready_at > STABLE_S
        member.deaths = 1 if was_stable else member.deaths + 1
        member.failed_starts += not member.is_ready
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
        self._record.client_endpoints = list(self._client_endpoints)
        self._record.worker_endpoints = list(self._worker_endpoints)
        if self._launch.rest:
            self._record.rest_url = f"http://{reachable_host(self._launch.host)}:{self._rest_port}"
        self._write_record()
        self._report(
            {
                "ready": True,
                "rest_url": self._record.rest_url,
                "client_endpoints": self._client_endpoints,
                "worker_endpoints": self._worker_endpoints,
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
        if self._restart is not None:
            self._restart.abandon()
        for members in (self._gateways, self._brokers, self._workers):
            self._stop(members, patience_s)
        for child, _ in self._leaving:
            child.kill()

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
        if signum == signal.SIGUSR1:
            self._wants_restart = True
        else:
            self._stops += 1

    def _broker_arguments(self, index: int) -> list[str]:
        broker = BrokerConfig(
            client_endpoint=self._client_endpoints[index],
            worker_endpoint=self._worker_endpoints[index],
            drain_timeout_s=self._launch.drain_timeout_s,
            **self._launch.telemetry,
        )
        return to_arguments(broker)

    def _gateway_arguments(self) -> list[str]:
        return to_arguments(self._launch.gateway(tuple(self._client_endpoints), self._rest_port))

    def _worker_arguments(self, index: int) -> list[str]:
        incarnation = self._workers[index].incarnation
        worker = WorkerConfig(
            deployment=self._launch.deployment,
            brokers=tuple(self._worker_endpoints),
            group=f"{socket.gethostname()}-{os.getpid()}-{index + 1}" + (f".{incarnation}" if incarnation else ""),
            drain_timeout_s=self._launch.drain_timeout_s,
            load_timeout_s=self._launch.load_timeout_s,
            **self._launch.telemetry,
        )
        return [*to_arguments(self._engines[index]), *to_arguments(worker)]


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name} {i + 1}" for i in range(count)]
