# SPDX-License-Identifier: Apache-2.0
"""What must hold after every test of the fault suite: the service works, is idle, and has kept nothing.

`Baseline.take` after a warm-up notes the descriptors and threads of every process by its role; `check` waits, with
patience, until all of that is back, whichever processes fill the roles by then, and reads the logs for exceptions that
nobody expected.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.harness.expectation import expect
from tests.faults.harness.fleet import Fleet
from tests.stack import generate, http

PATIENCE_S = 20.0
WARM_UP = 16
SPARE_FDS = 2
"""A connection that is being made or closed at the moment of a look."""
SPARE_THREADS = 2
"""Pools of at most this many threads, made when they are first needed."""
BAD_LINES = re.compile(r"Traceback|never retrieved|never awaited|was destroyed but it is pending|Assertion failed")
GREEDY: dict[str, Any] = {"do_sample": False, "ignore_eos": True}


class Usage(NamedTuple):
    fds: int
    threads: int


def usage_of(pid: int) -> Usage:
    """Raises OSError when the process is gone."""
    return Usage(len(list(Path(f"/proc/{pid}/fd").iterdir())), len(list(Path(f"/proc/{pid}/task").iterdir())))


def resident_kb(pid: int) -> int:
    """0 when the process is gone."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
    return 0


@dataclass(slots=True)
class Baseline:
    usage: dict[str, Usage] = field(default_factory=dict)
    log_sizes: dict[str, int] = field(default_factory=dict)
    """Lines before these places were judged already."""

    @classmethod
    def take(cls, fleet: Fleet) -> Baseline:
        """After some requests through every gateway, so that lazily made threads and connections are there."""
        for name in fleet.gateways:
            with ThreadPoolExecutor(WARM_UP) as pool:
                list(pool.map(lambda i: ask(fleet, f"warm up {i}", 4, name), range(WARM_UP)))  # noqa: B023
        baseline = cls()
        baseline._wait_idle(fleet)
        baseline.usage = {role: usage_of(pid) for role, pid in fleet.pids().items()}
        baseline.log_sizes = {name: len(fleet.log(name)) for name in fleet.members}
        return baseline

    def check(self, fleet: Fleet, allowed: Sequence[str] = ()) -> None:
        """Raises AssertionError that says what is not as before. Log lines that match `allowed` are expected."""
        for name in fleet.gateways:
            if fleet.is_alive(name):
                check_alive(fleet, name)
        self._wait_idle(fleet)
        self._wait_for(lambda: list(self._surplus(fleet)))
        problems = [line for name in fleet.members for line in self._bad_lines(fleet, name, allowed)]
        assert not problems, "\n".join(problems)

    def _wait_idle(self, fleet: Fleet) -> None:
        self._wait_for(lambda: list(busy(fleet)))

    def _wait_for(self, find: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while problems := find():
            assert time.monotonic() < deadline, f"after {PATIENCE_S:g} s: {'; '.join(problems)}"
            time.sleep(0.05)

    def _surplus(self, fleet: Fleet) -> Iterator[str]:
        pids = fleet.pids()
        for role, before in self.usage.items():
            name = " ".join(role.split()[:2])
            if name not in fleet.members or not fleet.is_alive(name):
                continue
            if role not in pids:
                yield f"{role} is gone"
                continue
            try:
                now = usage_of(pids[role])
            except OSError:
                yield f"{role} is gone"
                continue
            if now.fds > before.fds + SPARE_FDS:
                yield f"{role} has {now.fds} descriptors instead of {before.fds}"
            if now.threads > before.threads + SPARE_THREADS:
                yield f"{role} has {now.threads} threads instead of {before.threads}"
        for role in pids.keys() - self.usage.keys() if self.usage else ():
            yield f"{role} is new"

    def _bad_lines(self, fleet: Fleet, name: str, allowed: Sequence[str]) -> Iterator[str]:
        text = fleet.log(name)[self.log_sizes.get(name, 0) :]
        for found in BAD_LINES.finditer(text):
            shown = text[max(0, found.start() - 300) : found.end() + 1500]
            if not any(re.search(pattern, shown) for pattern in allowed):
                yield f"log of {name}: {shown}"


def busy(fleet: Fleet) -> Iterator[str]:
    """What is still going on, or not there yet."""
    statuses = fleet.statuses()
    for name in fleet.brokers:
        if fleet.is_alive(name) and name not in statuses:
            yield f"{name} does not answer"
    for name, status in statuses.items():
        if status["num_unfinished"] or status["held_bytes"]:
            yield f"{name} has {status['num_unfinished']} requests and holds {status['held_bytes']} bytes"
        for deployment in status["deployments"].values():
            for group in deployment["groups"]:
                counts = {"requests": group["num_requests"], **group["load"]}
                for what in ("requests", "used_blocks", "running", "waiting"):
                    if counts.get(what, 0):
                        yield f"{group['group']} at {name} has {counts[what]} {what}"
    for name in fleet.gateways:
        in_flight = metric(fleet.url(name), "mii_gateway_requests_in_flight") if fleet.is_alive(name) else 0
        if in_flight:
            yield f"{name} has {in_flight:g} requests in flight"


def metric(url: str, name: str) -> float:
    """The sum over all labels; 0 where there is none."""
    page = http(url + "/metrics")[1].decode()
    lines = [line for line in page.splitlines() if re.match(rf"{name}(\{{.*\}})? ", line)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def ask(fleet: Fleet, prompt: str, num_tokens: int, gateway: str = "gateway 1") -> str:
    """The text of an unstreamed request; asserts success."""
    found = generate(fleet.url(gateway), fleet.deployment, prompt, max_new_tokens=num_tokens, **GREEDY)
    return str(found[0]["generated_text"])


def check_alive(fleet: Fleet, gateway: str = "gateway 1") -> None:
    """A fresh request gets exactly its answer."""
    prompt = f"alive {time.monotonic_ns()}"
    assert ask(fleet, prompt, 8, gateway) == expect(prompt, max_new_tokens=8, ignore_eos=True).text
