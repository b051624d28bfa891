# SPDX-License-Identifier: Apache-2.0
"""The deployment that `bench_service` measures, as `mii_zmq serve` starts it, and what its processes do with the CPU.

It runs in this script's process group and dies with it, so that whoever kills the one has ended the other.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mii_zmq.registry import DeploymentRecord, Registry

ROOT = Path(__file__).resolve().parent.parent
DEPLOYMENT = "bench"
NUM_TAIL_LINES = 40
POLL_S = 0.1
PARTS = {"engine_process": "engine", "rank_process": "rank", "grammar_process": "grammar"}
"""Of a worker group, beside the actor."""
STOP_S = 20.0
HANG_S = 5.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PR_SET_PDEATHSIG = 1
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Whatever proxy the environment names: the service is on this machine."""


def child_environment(**more: str) -> dict[str, str]:
    """Ours, with the repository first on the path; what was installed beside the interpreter's own stays on it."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1", **more}


def die_with_parent() -> None:
    """Between fork and exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def tail(path: Path, num_lines: int = NUM_TAIL_LINES) -> str:
    """The last lines of a log, marked as such."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return "\n".join(f"    | {line[:300]}" for line in lines[-num_lines:]) or "    | (empty)"


class Service:
    """Broker, one worker group and gateways. An asynchronous context manager; `log` gets what they say."""

    def __init__(self, arguments: list[str], log: Path, limit_s: float) -> None:
        self.seconds = 0.0
        """From the start to ready."""
        self._arguments, self._log, self._limit_s = arguments, log, limit_s
        self._directory = tempfile.TemporaryDirectory(prefix="mzq", dir="/tmp", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._record: DeploymentRecord | None = None
        self._pids: set[int] = set()
        self._ready_pids: tuple[int, ...] = ()

    @property
    def url(self) -> str:
        assert self._record is not None
        return str(self._record.rest_url)

    @property
    def pids(self) -> dict[str, int]:
        """By the process's part in it; that of grammars is there once one was asked for."""
        assert self._record is not None
        found = {("actor" if name == "worker 1" else name): pid for name, pid in self._record.processes.items()}
        for pid in _descendants(found["actor"]):
            name = PARTS.get(_module(pid), "other")
            number = sum(known.partition(" ")[0] == name for known in found)
            found[f"{name} {number + 1}" if number else name] = pid
        return found

    @property
    def is_whole(self) -> bool:
        """All processes that were there when it was ready still run."""
        return all(_is_alive(pid) for pid in self._ready_pids)

    async def __aenter__(self) -> Service:
        begin = time.monotonic()
        command = [sys.executable, "-m", "mii_zmq", "serve", *self._arguments]
        command += ["--deployment-name", DEPLOYMENT, "--port=0", "--drain-timeout-s=5"]
        command.append(f"--load-timeout-s={self._limit_s:g}")
        os.chmod(self._directory.name, 0o700)
        environment = child_environment(MII_ZMQ_RUN_DIR=self._directory.name)
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a moment, before anything else runs
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        try:
            await self._wait_ready(begin)
        except BaseException:
            await self.stop()
            raise
        self.seconds = time.monotonic() - begin
        self._ready_pids = tuple(self.pids.values())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _wait_ready(self, begin: float) -> None:
        """Raises SystemExit with the end of the log."""
        assert self._process is not None
        registry = Registry(Path(self._directory.name))
        while True:
            record = registry.find(DEPLOYMENT)
            self._note_pids()
            if record is not None and record.ready:
                self._record = record
                return
            code = self._process.poll()
            if code is not None:
                raise SystemExit(f"the service ended with exit code {code} while starting; its log:\n{tail(self._log)}")
            # Its own limit says more; this one is for a service that hangs.
            if time.monotonic() - begin > self._limit_s + HANG_S:
                raise SystemExit(
                    f"the service was not ready within {self._limit_s + HANG_S:g} s; its log:\n{tail(self._log)}"
                )
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """End everything; no process is left when this returns."""
        process = self._process
        if process is None:
            return
        self._note_pids()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                await _wait_until(lambda: process.poll() is not None, STOP_S / 2)
        process.wait()
        # They end with their parent; what did not is killed, as it would keep the card's memory.
        if not await _wait_until(lambda: not self._living(), 5.0):
            for pid in self._living():
                print(f"process {pid} was left by the service and is killed", file=sys.stderr, flush=True)
                os.kill(pid, signal.SIGKILL)
            await _wait_until(lambda: not self._living(), 5.0)
        self._process = None
        self._directory.cleanup()

    def status(self) -> dict[str, float]:
        """The engine's counters, as its last report has them; empty while there is no group."""
        try:
            with OPENER.open(self.url.rstrip("/") + "/status", timeout=10) as response:
                body = json.load(response)
            (group,) = body["broker"]["deployments"][DEPLOYMENT]["groups"]
            return dict(group["load"])
        except (OSError, ValueError, LookupError):
            return {}

    def tail(self) -> str:
        return tail(self._log)

    def _note_pids(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._pids |= set(_descendants(self._process.pid))

    def _living(self) -> list[int]:
        return [pid for pid in self._pids if _is_alive(pid)]


async def _wait_until(is_so: Any, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def _module(pid: int) -> str:
    """What a process was started to run, the last part of its name."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words[:-1] else ""


def _descendants(pid: int) -> list[int]:
    parents = _parents()
    found, newest = [], {pid}
    while newest:
        newest = {child for child, parent in parents.items() if parent in newest}
        found += sorted(newest)
    return found


def _parents() -> dict[int, int]:
    """Of every process. From its status, since not every kernel lists children."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class CpuWatch:
    """Samples the CPU time of processes while it is entered; shares are of one core."""

    pids: Mapping[str, int]
    interval_s: float = 0.25
    _samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    _threads: list[dict[str, dict[str, float]]] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> CpuWatch:
        self._threads.append({name: thread_seconds(pid) for name, pid in self.pids.items()})
        self._sample()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        self._sample()
        self._threads.append({name: thread_seconds(pid) for name, pid in self.pids.items()})

    def shares(self, begin: float, seconds: float) -> dict[str, dict[str, Any]]:
        """By process, of the time from `begin` (monotonic) on: mean, the highest of a sample, and the busiest thread's
        mean with its name. Of everything where that time holds no two samples."""
        inside = [sample for sample in self._samples if begin <= sample[0] <= begin + seconds]
        samples = inside if len(inside) > 1 else self._samples
        (begin, first), (end, last) = samples[0], samples[-1]
        found = {}
        for name in self.pids:
            highest = max(
                ((b[name] - a[name]) / (at_b - at_a) for (at_a, a), (at_b, b) in _pairs(samples)), default=0.0
            )
            before, after = (threads[name] for threads in self._threads)
            used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
            thread = max(used, key=used.__getitem__, default="")
            found[name] = {
                "mean": round((last[name] - first[name]) / (end - begin), 2),
                "max": round(highest, 2),
                "busiest_thread": [thread.partition(":")[2], round(used.get(thread, 0.0) / seconds, 2)],
            }
        return found

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            self._sample()

    def _sample(self) -> None:
        self._samples.append((time.monotonic(), {name: cpu_seconds(pid) for name, pid in self.pids.items()}))


def _pairs(samples: list[tuple[float, dict[str, float]]]) -> list[Any]:
    """Neighbours, but for those that lie closer than the kernel's ticks tell apart."""
    return [pair for pair in itertools.pairwise(samples) if pair[1][0] - pair[0][0] > 10 / TICKS_PER_S]


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads; 0 of a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def thread_seconds(pid: int) -> dict[str, float]:
    """By 'id:name'."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            head, _, rest = (task / "stat").read_text().rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        found[f"{task.name}:{head.partition('(')[2]}"] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found
