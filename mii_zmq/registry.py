# SPDX-License-Identifier: Apache-2.0
"""The registry of deployments that run on this host: one private directory each, with one JSON record in it.

`serve` and `client` of different processes meet here. A record names the supervisor by pid and by an identity that a
recycled pid cannot have, so a dead deployment is recognised (and its directory removed) and a stranger is never
signalled. Records appear and change by one rename. A lock on the run directory itself makes claiming a name exclusive.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mii_zmq.config import run_dir
from mii_zmq.errors import ConfigError, ServiceError, UnknownDeployment

RECORD_NAME = "deployment.json"
MAX_PATIENCE_S = 1e6


class DeploymentNotFoundError(UnknownDeployment):
    """No deployment of this name runs on this host."""


class DeploymentRecord(msgspec.Struct, kw_only=True):
    """What other processes need to reach, show and end a deployment."""

    deployment: str
    model: str
    pid: int
    """The supervisor's."""
    identity: str
    """`process_identity` of the supervisor."""
    ready: bool = False
    replicas: int = 1
    started_at: float = 0.0
    """Seconds since the epoch."""
    client_endpoints: list[str] = []
    """One per broker."""
    worker_endpoints: list[str] = []
    rest_url: str | None = None
    log_path: str | None = None
    """None: the supervisor runs in a terminal and logs there."""
    processes: dict[str, int] = {}
    """Name -> pid of the supervisor's children."""
    restarting: str = ""
    """The child that a rolling restart is busy with."""
    num_restarts: int = 0
    """Rolling restarts that have ended."""
    restart_error: str | None = None
    """Why the last one ended early."""


def process_identity(pid: int) -> str | None:
    """Something that only this process has: boot and start time. None when it does not run (any more)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The command in parentheses may hold anything, so count from the last one: state is field 3, start time field 22.
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


class Registry:
    """The records below one run directory (default: the user's)."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = run_dir() if root is None else root

    def directory(self, deployment: str) -> Path:
        """A short path, since sockets live in it; the name itself may hold slashes."""
        return self.root / f"d-{hashlib.sha256(deployment.encode()).hexdigest()[:12]}"

    def claim(self, record: DeploymentRecord) -> Path:
        """Take the name and return the deployment's new directory, mode 0700.

        Raises:
            ConfigError: a deployment of this name runs.
        """
        directory = self.directory(record.deployment)
        with self._locked():
            other = self._read_live(directory)
            if other is not None:
                raise ConfigError(
                    f"deployment {record.deployment!r} runs already (process {other.pid}); end it with "
                    f"`python -m mii_zmq stop {record.deployment}`, or choose another deployment name"
                )
            directory.mkdir(mode=0o700)
            self.write(record)
        return directory

    def write(self, record: DeploymentRecord) -> None:
        path = self.directory(record.deployment) / RECORD_NAME
        scratch = path.with_suffix(".new")
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        scratch.rename(path)

    def release(self, record: DeploymentRecord) -> None:
        """Remove the record and the directory with everything in it."""
        with self._locked():
            shutil.rmtree(self.directory(record.deployment), ignore_errors=True)

    def find(self, deployment: str) -> DeploymentRecord | None:
        """The record of a running deployment; what a dead one left behind is removed."""
        directory = self.directory(deployment)
        if not directory.exists():
            return None
        with self._locked():
            return self._read_live(directory)

    def list_all(self) -> list[DeploymentRecord]:
        with self._locked():
            found = [self._read_live(directory) for directory in sorted(self.root.glob("d-*"))]
        return sorted((record for record in found if record is not None), key=lambda record: record.deployment)

    def _read_live(self, directory: Path) -> DeploymentRecord | None:
        """The record if its supervisor runs; otherwise the directory is removed. Only under the lock."""
        try:
            record = msgspec.json.decode((directory / RECORD_NAME).read_bytes(), type=DeploymentRecord)
        except (OSError, msgspec.DecodeError):
            record = None
        if record is not None and process_identity(record.pid) == record.identity:
            return record
        shutil.rmtree(directory, ignore_errors=True)
        return None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The directory itself is locked: there is no lock file to leave behind.
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def end_deployment(record: DeploymentRecord, timeout_s: float) -> None:
    """End the supervisor and with it everything that it started; returns when it is gone.

    It gets `timeout_s` to finish running requests; a second signal then makes it kill its children.

    Raises:
        ConfigError: `timeout_s` is no time; nothing was done.
        ServiceError: it is still there some seconds after the second signal.
    """
    if not 0 <= timeout_s <= MAX_PATIENCE_S:
        raise ConfigError(f"timeout_s is {timeout_s}; it must be 0 to {MAX_PATIENCE_S:g} seconds")
    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if process_identity(record.pid) != record.identity:
            return
        # Through the handle: it can only reach the process that was just identified.
        for patience_s in (timeout_s, 10.0):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            if select.select([handle], [], [], patience_s)[0]:
                _reap(record.pid)
                return
    finally:
        os.close(handle)
    raise ServiceError(f"the supervisor of deployment {record.deployment!r} (process {record.pid}) does not end")


def restart_deployment(record: DeploymentRecord, poll_s: float = 0.1) -> Iterator[str]:
    """Have the supervisor restart everything, one after the other; yields what it is busy with until that is done.

    Raises:
        ServiceError: the deployment has ended, or a part of it did not come back.
    """
    registry = Registry()
    gone = ServiceError(f"deployment {record.deployment!r} has ended")
    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        raise gone from None
    try:
        if process_identity(record.pid) != record.identity:
            raise gone
        signal.pidfd_send_signal(handle, signal.SIGUSR1)
    finally:
        os.close(handle)
    shown = ""
    while True:
        now = registry.find(record.deployment)
        if now is None or now.identity != record.identity:
            raise gone
        if now.num_restarts > record.num_restarts:
            if now.restart_error is not None:
                raise ServiceError(f"the rolling restart of {record.deployment!r} ended early: {now.restart_error}")
            return
        if now.restarting and now.restarting != shown:
            yield now.restarting
        shown = now.restarting
        time.sleep(poll_s)


def _reap(pid: int) -> None:
    """Collect the process if it is our own child and nobody else does, so that not even a zombie stays."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return
