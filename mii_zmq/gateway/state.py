# SPDX-License-Identifier: Apache-2.0
"""What the gateway's handlers share: the broker client, the metrics, requests in progress, and the way to the end.

One `Gateway` per application, found under its key. It owns the drain: first new requests are refused and running ones
finish, then (time is up) running ones are told so and end. Knows no door.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiohttp import web

from mii_zmq.errors import Draining
from mii_zmq.gateway.broker_status import BrokerStatus, DeploymentStatus
from mii_zmq.gateway.door import Door
from mii_zmq.gateway.metrics import Metrics
from mii_zmq.telemetry import LoopLag

if TYPE_CHECKING:
    from mii_zmq.client import AsyncClient
    from mii_zmq.config import GatewayConfig
    from mii_zmq.tracing import Tracing

STATUS_MAX_AGE_S = 0.2
"""Health probes, model lists and metrics readers share one STATUS for this long."""
MAX_KNOWN = 256
"""Deployments that are remembered though the broker does not name them any more."""
ABORT_TIMEOUT_S = 2.0
"""For running requests to tell their clients, when the time to finish is up."""
BODY_TIMEOUT_S = 30.0
"""For a request's body to arrive."""
WRITE_TIMEOUT_S = 30.0
"""For a reader to take some of what waits for it."""


class Gateway:
    """Belongs to one event loop."""

    def __init__(self, config: GatewayConfig, client: AsyncClient, tracing: Tracing | None = None) -> None:
        self.config = config
        self.client = client
        self.tracing = tracing
        self.metrics = Metrics()
        self.started_at = time.time()
        self.door: Door | None = None
        self.loop_lag = LoopLag()
        self.was_ready = False
        """Some group has been there to take a request."""
        self.is_leaving = False
        """Told to end: not ready any more, but what comes on connections that were just made is still served."""
        self.is_draining = False
        self.body_timeout_s = BODY_TIMEOUT_S
        self.write_timeout_s = WRITE_TIMEOUT_S
        self.status_max_age_s = STATUS_MAX_AGE_S
        self.known: dict[str, DeploymentStatus] = {}
        """As each was when it last had groups."""
        self._is_aborting = False
        self._running: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._status: BrokerStatus | None = None
        self._status_at = 0.0
        self._status_task: asyncio.Task[BrokerStatus] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around a handler that generates: such requests are counted, refused while draining, and waited for.

        Raises:
            Draining: the gateway is going down, or went down before this request was finished.
        """
        if self.is_draining:
            raise Draining("the gateway is shutting down; send the request again", retry_after_ms=1000)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._idle.clear()
        self.metrics.num_in_flight += 1
        try:
            with self.abortable():
                yield
        finally:
            self.metrics.num_in_flight -= 1
            self._running.discard(task)
            if not self._running:
                self._idle.set()

    @contextlib.contextmanager
    def abortable(self) -> Iterator[None]:
        """Turns the cancellation by which `drain` ends a request into Draining; a vanished client's passes through."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_aborting or task is None:
                raise
            task.uncancel()
            raise Draining("the gateway shut down before this request was finished", retry_after_ms=1000) from None

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; after `timeout_s` they end with Draining.

        Returns whether all of them could finish.
        """
        self.is_leaving = self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
            return True
        self._is_aborting = True
        for task in self._running:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._idle.wait()
        return False

    async def status(self) -> BrokerStatus:
        """The broker's status, at most `status_max_age_s` old; callers at the same time share one question.

        Raises:
            BrokerUnavailable: no broker answers.
        """
        if self._status is not None and time.monotonic() - self._status_at < self.status_max_age_s:
            return self._status
        if self._status_task is None or self._status_task.done():
            self._status_task = asyncio.create_task(self._ask())
            self._status_task.add_done_callback(_retrieve)
        return await asyncio.shield(self._status_task)

    @property
    def status_age_s(self) -> float:
        """Of the status that was last received."""
        return time.monotonic() - self._status_at

    async def _ask(self) -> BrokerStatus:
        self._status = None
        self._status = BrokerStatus.parse(await self.client.status())
        self._status_at = time.monotonic()
        self._remember(self._status.deployments)
        return self._status

    def _remember(self, deployments: dict[str, DeploymentStatus]) -> None:
        self.known |= {name: deployment for name, deployment in deployments.items() if deployment.has_groups}
        self.was_ready = self.was_ready or bool(self.known)
        if len(self.known) > MAX_KNOWN:
            self.known = {name: known for name, known in self.known.items() if name in deployments}


def _retrieve(task: asyncio.Task[BrokerStatus]) -> None:
    """Everybody who asked may be gone when the answer is an error; that is no news then."""
    if not task.cancelled():
        task.exception()


GATEWAY = web.AppKey("gateway", Gateway)
