# SPDX-License-Identifier: Apache-2.0
"""A whole worker group whose engine fails in the ways that the fake engine can be told to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from mii_zmq.protocol import FinalBody, Verb, parse_body
from mii_zmq.worker.watchdog import WARM_UP_STEPS
from tests.worker.scripted_broker import PATIENCE_S, ScriptedBroker, Stage, staged
from tests.worker.test_group import wait_gone

pytestmark = pytest.mark.slow


async def end_of(broker: ScriptedBroker, number: int) -> str:
    """The text of an unstreamed request, or the code of its error."""
    _, end = await broker.collect(number.to_bytes(16, "big"))
    if end.verb is Verb.ERROR:
        return str(end.header["code"])
    return str(parse_body(end, FinalBody).text)


async def heartbeat_that(broker: ScriptedBroker, is_wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Wait for a heartbeat whose load is so; fields that are 0 are left out of it."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_wanted({"num_failed_steps": 0, **(await broker.heartbeats.get())["load"]}):
            pass


async def assert_lost(stage: Stage, why: str) -> None:
    message = await stage.broker.skip_to(Verb.DISCONNECT)
    assert why in message.header["reason"]
    assert await stage.exit_code() == 1
    await wait_gone(stage.engine_pid)


async def test_a_hung_step_is_found_and_ends_the_group() -> None:
    async with staged("fake:hang_on=BANE", "--step-timeout-s=0.3") as stage:
        stage.broker.generate(1, "the BANE of engines")
        await assert_lost(stage, "has not got on for")


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_stopped_engine_is_found_and_ends_the_group(is_busy: bool) -> None:
    async with staged("fake:step_ms=2", "--step-timeout-s=0.5") as stage:
        if is_busy:
            stage.broker.generate(1, ignore_eos=True, max_new_tokens=8000)
            for _ in range(3):
                await stage.broker.take(Verb.TOKENS)
        os.kill(stage.engine_pid, signal.SIGSTOP)
        await assert_lost(stage, "has not got on for")


async def test_a_stopped_group_goes_on_where_it_was() -> None:
    async with staged("fake:step_ms=2", "--step-timeout-s=1") as stage:
        stage.broker.generate(1, ignore_eos=True, max_new_tokens=800, stream=False)
        while (await stage.broker.heartbeats.get())["load"].get("step", 0) < WARM_UP_STEPS:
            pass
        pids = (stage.worker.pid, stage.engine_pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)  # longer than the timeout; nothing can be waited for
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        assert len(await end_of(stage.broker, 1)) == 800


async def test_a_lost_device_ends_the_group() -> None:
    async with staged("fake:step_ms=2,lose_on=BANE") as stage:
        stage.broker.generate(1, ignore_eos=True, max_new_tokens=8000)
        await stage.broker.take(Verb.TOKENS)
        stage.broker.generate(2, "the BANE of devices")
        await assert_lost(stage, "device-side assert triggered")


async def test_a_request_that_makes_steps_raise_ends_alone() -> None:
    async with staged("fake:raise_on=BANE,raise_after=4") as stage:
        broker = stage.broker
        options = {"ignore_eos": True, "max_new_tokens": 200, "stream": False}
        broker.generate(1, "bystander", **options)
        undisturbed = await end_of(broker, 1)
        for number in range(2, 8):
            broker.generate(number, "the BANE of steps" if number == 4 else "bystander", **options)
        ends = {}
        while len(ends) < 6:
            message = await broker.messages.get()
            is_error = message.verb is Verb.ERROR
            ends[message.request_id[-1]] = message.header["code"] if is_error else parse_body(message, FinalBody).text
        assert ends == {number: "internal" if number == 4 else undisturbed for number in range(2, 8)}
        await heartbeat_that(broker, lambda load: load["num_failed_steps"] >= 2 and not load.get("used_blocks"))


async def test_logits_that_are_not_finite_end_one_request() -> None:
    async with staged("fake:nan_on=BANE") as stage:
        broker = stage.broker
        broker.generate(1, "the BANE of numbers", stream=False)
        assert await end_of(broker, 1) == "numeric_error"
        broker.generate(2, "fine", ignore_eos=True, max_new_tokens=5, stream=False)
        assert len(await end_of(broker, 2)) == 5
        await broker.heartbeat_with(num_numeric_errors=1, used_blocks=0, running=0)


async def test_a_group_without_finite_logits_ends() -> None:
    async with staged("fake:nan_on=BANE") as stage:
        for number in range(1, 6):
            stage.broker.generate(number, f"BANE {number}", stream=False)
            assert await end_of(stage.broker, number) == "numeric_error"
        await assert_lost(stage, "no request gets finite logits any more")


async def test_steps_that_do_not_fit_into_memory_cost_nothing_but_time() -> None:
    async with staged("fake:oom_above=6,raise_at=3") as stage:
        options = {"ignore_eos": True, "max_new_tokens": 50, "stream": False}
        for number in range(1, 21):
            stage.broker.generate(number, f"request {number}", **options)
        lengths = []
        while len(lengths) < 20:
            final = await stage.broker.skip_to(Verb.FINAL)
            lengths.append(parse_body(final, FinalBody).generated_length)
        assert lengths == [50] * 20
        await heartbeat_that(
            stage.broker, lambda load: load.get("token_budget", 512) < 512 and not load.get("used_blocks")
        )
