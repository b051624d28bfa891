# SPDX-License-Identifier: Apache-2.0
"""Groups and brokers are killed under running streams, which go on token for token; a deadly request is found."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mii_zmq.client import AsyncClient
from mii_zmq.errors import MiiError, PoisonRequest, WorkerLost
from mii_zmq.process import spawn
from mii_zmq.protocol import GenerateBody
from mii_zmq.worker.fake_model import ALPHABETS, EOS_TOKEN_ID, FakeModel
from mii_zmq.worker.plan import SamplingSpec, SequenceRequest
from tests.stack import LOOPBACK, PATIENCE_S, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "fake:step_ms=4,alphabet=letters"


@pytest.fixture
def stack() -> Iterator[Stack]:
    options = ["--heartbeat-ms", "100", "--liveness", "10", "--group-wait-s", str(PATIENCE_S)]
    stack = Stack(broker_options=options)
    try:
        yield stack
    finally:
        stack.close()


def expected_ids(prompt: str, num_tokens: int) -> list[int]:
    stop = () if num_tokens else (EOS_TOKEN_ID,)
    request = SequenceRequest(1, list(prompt.encode()), num_tokens, SamplingSpec(stop_token_ids=stop))
    return FakeModel(ALPHABETS["letters"]).generate(request)


@dataclass
class Reading:
    """One stream as its reader saw it."""

    prompt: str
    num_tokens: int
    text: str = ""
    ids: bytes = b""
    num_ends: int = 0
    error: MiiError | None = None

    async def run(self, client: AsyncClient, **params: object) -> Reading:
        body = GenerateBody(
            prompt=self.prompt, params={"max_new_tokens": self.num_tokens, "ignore_eos": True, **params}
        )
        try:
            async for deltas in client.generate("m", body, stream=True):
                for delta in deltas:
                    assert delta.token_offset == len(self.ids) // 4
                    self.ids += delta.token_ids
                    self.text += delta.text.decode()
                    self.num_ends += delta.finish_reason is not None
        except MiiError as error:
            self.error = error
        return self

    def check(self) -> None:
        """Equal to an undisturbed run."""
        if self.error is not None:
            raise self.error
        wanted = expected_ids(self.prompt, self.num_tokens)
        assert memoryview(self.ids).cast("i").tolist() == wanted
        assert self.text == bytes(wanted).decode()
        assert self.num_ends == 1


@contextlib.asynccontextmanager
async def connected(*endpoints: str):  # type: ignore[no-untyped-def]
    client = AsyncClient(endpoints)
    try:
        await client.connect(PATIENCE_S)
        yield client
    finally:
        await client.close()


async def counters(client: AsyncClient) -> dict[str, int]:
    found: dict[str, int] = (await client.status(PATIENCE_S))["counters"]
    return found


async def until_read(readings: list[Reading], num_tokens: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(len(reading.ids) < 4 * num_tokens for reading in readings):
            await asyncio.sleep(0.01)


def start(client: AsyncClient, readings: list[Reading]) -> list[asyncio.Task[Reading]]:
    return [asyncio.create_task(reading.run(client)) for reading in readings]


async def test_killed_group_s_streams_go_on_elsewhere(stack: Stack) -> None:
    for name in ("one", "two"):
        await asyncio.to_thread(stack.start_group, name, MODEL)
    async with connected(stack.client_endpoint) as client:
        readings = [Reading(f"stream {index}", 300) for index in range(12)]
        tasks = start(client, readings)
        await until_read(readings, 20)
        stack.groups["one"].process.kill()
        await asyncio.gather(*tasks)
        for reading in readings:
            reading.check()
        found = await counters(client)
        assert found["resumes"] >= 4
        assert found["resumed_tokens"] >= 20 * found["resumes"]
        assert (found["quarantined"], found["errors"]) == (0, {})


@pytest.mark.long
async def test_a_killed_group_s_structured_output_goes_on_elsewhere(stack: Stack) -> None:
    """The other group follows the grammar from the tokens that it is given; an undisturbed run says the same."""
    pytest.importorskip("xgrammar")
    for name in ("one", "two"):
        await asyncio.to_thread(stack.start_group, name, MODEL)
    schema = {"type": "array", "items": {"enum": ["ab", "cde", "fghi"]}, "minItems": 60, "maxItems": 60}
    params = {"structured_output": {"kind": "json_schema", "value": json.dumps(schema)}, "ignore_eos": False}
    async with connected(stack.client_endpoint) as client:
        # Both groups have started their grammar processes when these are done.
        first = await asyncio.gather(*(Reading("stream 0", 2000).run(client, **params) for _ in range(4)))
        readings = [Reading("stream 0", 2000) for _ in range(6)]
        tasks = [asyncio.create_task(reading.run(client, **params)) for reading in readings]
        await until_read(readings, 20)
        stack.groups["one"].process.kill()
        await asyncio.gather(*tasks)
        assert (await counters(client))["resumes"] >= 2
    for reading in (*first, *readings):
        assert reading.error is None
        assert reading.num_ends == 1
        assert len(json.loads(reading.text)) == 60
        assert reading.ids == first[0].ids


async def test_only_group_is_given_up_in_time() -> None:
    options = ["--heartbeat-ms", "100", "--liveness", "10", "--group-wait-s", "1"]
    stack = await asyncio.to_thread(Stack, broker_options=options)
    try:
        await asyncio.to_thread(stack.start_group, "one", MODEL)
        async with connected(stack.client_endpoint) as client:
            reading = Reading("waits", 7000)
            (task,) = start(client, [reading])
            await until_read([reading], 20)
            stack.groups["one"].process.kill()
            await asyncio.wait_for(task, PATIENCE_S)
            assert isinstance(reading.error, WorkerLost)
            assert reading.error.retryable
            assert reading.error.emitted_tokens == len(reading.ids) // 4
    finally:
        await asyncio.to_thread(stack.close)


async def test_only_group_is_waited_for() -> None:
    options = ["--heartbeat-ms", "100", "--liveness", "10", "--group-wait-s", str(PATIENCE_S)]
    stack = await asyncio.to_thread(Stack, broker_options=options)
    try:
        await asyncio.to_thread(stack.start_group, "one", MODEL)
        async with connected(stack.client_endpoint) as client:
            readings = [Reading(f"waits {index}", 400) for index in range(4)]
            tasks = start(client, readings)
            await until_read(readings, 20)
            stack.groups["one"].process.kill()
            await asyncio.to_thread(stack.start_group, "two", MODEL)
            await asyncio.gather(*tasks)
            for reading in readings:
                reading.check()
    finally:
        await asyncio.to_thread(stack.close)


async def test_deadly_request_costs_three_groups_and_nobody_else_anything(stack: Stack) -> None:
    model = "fake:step_ms=4,alphabet=letters,exit_on=deadly"
    for name in ("one", "two"):
        await asyncio.to_thread(stack.start_group, name, model)
    async with connected(stack.client_endpoint) as client:
        bystanders = [Reading(f"bystander {index}", 400) for index in range(10)]
        tasks = start(client, bystanders)
        await until_read(bystanders, 10)
        culprit = Reading("a deadly prompt", 5)
        (judged,) = start(client, [culprit])

        async with asyncio.timeout(PATIENCE_S):
            while all(child.is_alive for child in stack.groups.values()):
                await asyncio.sleep(0.01)
        # Its trial takes one of them, which may be gone before anybody sees it; the other is for the bystanders.
        await asyncio.to_thread(stack.start_group, "three", model, wait=False)
        await asyncio.to_thread(stack.start_group, "four", model, wait=False)
        await judged
        assert isinstance(culprit.error, PoisonRequest)
        assert culprit.ids == b""
        await asyncio.gather(*tasks)
        for reading in bystanders:
            reading.check()
        found = await counters(client)
        assert (found["groups_lost"], found["quarantined"], found["errors"]) == (3, 1, {"poison_request": 1})
        again = await Reading("a deadly prompt", 5).run(client)
        assert isinstance(again.error, PoisonRequest)
        (await Reading("another prompt", 5).run(client)).check()
        assert (await counters(client))["poison_refusals"] == 1
    assert sum(not child.is_alive for child in stack.groups.values()) == 3


@pytest.mark.long
async def test_request_that_is_deadly_in_mid_stream_is_found(stack: Stack) -> None:
    model = "fake:step_ms=4,alphabet=letters,exit_on=deadly,exit_after=40"
    await asyncio.to_thread(stack.start_group, "g0", model)
    async with connected(stack.client_endpoint) as client:
        bystanders = [Reading(f"bystander {index}", 300) for index in range(6)]
        culprit = Reading("deadly later", 100)
        tasks = start(client, bystanders)
        (judged,) = start(client, [culprit])
        number = 1
        while not judged.done():
            last = stack.groups[f"g{number - 1}"]
            if not last.is_alive:
                await asyncio.to_thread(stack.start_group, f"g{number}", model, wait=False)
                number += 1
            await asyncio.sleep(0.05)
        assert isinstance(culprit.error, PoisonRequest)
        assert memoryview(culprit.ids).cast("i").tolist() == expected_ids("deadly later", 100)[: len(culprit.ids) // 4]
        if not stack.groups[f"g{number - 1}"].is_alive:
            await asyncio.to_thread(stack.start_group, f"g{number}", model, wait=False)
        await asyncio.gather(*tasks)
        for reading in bystanders:
            reading.check()
        assert (await counters(client))["groups_lost"] <= 3


async def test_stop_string_that_is_held_back_at_the_kill_is_still_found(stack: Stack) -> None:
    """The text of the tokens under way may be the start of a stop string: replay finds the same."""
    for name in ("one", "two"):
        await asyncio.to_thread(stack.start_group, name, MODEL)
    whole = bytes(expected_ids("held back", 400)).decode()
    stop = whole[250:290]
    async with connected(stack.client_endpoint) as client:
        readings = [Reading("held back", 400) for _ in range(8)]
        tasks = [asyncio.create_task(reading.run(client, stop=[stop], ignore_eos=False)) for reading in readings]
        await until_read(readings, 245)
        stack.groups["two"].process.kill()
        await asyncio.gather(*tasks)
    assert [(reading.text, reading.num_ends, reading.error) for reading in readings] == [(whole[:250], 1, None)] * 8


async def test_killed_broker_s_streams_go_on_with_the_other_one(stack: Stack) -> None:
    other = await asyncio.to_thread(
        spawn, "mii_zmq.broker", ["--client-endpoint", LOOPBACK, "--worker-endpoint", LOOPBACK], "other broker"
    )
    try:
        facts = await asyncio.to_thread(other.wait_ready, PATIENCE_S)
        brokers = f"{stack.worker_endpoint},{facts['worker_endpoint']}"
        await asyncio.to_thread(stack.start_group, "g", MODEL, f"--brokers={brokers}")
        async with connected(stack.client_endpoint, facts["client_endpoint"]) as client:
            async with asyncio.timeout(PATIENCE_S):
                while not all(link.is_up for link in client._links):
                    await asyncio.sleep(0.01)
            readings = [Reading(f"stream {index}", 400) for index in range(6)]
            tasks = start(client, readings)
            await until_read(readings, 20)
            stack.broker.process.kill()
            await asyncio.gather(*tasks)
            for reading in readings:
                reading.check()
            await asyncio.to_thread(stack.broker.kill)
            await asyncio.to_thread(stack.start_broker)
            readings = [Reading(f"again {index}", 400) for index in range(6)]
            await asyncio.to_thread(stack.wait_for, lambda: "g" in stack.group_states())
            async with asyncio.timeout(PATIENCE_S):
                while not client._links[0].is_up:
                    await asyncio.sleep(0.01)
            tasks = start(client, readings)
            await until_read(readings, 20)
            assert (await counters(client))["accepted"] == 6
            other.process.terminate()
            await asyncio.gather(*tasks)
            for reading in readings:
                reading.check()
    finally:
        await asyncio.to_thread(other.kill)
