# SPDX-License-Identifier: Apache-2.0
"""Resets of a deployment's prefix cache: to every group at once, and one answer when all have spoken. Pure.

A group that is lost on the way, refuses, or does not answer in time is named in the answer; nothing is tried again. A
group that comes later begins with an empty cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mii_zmq.broker.records import Address, Client, Deployment, Group, ToClient, ToWorker
from mii_zmq.broker.requests import Requests
from mii_zmq.errors import NoWorkers, Overloaded
from mii_zmq.protocol import PrefixCacheReset, Verb, encode

TIMEOUT_S = 10.0
"""For a group to answer; its engine listens between two steps."""
MAX_RESETS = 64
"""Under way at the same time."""


@dataclass(slots=True, eq=False)
class _Reset:
    request_id: bytes
    address: Address
    due: float
    waiting: set[Group]
    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class PrefixResets:
    """Resets that are under way; by the id of the message that asked for them."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._resets: dict[bytes, _Reset] = {}

    def __len__(self) -> int:
        return len(self._resets)

    def start(self, client: Client, request_id: bytes, deployment: Deployment, now: float) -> None:
        """Ask all groups of the deployment.

        Raises:
            NoWorkers: it has none.
            Overloaded: too many resets are under way.
        """
        if not deployment.groups:
            raise NoWorkers(f"no worker group of deployment {deployment.name!r} is there", retry_after_ms=1000)
        if len(self._resets) >= MAX_RESETS or request_id in self._resets:
            raise Overloaded(f"{len(self._resets)} resets are under way; wait for them", retry_after_ms=1000)
        groups = list(deployment.groups.values())
        self._resets[request_id] = _Reset(request_id, client.address, now + TIMEOUT_S, set(groups))
        for group in groups:
            frames = encode(Verb.RESET_PREFIX_CACHE, request_id)
            self._requests.actions.append(ToWorker(group.address, frames))

    def on_answer(self, group: Group, request_id: bytes, problem: str | None = None) -> bool:
        """A group has done it, or says why not. False: nobody asked it."""
        reset = self._resets.get(request_id)
        if reset is None or group not in reset.waiting:
            return False
        self._note(reset, group, problem)
        return True

    def on_lost(self, group: Group, why: str) -> None:
        """The group, or the connection by which it was asked, is gone."""
        for reset in [reset for reset in self._resets.values() if group in reset.waiting]:
            self._note(reset, group, why)

    def on_client_gone(self, address: Address) -> None:
        """Nobody waits for the answers any more."""
        for reset in [reset for reset in self._resets.values() if reset.address == address]:
            del self._resets[reset.request_id]

    def tick(self, now: float) -> None:
        for reset in [reset for reset in self._resets.values() if reset.due <= now]:
            for group in list(reset.waiting):
                self._note(reset, group, f"it did not answer within {TIMEOUT_S:g} s")

    def check(self, groups: set[Group]) -> None:
        """Raise AssertionError unless every reset waits for some group, and for registered ones only."""
        for reset in self._resets.values():
            assert reset.waiting
            assert reset.waiting <= groups

    def _note(self, reset: _Reset, group: Group, problem: str | None) -> None:
        reset.waiting.discard(group)
        if problem is None:
            reset.done.append(group.name)
        else:
            reset.failed[group.name] = problem[:500]
        if not reset.waiting:
            del self._resets[reset.request_id]
            answer = PrefixCacheReset(done=sorted(reset.done), failed=reset.failed)
            frames = encode(Verb.RESET_PREFIX_CACHE, reset.request_id, answer)
            self._requests.actions.append(ToClient(reset.address, frames))
