# SPDX-License-Identifier: Apache-2.0
"""A request whose broker says nothing ends by its own deadline."""

from __future__ import annotations

import asyncio

import pytest

from mii_zmq import generation as generation_module
from mii_zmq.errors import DeadlineExceeded
from mii_zmq.generation import Generation
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
