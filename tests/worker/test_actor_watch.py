# SPDX-License-Identifier: Apache-2.0
"""What the actor says of its engine, and when it gives it up."""

from __future__ import annotations

import pytest

from mii_zmq.errors import InternalError
from mii_zmq.protocol import Load
from mii_zmq.worker.engine_channel import StepReport, load_values
from tests.worker.actor_harness import Harness


@pytest.fixture
async def harness():
    made = Harness()
    yield made
    made.actor.close("test over")


async def test_heartbeats_carry_the_age_of_the_engines_report(harness: Harness) -> None:
    harness.actor._last_report -= 2.0
    heartbeat = harness.actor.heartbeat()
    assert heartbeat is not None
    assert 2000 <= heartbeat.report_age_ms < 60_000
    harness.step()
    heartbeat = harness.actor.heartbeat()
    assert heartbeat is not None
    assert heartbeat.report_age_ms < 2000


async def test_no_heartbeat_while_the_engine_does_not_get_on(harness: Harness) -> None:
    assert harness.actor.heartbeat() is not None
    harness.watchdog.stuck_s = 5.0
    harness.actor._watch()
    assert harness.actor.heartbeat() is None
    assert harness.engine.lost is None
    busy = load_values(Load(step=1, running=1))
    harness.actor.on_step(StepReport(1, (), busy))
    assert harness.actor.heartbeat() is not None


async def test_a_report_without_a_step_is_no_progress(harness: Harness) -> None:
    busy = load_values(Load(step=200, waiting=1))
    harness.actor.on_step(StepReport(200, (), busy))
    harness.actor._watch()
    harness.watchdog.stuck_s = 15.0
    harness.actor.on_step(StepReport(200, (), busy))
    harness.actor._watch()
    assert harness.actor.heartbeat() is None


async def test_waiting_for_masks_is_no_hang(harness: Harness) -> None:
    load = load_values(Load(step=200, running=1))
    harness.actor.on_step(StepReport(200, (), load))
    harness.watchdog.stuck_s = 15.0
    harness.actor.on_step(StepReport(200, (), load, awaits_masks=True))
    harness.actor._watch()
    assert harness.actor.heartbeat() is not None


async def test_a_hung_engine_counts_as_lost(harness: Harness) -> None:
    harness.watchdog.stuck_s = 11.0
    harness.actor._watch()
    assert isinstance(harness.engine.lost, InternalError)
    assert "has not got on for 11.0 s since step 0" in harness.engine.lost.message
