# SPDX-License-Identifier: Apache-2.0
"""A request whose broker says nothing ends by its own deadline; several as one call end together."""

from __future__ import annotations

import asyncio

import pytest

from mii_zmq import generation as generation_module
from mii_zmq.errors import DeadlineExceeded
from mii_zmq.generation import Generation, run_each
from mii_zmq.protocol import GenerateHeader


class SilentHome:
    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.cancelled: list[Generation] = []

    def grant(self, generation: Generation) -> None:
        raise AssertionError("nothing was read")

    def cancel(self, generation: Generation) -> None:
        self.cancelled.append(generation)


async def test_the_deadline_is_kept_without_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_module, "DEADLINE_GRACE_S", 0.05)
    home = SilentHome()
    generation = Generation(home, GenerateHeader(deployment="m", stream=True, deadline_ms=10), b"")
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(generation.result(), 20)
    assert home.cancelled == [generation]


async def test_each_sending_names_what_is_left() -> None:
    generation = Generation(SilentHome(), GenerateHeader(deployment="m", deadline_ms=60_000), b"")
    generation.to_frames()
    first = generation.header.deadline_ms
    await asyncio.sleep(0.02)
    generation.to_frames()
    assert first is not None
    assert generation.header.deadline_ms is not None
    assert generation.header.deadline_ms < first <= 60_000
    generation.cancel()


async def test_several_at_once_in_order() -> None:
    running = most = 0

    async def work(index: int, item: str) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5 - index):
            await asyncio.sleep(0)
        running -= 1
        return f"{index}{item}"

    assert await run_each(work, "abcde", at_once=2) == ["0a", "1b", "2c", "3d", "4e"]
    assert most == 2
    assert await run_each(work, [], at_once=2) == []


async def test_the_first_failure_or_a_cancellation_ends_the_others() -> None:
    ended: list[int] = []
    all_run = asyncio.Event()

    async def work(index: int, item: str) -> None:
        if item == "fails":
            raise ValueError(index)
        if item == "last":
            all_run.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(index)

    with pytest.raises(ValueError, match="2"):
        await run_each(work, ["waits", "waits", "fails"], at_once=3)
    assert ended == [0, 1]

    ended.clear()
    whole = asyncio.ensure_future(run_each(work, ["waits", "last", "never starts"], at_once=2))
    await all_run.wait()
    whole.cancel()
    with pytest.raises(asyncio.CancelledError):
        await whole
    assert ended == [0, 1]
