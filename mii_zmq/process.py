# SPDX-License-Identifier: Apache-2.0
"""How our processes start, report and end together: `spawn` for the parent, `ChildLink` for the child.

A child gets two inherited pipe ends on its command line. On the first it announces one JSON map per line: progress
({"progress": text, "fraction": 0..1}), readiness ({"ready": true, ...}) or failure ({"error": line}). The second is the
death pipe: its write end exists only in the parent, so end-of-file means that the parent is gone, whatever killed it,
and the child exits at once. The kernel's parent-death signal does the same for a child that hangs; it is tied to the
parent's spawning thread, so children are spawned by a thread that lives as long as they should.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from mii_zmq.errors import StartupError

_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_MAX_ANNOUNCEMENT_BYTES = 2**20


@dataclass(slots=True)
class Child:
    """A spawned process; owned by the thread that spawned it."""

    name: str
    process: subprocess.Popen[bytes]
    announce_fd: int
    death_fd: int
    _buffer: bytearray = field(default_factory=bytearray)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def announcements(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield announcements as they come; ends when the child closes its pipe (exits) or time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            line_end = self._buffer.find(b"\n")
            if line_end >= 0:
                line = bytes(self._buffer[:line_end])
                del self._buffer[: line_end + 1]
                yield json.loads(line)
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.announce_fd], [], [], left)[0]:
                return
            data = os.read(self.announce_fd, 65536)
            if not data or len(self._buffer) > _MAX_ANNOUNCEMENT_BYTES:
                return
            self._buffer += data

    def wait_ready(self, timeout_s: float, on_progress: Any = None) -> dict[str, Any]:
        """Read announcements up to readiness and return that one.

        Raises:
            StartupError: the child announced an error, exited, or was not ready in time.
        """
        for announcement in self.announcements(timeout_s):
            if announcement.get("ready"):
                return announcement
            if "error" in announcement:
                raise StartupError(f"{self.name}: {announcement['error']}")
            if on_progress is not None:
                on_progress(announcement)
        code = self.process.poll()
        if code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(1)
        why = (
            f"was not ready within {timeout_s:.0f} s" if code is None else f"ended with exit code {code} while starting"
        )
        raise StartupError(f"{self.name} {why}; its log above says more")

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM, wait, then SIGKILL. Returns the exit code."""
        if self.is_alive:
            self.process.terminate()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.close()
        return code

    def kill(self) -> None:
        if self.is_alive:
            self.process.kill()
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Close our pipe ends; a child that still runs exits."""
        for fd in (self.announce_fd, self.death_fd):
            if fd >= 0:
                os.close(fd)
        self.announce_fd = self.death_fd = -1


def spawn(
    module: str, arguments: Sequence[str], name: str, *, new_session: bool = True, pass_fds: Sequence[int] = ()
) -> Child:
    """Start `python -m module arguments...` as a child with announcement and death pipes.

    `new_session` keeps a terminal's Ctrl-C from reaching the child, so that its parent can end it in order. The child
    inherits `pass_fds` under the same numbers.
    """
    announce_read, announce_write = os.pipe()
    death_read, death_write = os.pipe()
    command = [sys.executable, "-m", module, *arguments]
    command += ["--announce-fd", str(announce_write), "--death-fd", str(death_read), "--parent-pid", str(os.getpid())]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(announce_write, death_read, *pass_fds),
            start_new_session=new_session,
        )
    except BaseException:
        os.close(announce_read)
        os.close(death_write)
        raise
    finally:
        os.close(announce_write)
        os.close(death_read)
    return Child(name, process, announce_read, death_write)


def describe_exit(child: Child) -> str:
    """How a child ended, for a log line."""
    code = child.process.poll()
    if code is None:
        return "closed its pipe but still runs"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def processor_ticks(pid: int) -> int | None:
    """Hundredths of a second of processor time that a process has used; None where that cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """The handler takes the supervisor's signals meanwhile; for the main thread."""
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """An environment variable, for children that are started meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class ChildLink:
    """The child's side. Without the options of `spawn` (started by hand) announcements go nowhere."""

    def __init__(
        self, announce_fd: int | None = None, death_fd: int | None = None, parent_pid: int | None = None
    ) -> None:
        self._announce_fd = announce_fd
        if parent_pid is not None:
            die_with_parent(parent_pid)
        if death_fd is not None:
            threading.Thread(target=_exit_at_eof, args=(death_fd,), name="death-pipe", daemon=True).start()

    @property
    def has_reader(self) -> bool:
        """The parent hears announcements, and says to the user what has to be said."""
        return self._announce_fd is not None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        for option in ("--announce-fd", "--death-fd", "--parent-pid"):
            parser.add_argument(option, type=int, default=None, help=argparse.SUPPRESS)

    @classmethod
    def from_arguments(cls, namespace: argparse.Namespace) -> ChildLink:
        return cls(namespace.announce_fd, namespace.death_fd, namespace.parent_pid)

    def announce(self, **facts: Any) -> None:
        """Tell the parent; a parent that no longer reads is no error."""
        if self._announce_fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._announce_fd, json.dumps(facts).encode() + b"\n")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel end this process with its parent; at once, if that is gone by now and another one has taken its
    place."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _exit_at_eof(death_fd: int) -> None:
    while True:
        try:
            if not os.read(death_fd, 1):
                os._exit(1)
        except InterruptedError:
            continue
        except OSError:
            os._exit(1)
