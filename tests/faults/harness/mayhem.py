# SPDX-License-Identifier: Apache-2.0
"""Kills and stops random processes of a fleet, and starts again what has died, as a supervisor does.

Never takes down all brokers or all groups at once: a victim is chosen only while another of its kind is well. Driven
by the thread that owns the fleet, turn by turn. Every choice comes from one seeded generator, and is logged.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.faults.harness.fleet import Fleet

RESTART_S = {"broker": 0.05, "gateway": 0.2, "group": 0.5}
SETTLE_S = 1.0
"""A member counts as well this long after it said that it is ready, or was woken."""
FAULTS = ("kill", "kill", "kill", "stop and wake", "stop and kill")
STOP_S = {"stop and wake": (0.5, 10.0), "stop and kill": (1.0, 8.0)}


@dataclass(slots=True)
class _Due:
    at: float
    what: str
    act: Callable[[], None]


@dataclass(slots=True)
class Mayhem:
    """`turn` does what is due; `strike` hurts somebody."""

    fleet: Fleet
    rng: random.Random
    say: Callable[[str], None]
    counts: Counter[str] = field(default_factory=Counter)
    """Faults by kind of process and of fault."""
    num_restarts: Counter[str] = field(default_factory=Counter)
    unwell: dict[str, float] = field(default_factory=dict)
    """Members that were hurt, and when they are well again (infinity: not known yet)."""
    downtimes: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from a member's death to its successor's readiness, by kind."""
    _due: list[_Due] = field(default_factory=list)
    _died_at: dict[str, float] = field(default_factory=dict)

    def turn(self) -> None:
        now = time.monotonic()
        for name in self.fleet.bury():
            self._on_death(name, now)
        for due in [due for due in self._due if due.at <= now]:
            self._due.remove(due)
            due.act()
        for name, member in self.fleet.members.items():
            if member.child is not None and not member.is_ready and self.fleet.poll_ready(name):
                self.unwell[name] = now + SETTLE_S
                died_at = self._died_at.pop(name, now)
                self.downtimes.setdefault(kind_of(name), []).append(now - died_at)

    def is_well(self, name: str) -> bool:
        is_up = self.fleet.is_alive(name) and self.fleet.members[name].is_ready
        return is_up and self.unwell.get(name, 0.0) <= time.monotonic()

    @property
    def all_well(self) -> bool:
        return all(self.is_well(name) for name in self.fleet.members)

    def strike(self) -> bool:
        """Hurt one process of a member that may be hurt now; False when there is none."""
        pids = self.fleet.pids()
        roles = [role for role in sorted(pids) if self._may_be_hurt(" ".join(role.split()[:2]))]
        if not roles:
            return False
        role = self.rng.choice(roles)
        name, pid, fault = " ".join(role.split()[:2]), pids[role], self.rng.choice(FAULTS)
        self.counts[f"{kind_of(role)}: {fault}"] += 1
        self.unwell[name] = float("inf")
        if fault == "kill":
            self.say(f"kill {role} ({pid})")
            send(pid, signal.SIGKILL)
            return True
        seconds = self.rng.uniform(*STOP_S[fault])
        self.say(f"{fault} {role} ({pid}) after {seconds:.1f} s")
        send(pid, signal.SIGSTOP)
        if fault == "stop and kill":
            self._later(seconds, f"kill {role}", lambda: send(pid, signal.SIGKILL))
        else:
            self._later(seconds, f"wake {role}", lambda: self._wake(name, pid))
        return True

    def settle(self, timeout_s: float) -> bool:
        """No more faults: carry out what is under way, and wait until all are well."""
        deadline = time.monotonic() + timeout_s
        while self._due or not self.all_well:
            if time.monotonic() > deadline:
                return False
            self.turn()
            time.sleep(0.02)
        return True

    def _may_be_hurt(self, name: str) -> bool:
        kind = kind_of(name)
        others = [other for other in self.fleet.members if kind_of(other) == kind and other != name]
        return self.is_well(name) and (not others or any(self.is_well(other) for other in others))

    def _wake(self, name: str, pid: int) -> None:
        send(pid, signal.SIGCONT)
        if self.fleet.is_alive(name):
            self.unwell[name] = time.monotonic() + SETTLE_S

    def _on_death(self, name: str, now: float) -> None:
        self.unwell[name] = float("inf")
        self._died_at.setdefault(name, now)
        self.num_restarts[kind_of(name)] += 1
        self._later(RESTART_S[kind_of(name)], f"start {name}", lambda: self.fleet.spawn(name))

    def _later(self, seconds: float, what: str, act: Callable[[], None]) -> None:
        self._due.append(_Due(time.monotonic() + seconds, what, act))


def kind_of(role: str) -> str:
    """'group 2 rank 1' -> 'rank', 'group 2 engine' -> 'engine', 'broker 1' -> 'broker'."""
    words = role.split()
    return words[2] if len(words) > 2 else words[0]


def send(pid: int, number: signal.Signals) -> None:
    """The process may be gone by now."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
