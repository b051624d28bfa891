# SPDX-License-Identifier: Apache-2.0
"""The broker as a pure state machine: events in, actions out, the clock injected. No sockets, no asyncio.

Each method is one event and returns the messages that it causes, in order. Clients and workers have their own parts
(`Clients`, `Workers`); the life of requests, where both meet, is in `Requests`. `check` holds the invariants together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mii_zmq.broker.clients import Clients
from mii_zmq.broker.liveness import Liveness
from mii_zmq.broker.prefix_resets import PrefixResets
from mii_zmq.broker.records import Action, Address, Counters, RequestState
from mii_zmq.broker.requests import Limits, Requests
from mii_zmq.broker.status import make_status
from mii_zmq.broker.workers import Workers
from mii_zmq.config import BrokerConfig
from mii_zmq.errors import Draining, MiiError
from mii_zmq.protocol import Message


class BrokerState:
    """Everything that the broker knows."""

    def __init__(self, config: BrokerConfig, epoch: bytes, now: float) -> None:
        self.epoch = epoch
        self.started_at = now
        self.loop_lag_s = 0.0
        """Of the loop that this runs on, told by its owner; shown in STATUS."""
        self.requests = Requests(
            Limits(
                config.max_queued_requests,
                config.max_queued_tokens,
                config.tenant_share,
                config.max_client_requests,
                config.max_attempts,
                config.quarantine_s,
                config.resume,
                config.group_wait_s,
                config.slow_reader_s,
                config.slow_reader_bytes,
            )
        )
        self.liveness = Liveness(config.heartbeat_ms / 1000, config.liveness)
        self.resets = PrefixResets(self.requests)
        self.clients = Clients(self.requests, self.resets, self.liveness, epoch, now, self.status)
        self.workers = Workers(self.requests, self.resets, self.liveness, epoch)
        self._last_tick = now

    @property
    def counters(self) -> Counters:
        return self.requests.counters

    @property
    def num_unfinished(self) -> int:
        return len(self.requests.by_id)

    @property
    def is_finished(self) -> bool:
        """After `drain`: nothing accepted is left, or nobody is there to do it."""
        if self.workers.by_address:
            return not self.requests.by_id
        return all(request.state is not RequestState.DELIVERING for request in self.requests.by_id.values())

    def client_message(self, address: Address, message: Message, now: float) -> list[Action]:
        self.clients.on_message(address, message, now)
        return self.take_actions()

    def client_malformed(self, address: Address, request_id: bytes, error: MiiError) -> list[Action]:
        """A message that could not be decoded; `request_id` is zero where none could be read."""
        self.clients.on_malformed(address, request_id, error)
        return self.take_actions()

    def client_gone(self, address: Address, now: float) -> list[Action]:
        self.clients.on_gone(address, now)
        return self.take_actions()

    def worker_message(self, address: Address, message: Message, frames: Sequence[bytes], now: float) -> list[Action]:
        self.workers.on_message(address, message, frames, now)
        return self.take_actions()

    def worker_malformed(self, address: Address, error: MiiError, now: float) -> list[Action]:
        self.workers.on_malformed(address, error, now)
        return self.take_actions()

    def worker_gone(self, address: Address, now: float) -> list[Action]:
        self.workers.on_gone(address, now)
        return self.take_actions()

    def tick(self, now: float) -> list[Action]:
        """Time has passed; to be called several times per heartbeat interval."""
        stall_s = self.liveness.stall_s(now)
        if stall_s:
            self.clients.forgive(stall_s, now)
            self.workers.forgive(stall_s, now)
            self.requests.forgive(stall_s, now)
        self.workers.tick(now)
        self.clients.tick(now)
        self.requests.tick(now, now - self._last_tick)
        self.resets.tick(now)
        self._last_tick = now
        return self.take_actions()

    def drain(self) -> None:
        """From now on GENERATE is refused; what was accepted goes on."""
        self.clients.is_draining = True

    def close(self, now: float) -> list[Action]:
        """The end: whatever is unfinished gets its terminal message, workers a goodbye."""
        error = Draining("the broker shut down before the request finished; send it again", retry_after_ms=1000)
        self.requests.cancel(self.requests.by_id.values(), error, now)
        self.workers.disconnect_all("the broker is shutting down")
        self.clients.disconnect_all("the broker is shutting down")
        return self.take_actions()

    def status(self, now: float) -> dict[str, Any]:
        return make_status(self, now)

    def check(self) -> None:
        """Raise AssertionError when the books do not balance (tests call it after every event)."""
        requests = self.requests
        in_groups = {i: r for g in self.workers.by_address.values() for i, r in g.requests.items()}
        waiting = {r.request_id: r for d in requests.deployments.values() for r in d.queue}
        in_clients = {i: r for c in self.clients.by_address.values() for i, r in c.requests.items()}
        delivering = {i: r for i, r in requests.by_id.items() if r.state is RequestState.DELIVERING}
        assert in_clients == requests.by_id == {**in_groups, **waiting, **delivering}
        assert len(in_groups) + len(waiting) + len(delivering) == len(requests.by_id)
        held = [r.num_bytes + len(r.delivered.token_ids) for r in requests.by_id.values()]
        assert requests.held_bytes == sum(held) + sum(r.withheld.num_bytes for r in requests.starving if r.withheld)
        assert {*requests.starving} == {r for r in requests.by_id.values() if r.withheld is not None}
        assert all(request.next_seq >= request.credit_end for request in requests.starving)
        for request in requests.by_id.values():
            assert (request.state is RequestState.RUNNING) == (request.group is not None)
        for deployment in requests.deployments.values():
            assert deployment.queue.num_tokens == sum(r.num_tokens for r in deployment.queue)
            running = Counter(r.tenant for g in deployment.groups.values() for r in g.requests.values())
            assert deployment.tenants.running == running
        self.resets.check({*self.workers.by_address.values()})
        for address, group in self.workers.by_address.items():
            assert group.address == address
            assert group.deployment.groups[group.name] is group
            assert group.outstanding_tokens == sum(r.remaining_tokens for r in group.requests.values())
            assert not group.barred.keys() & group.requests.keys()
            assert group.suspects <= {*group.requests.values()}
            if group.held_for is not None and group.held_for.group is group and group.held_for.is_apart:
                assert len(group.requests) == 1

    def take_actions(self) -> list[Action]:
        """What is to be sent and was not returned yet (after an event that raised)."""
        actions = self.requests.actions
        if actions:
            self.requests.actions = []
        return actions
