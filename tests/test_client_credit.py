# SPDX-License-Identifier: Apache-2.0
"""The client library grants credit as its readers take rows, and only then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mii_zmq.client import AsyncClient, Generation
from mii_zmq.client_link import CREDIT
from mii_zmq.generation import GRANT
from mii_zmq.protocol import GenerateBody, Hello, Verb, decode, encode, parse_header
from tests.test_client import PATIENCE_S, ScriptedBroker, delta, final, tokens


class Broker(ScriptedBroker):
    """Keeps what HELLO announced."""

    hello = Hello()

    def _on_frames(self, frames: list[bytes]) -> None:
        if frames[2][0] == Verb.HELLO:
            self.hello = parse_header(decode(frames[1:]), Hello)
        super()._on_frames(frames)


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    broker = Broker("tcp://127.0.0.1:0")
    yield broker
    broker.close()


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[AsyncClient]:
    client = AsyncClient([broker.endpoint])
    await client.connect(PATIENCE_S)
    yield client
    await client.close()


async def read(generation: Generation, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while count > 0:
            count -= len(await anext(generation))
    assert count == 0


async def test_grants_follow_the_reader(broker: Broker, client: AsyncClient) -> None:
    assert broker.hello.credit == CREDIT
    generations = [client.generate("m", GenerateBody(prompt="x"), stream=True) for _ in range(2)]
    peer, _ = await broker.next(Verb.GENERATE)
    await broker.next(Verb.GENERATE)
    for offset in range(CREDIT):
        broker.send(peer, tokens(*(delta(g.request_id, offset, [offset], "x") for g in generations)))
    # Read once the last one has arrived: nothing was granted for what merely lies here.
    while len(generations[1]._deltas) < CREDIT:
        await asyncio.sleep(0.005)
    assert broker.inbox.empty()
    for generation in generations:
        await read(generation, CREDIT)
    _, message = await broker.next(Verb.CREDIT)
    assert message.header["credit"] == GRANT
    assert sorted(message.header["request_ids"]) == sorted(g.request_id for g in generations)


async def test_a_client_may_grant_nothing_and_get_everything(broker: Broker) -> None:
    client = AsyncClient([broker.endpoint], credit=0)
    await client.connect(PATIENCE_S)
    assert broker.hello.credit == 0
    generation = client.generate("m", GenerateBody(prompt="x"), stream=True)
    peer, _ = await broker.next(Verb.GENERATE)
    for offset in range(GRANT):
        broker.send(peer, tokens(delta(generation.request_id, offset, [offset], "x")))
    await read(generation, GRANT)
    assert not client._links[0]._grants
    await client.close()


async def test_no_grant_is_lost_while_the_broker_is_away(broker: Broker, client: AsyncClient) -> None:
    generation = client.generate("m", GenerateBody(prompt="x"), stream=True)
    peer, _ = await broker.next(Verb.GENERATE)
    for offset in range(GRANT):
        broker.send(peer, tokens(delta(generation.request_id, offset, [offset], "x")))
    while len(generation._deltas) < GRANT:
        await asyncio.sleep(0.005)
    broker.send(peer, encode(Verb.HEARTBEAT, header={"epoch": b"?" * 16}))
    while client.is_connected:
        await asyncio.sleep(0)
    await read(generation, GRANT)
    # The same broker after all: the request runs there still, with what it was granted.
    _, message = await broker.next(Verb.CREDIT)
    assert message.header == {"credit": GRANT, "request_ids": [generation.request_id]}


async def test_sent_again_it_starts_with_new_credit(broker: Broker, client: AsyncClient) -> None:
    generation = client.generate("m", GenerateBody(prompt="x"), stream=True)
    peer, _ = await broker.next(Verb.GENERATE)
    for offset in range(GRANT):
        broker.send(peer, tokens(delta(generation.request_id, offset, [offset], "x")))
    while len(generation._deltas) < GRANT:
        await asyncio.sleep(0.005)
    broker.send(peer, encode(Verb.DISCONNECT))
    peer, _ = await broker.next(Verb.GENERATE)
    # What lies here was charged to the credit of before.
    await read(generation, GRANT)
    merged = delta(generation.request_id, GRANT, list(range(GRANT, 500)), "y" * 372)
    broker.send(peer, tokens(merged))
    broker.send(peer, tokens(delta(generation.request_id, 500, [500], "z", "length")))
    broker.send(peer, final(generation.request_id, 501))
    completion = await generation.result()
    assert completion.token_ids == list(range(501))
    assert completion.text == "y" * 372 + "z"
    assert broker.inbox.empty()
