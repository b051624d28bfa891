# SPDX-License-Identifier: Apache-2.0
"""The asynchronous client against a scripted broker on a real ROUTER socket."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from mii_zmq import protocol, transport
from mii_zmq.client import AsyncClient, BackgroundLoop, Generation, fan_out
from mii_zmq.client_link import Link
from mii_zmq.errors import (
    BrokerUnavailable,
    Cancelled,
    Draining,
    InternalError,
    InvalidRequest,
    MiiError,
    NoWorkers,
    Overloaded,
    ProtocolError,
    RequestTooLarge,
    ServiceError,
    UnknownDeployment,
)
from mii_zmq.protocol import (
    Aborted,
    FinalBody,
    GenerateBody,
    GenerateHeader,
    Message,
    PrefixCacheReset,
    TokenDelta,
    TokenRows,
    Verb,
    Welcome,
)
from mii_zmq.sampling_params import SamplingParams
from tests.stack import unused_endpoint

PATIENCE_S = 30


class ScriptedBroker:
    """Answers HELLO and HEARTBEAT; everything else waits in `inbox` for the test."""

    def __init__(self, endpoint: str, epoch: bytes = b"e" * 16) -> None:
        """Clients look out for it every 50 ms, and do not miss it for longer than any machine stalls."""
        self.context = transport.make_context()
        socket, self.endpoint = transport.bind_router(self.context, endpoint)
        self.socket = transport.AsyncSocket(socket, self._on_frames)
        self.inbox: asyncio.Queue[tuple[bytes, Message]] = asyncio.Queue()
        self.epoch = epoch
        self.is_mute = False
        self.greetings: list[Verb] = []
        """HELLO and DISCONNECT, as they were read; from anew when it falls silent."""
        self._peers: set[bytes] = set()
        self._unread: list[list[bytes]] = []

    def fall_silent(self) -> None:
        """Read and say nothing more, as a process that is stopped; its clients will miss it in a moment."""
        for peer in self._peers:
            self._welcome(peer, liveness=2)
        self.is_mute = True
        self.greetings.clear()

    def speak_again(self) -> None:
        """Nothing was lost meanwhile: all of it is read now, in order."""
        self.is_mute = False
        unread, self._unread = self._unread, []
        for frames in unread:
            self._on_frames(frames)

    def _welcome(self, peer: bytes, liveness: int = 600) -> None:
        welcome = Welcome(
            epoch=self.epoch,
            heartbeat_ms=50,
            liveness=liveness,
            max_body_bytes=protocol.MAX_BODY_BYTES,
            deployments=["m"],
            capabilities=[],
        )
        self.send(peer, protocol.encode(Verb.WELCOME, header=welcome))

    def _on_frames(self, frames: list[bytes]) -> None:
        if self.is_mute:
            self._unread.append(frames)
            return
        peer, message = frames[0], protocol.decode(frames[1:])
        if message.verb in (Verb.HELLO, Verb.DISCONNECT):
            self.greetings.append(message.verb)
        if message.verb is Verb.HELLO:
            self._peers.add(peer)
            self._welcome(peer)
        elif message.verb is Verb.DISCONNECT:
            self._peers.discard(peer)
        elif message.verb is Verb.HEARTBEAT:
            self.send(peer, protocol.encode(Verb.HEARTBEAT, header={"epoch": self.epoch}))
        else:
            self.inbox.put_nowait((peer, message))

    def send(self, peer: bytes, frames: list[bytes]) -> None:
        self.socket.send([peer, *frames])

    async def next(self, verb: Verb) -> tuple[bytes, Message]:
        async with asyncio.timeout(PATIENCE_S):
            peer, message = await self.inbox.get()
        assert message.verb is verb
        return peer, message

    def close(self) -> None:
        self.socket.close(linger_ms=0)
        if not self.context.closed:
            transport.close_context(self.context)


def tokens(*deltas: TokenDelta) -> list[bytes]:
    rows = TokenRows()
    for delta in deltas:
        rows.add(delta)
    return rows.to_frames()


def delta(request_id: bytes, offset: int, ids: list[int], text: str, finish: str | None = None) -> TokenDelta:
    return TokenDelta(request_id, offset, offset, b"".join(i.to_bytes(4, "little") for i in ids), text.encode(), finish)


def final(request_id: bytes, length: int, text: str | None = None, ids: bytes = b"") -> list[bytes]:
    body = FinalBody(finish_reason="length", prompt_length=3, generated_length=length, text=text)
    return protocol.encode(Verb.FINAL, request_id, body=body, raw=(ids,) if text is not None else ())


@pytest.fixture
async def broker() -> AsyncIterator[ScriptedBroker]:
    # A successor may need the port.
    broker = ScriptedBroker(unused_endpoint())
    yield broker
    broker.close()


@pytest.fixture
async def client(broker: ScriptedBroker) -> AsyncIterator[AsyncClient]:
    client = AsyncClient([broker.endpoint], name="test")
    await client.connect(PATIENCE_S)
    yield client
    await client.close()


def start(client: AsyncClient, stream: bool = True, **params: Any) -> Generation:
    return client.generate("m", GenerateBody(prompt="hi", params=params), stream=stream)


async def test_stream_joins_deltas_and_drops_duplicates(broker: ScriptedBroker, client: AsyncClient) -> None:
    generation = start(client, max_new_tokens=3)
    peer, message = await broker.next(Verb.GENERATE)
    header = protocol.parse_header(message, GenerateHeader)
    assert (header.deployment, header.stream, header.num_tokens) == ("m", True, 3)
    first = delta(message.request_id, 0, [7], "a")
    for frames in (tokens(first), tokens(first), tokens(delta(message.request_id, 1, [8, 9], "é", "length"))):
        broker.send(peer, frames)
    broker.send(peer, final(message.request_id, 3))
    completion = await generation.result()
    assert completion.text == "aé"
    assert completion.token_ids == [7, 8, 9]
    assert (completion.finish_reason, completion.prompt_length, completion.generated_length) == ("length", 3, 3)


async def test_unstreamed_result_carries_text_and_ids(broker: ScriptedBroker, client: AsyncClient) -> None:
    generation = start(client, stream=False)
    peer, message = await broker.next(Verb.GENERATE)
    broker.send(peer, final(message.request_id, 1, text="x", ids=(5).to_bytes(4, "little")))
    completion = await generation.result()
    assert (completion.text, completion.token_ids) == ("x", [5])


async def test_rows_of_several_requests_in_one_message(broker: ScriptedBroker, client: AsyncClient) -> None:
    one, two = start(client), start(client)
    peer, _ = await broker.next(Verb.GENERATE)
    await broker.next(Verb.GENERATE)
    broker.send(peer, tokens(delta(one.request_id, 0, [1], "one"), delta(two.request_id, 0, [2], "two")))
    assert [d.text for d in await anext(one)] == [b"one"]
    assert [d.text for d in await anext(two)] == [b"two"]


async def test_error_keeps_its_class_and_comes_after_the_text(broker: ScriptedBroker, client: AsyncClient) -> None:
    generation = start(client)
    peer, message = await broker.next(Verb.GENERATE)
    broker.send(peer, tokens(delta(message.request_id, 0, [1], "a")))
    error = Overloaded("too much", retry_after_ms=70)
    broker.send(peer, protocol.encode(Verb.ERROR, message.request_id, error.to_wire()))
    assert [d.text for d in await anext(generation)] == [b"a"]
    with pytest.raises(Overloaded, match="too much") as caught:
        await anext(generation)
    assert caught.value.retry_after_ms == 70


async def test_a_last_message_that_cannot_be_read_ends_the_request(broker: ScriptedBroker, client: AsyncClient) -> None:
    for body in ({"finish_reason": 5}, b"\xc1"):
        generation = start(client)
        peer, message = await broker.next(Verb.GENERATE)
        broker.send(peer, protocol.encode(Verb.FINAL, message.request_id, body=body))
        with pytest.raises(ProtocolError, match="cannot be read"):
            async with asyncio.timeout(PATIENCE_S):
                await generation.result()


async def test_an_error_with_strange_fields_ends_the_request(broker: ScriptedBroker, client: AsyncClient) -> None:
    generation = start(client)
    peer, message = await broker.next(Verb.GENERATE)
    header = {"code": 7, "message": None, "emitted_tokens": "many", "retry_after_ms": "soon", "param": 1}
    broker.send(peer, protocol.encode(Verb.ERROR, message.request_id, header))
    with pytest.raises(InternalError):
        async with asyncio.timeout(PATIENCE_S):
            await generation.result()


async def test_connecting_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    client = AsyncClient([f"ipc://{tmp_path}/nobody"])
    client.start()
    await asyncio.sleep(0)
    before = asyncio.all_tasks()
    connecting = asyncio.create_task(client.connect(PATIENCE_S))
    while len(asyncio.all_tasks()) < len(before) + 2:
        await asyncio.sleep(0)
    connecting.cancel()
    await asyncio.wait([connecting])
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    await client.close()


async def test_gap_in_a_stream_is_an_error(broker: ScriptedBroker, client: AsyncClient) -> None:
    generation = start(client)
    peer, message = await broker.next(Verb.GENERATE)
    broker.send(peer, tokens(delta(message.request_id, 2, [1], "a")))
    with pytest.raises(ProtocolError, match="missing"):
        await generation.result()
    await broker.next(Verb.CANCEL)


async def test_cancel_reaches_the_broker_once(broker: ScriptedBroker, client: AsyncClient) -> None:
    generation = start(client)
    await broker.next(Verb.GENERATE)
    generation.cancel()
    generation.cancel()
    _, message = await broker.next(Verb.CANCEL)
    assert message.request_id == generation.request_id
    with pytest.raises(Cancelled):
        await generation.result()
    assert broker.inbox.empty()


async def test_request_is_sent_again_to_a_restarted_broker(broker: ScriptedBroker, client: AsyncClient) -> None:
    generation = start(client)
    peer, message = await broker.next(Verb.GENERATE)
    broker.send(peer, tokens(delta(message.request_id, 0, [7, 8], "ab")))
    assert len(await anext(generation)) == 1
    broker.close()
    successor = ScriptedBroker(broker.endpoint, epoch=b"f" * 16)
    try:
        peer, message = await successor.next(Verb.GENERATE)
        assert message.request_id == generation.request_id
        assert list(message.raw) == [(7).to_bytes(4, "little") + (8).to_bytes(4, "little")]
        successor.send(peer, tokens(delta(message.request_id, 2, [9], "c", "length")))
        successor.send(peer, final(message.request_id, 3))
        assert (await generation.result()).token_ids == [7, 8, 9]
    finally:
        successor.close()


async def test_after_silence_everything_is_sent_again(broker: ScriptedBroker, client: AsyncClient) -> None:
    """The broker may have given the client up, and its word of that been lost."""
    generation = start(client)
    peer, message = await broker.next(Verb.GENERATE)
    broker.send(peer, tokens(delta(message.request_id, 0, [7], "a")))
    await anext(generation)
    broker.fall_silent()
    async with asyncio.timeout(PATIENCE_S):
        await _until(lambda: not client.is_connected)
    broker.speak_again()
    peer, message = await broker.next(Verb.GENERATE)
    assert broker.greetings[:2] == [Verb.DISCONNECT, Verb.HELLO]
    assert message.request_id == generation.request_id
    assert list(message.raw) == [(7).to_bytes(4, "little")]
    broker.send(peer, tokens(delta(message.request_id, 1, [8], "b", "length")))
    broker.send(peer, final(message.request_id, 2))
    assert (await generation.result()).token_ids == [7, 8]


async def test_requests_wait_for_a_broker_that_is_away(broker: ScriptedBroker, client: AsyncClient) -> None:
    broker.fall_silent()
    async with asyncio.timeout(PATIENCE_S):
        await _until(lambda: not client.is_connected)
    generation = start(client)
    with pytest.raises(BrokerUnavailable):
        await client.status()
    broker.speak_again()
    peer, message = await broker.next(Verb.GENERATE)
    assert message.request_id == generation.request_id
    broker.send(peer, tokens(delta(message.request_id, 0, [7], "a", "length")))
    broker.send(peer, final(message.request_id, 1))
    assert (await generation.result()).text == "a"


async def test_a_given_up_connection_sends_its_requests_again(broker: ScriptedBroker, client: AsyncClient) -> None:
    generation = start(client)
    peer, message = await broker.next(Verb.GENERATE)
    broker.send(peer, tokens(delta(message.request_id, 0, [7], "a")))
    broker.send(peer, protocol.encode(Verb.DISCONNECT, header={"reason": "missed its heartbeats"}))
    peer, message = await broker.next(Verb.GENERATE)
    assert list(message.raw) == [(7).to_bytes(4, "little")]
    broker.send(peer, tokens(delta(message.request_id, 1, [8], "b", "length")))
    broker.send(peer, final(message.request_id, 2))
    assert (await generation.result()).text == "ab"


@pytest.fixture
async def second() -> AsyncIterator[ScriptedBroker]:
    broker = ScriptedBroker("tcp://127.0.0.1:0", epoch=b"2" * 16)
    yield broker
    broker.close()


@pytest.fixture
async def client_of_two(broker: ScriptedBroker, second: ScriptedBroker) -> AsyncIterator[AsyncClient]:
    client = AsyncClient([broker.endpoint, second.endpoint], name="test")
    client.start()
    async with asyncio.timeout(PATIENCE_S):
        await _until(lambda: all(link.is_up for link in client._links))
    yield client
    await client.close()


class TestSeveralBrokers:
    async def test_a_broker_that_says_it_drains_gets_no_new_requests(
        self, broker: ScriptedBroker, second: ScriptedBroker, client_of_two: AsyncClient
    ) -> None:
        generation = start(client_of_two)
        peer, _ = await broker.next(Verb.GENERATE)
        broker.send(peer, protocol.encode(Verb.HEARTBEAT, header={"epoch": broker.epoch, "is_draining": True}))
        async with asyncio.timeout(PATIENCE_S):
            await _until(lambda: client_of_two._links[0].is_draining)
        start(client_of_two)
        await second.next(Verb.GENERATE)
        # What it has, it finishes.
        broker.send(peer, final(generation.request_id, 1))
        assert (await generation.result()).generated_length == 1

    @pytest.mark.parametrize("error", [NoWorkers("none"), UnknownDeployment("?")])
    async def test_what_one_broker_has_no_workers_for_goes_to_the_next(
        self, broker: ScriptedBroker, second: ScriptedBroker, client_of_two: AsyncClient, error: MiiError
    ) -> None:
        one, two = start(client_of_two), start(client_of_two)
        for _ in range(2):
            peer, message = await broker.next(Verb.GENERATE)
            broker.send(peer, protocol.encode(Verb.ERROR, message.request_id, error.to_wire()))
        peer, message = await second.next(Verb.GENERATE)
        second.send(peer, final(message.request_id, 1))
        await one.result()
        peer, message = await second.next(Verb.GENERATE)
        second.send(peer, protocol.encode(Verb.ERROR, message.request_id, error.to_wire()))
        with pytest.raises(type(error)):
            await two.result()
        assert broker.inbox.empty()

    async def test_stream_goes_on_with_the_next_broker(
        self, broker: ScriptedBroker, second: ScriptedBroker, client_of_two: AsyncClient
    ) -> None:
        generation = start(client_of_two)
        peer, message = await broker.next(Verb.GENERATE)
        broker.send(peer, tokens(delta(message.request_id, 0, [7, 8], "ab")))
        assert len(await anext(generation)) == 1
        broker.close()
        peer, message = await second.next(Verb.GENERATE)
        assert message.request_id == generation.request_id
        assert list(message.raw) == [(7).to_bytes(4, "little") + (8).to_bytes(4, "little")]
        second.send(peer, tokens(delta(message.request_id, 2, [9], "c", "length")))
        second.send(peer, final(message.request_id, 3))
        assert (await generation.result()).token_ids == [7, 8, 9]
        assert client_of_two.is_connected

    async def test_final_that_was_lost_comes_from_the_next_broker_once(
        self, broker: ScriptedBroker, second: ScriptedBroker, client_of_two: AsyncClient
    ) -> None:
        generation = start(client_of_two)
        peer, message = await broker.next(Verb.GENERATE)
        broker.send(peer, tokens(delta(message.request_id, 0, [7], "a", "length")))
        first = await anext(generation)
        broker.close()
        peer, message = await second.next(Verb.GENERATE)
        second.send(peer, tokens(delta(message.request_id, 1, [], "", "length")))
        second.send(peer, final(message.request_id, 1))
        rest = await generation.result()
        assert ([d.finish_reason for d in first], rest.text, rest.token_ids) == (["length"], "", [7])

    async def test_broker_that_was_silent_hears_first_that_its_requests_are_gone(
        self, broker: ScriptedBroker, second: ScriptedBroker, client_of_two: AsyncClient
    ) -> None:
        generation = start(client_of_two)
        first_peer, _ = await broker.next(Verb.GENERATE)
        broker.fall_silent()
        peer, message = await second.next(Verb.GENERATE)
        broker.speak_again()
        async with asyncio.timeout(PATIENCE_S):
            await _until(lambda: all(link.is_up for link in client_of_two._links))
        assert broker.greetings[:2] == [Verb.DISCONNECT, Verb.HELLO]
        # What it still has of them is nobody's.
        broker.send(first_peer, tokens(delta(message.request_id, 0, [66], "x")))
        broker.send(first_peer, protocol.encode(Verb.ERROR, message.request_id, Cancelled("gone").to_wire()))
        # A broker that is back is used again.
        later = start(client_of_two)
        later_peer, later_message = await broker.next(Verb.GENERATE)
        assert later_message.request_id == later.request_id
        broker.send(later_peer, final(later.request_id, 1))
        await later.result()
        second.send(peer, tokens(delta(message.request_id, 0, [7], "a", "length")))
        second.send(peer, final(message.request_id, 1))
        assert (await generation.result()).token_ids == [7]

    async def test_broker_that_shuts_down_hands_over(
        self, broker: ScriptedBroker, second: ScriptedBroker, client_of_two: AsyncClient
    ) -> None:
        generation = start(client_of_two)
        peer, message = await broker.next(Verb.GENERATE)
        broker.send(peer, protocol.encode(Verb.ERROR, message.request_id, Draining("bye").to_wire()))
        assert (await second.next(Verb.GENERATE))[1].request_id == generation.request_id
        # It still answers, but takes nothing new.
        later = start(client_of_two)
        assert (await second.next(Verb.GENERATE))[1].request_id == later.request_id

    async def test_request_waits_while_both_are_away(
        self, broker: ScriptedBroker, second: ScriptedBroker, client_of_two: AsyncClient
    ) -> None:
        generation = start(client_of_two)
        await broker.next(Verb.GENERATE)
        broker.close()
        await second.next(Verb.GENERATE)
        second.close()
        successor = ScriptedBroker(broker.endpoint, epoch=b"f" * 16)
        try:
            _, message = await successor.next(Verb.GENERATE)
            assert message.request_id == generation.request_id
        finally:
            successor.close()

    async def test_deadline_that_is_sent_again_is_what_is_left(
        self, broker: ScriptedBroker, second: ScriptedBroker, client_of_two: AsyncClient
    ) -> None:
        client_of_two.generate("m", GenerateBody(prompt="hi"), stream=True, deadline_s=60)
        _, message = await broker.next(Verb.GENERATE)
        sent_first = message.header["deadline_ms"]
        broker.close()
        _, message = await second.next(Verb.GENERATE)
        assert 0 < message.header["deadline_ms"] < sent_first


async def test_draining_broker_without_another_one_is_an_error(broker: ScriptedBroker, client: AsyncClient) -> None:
    generation = start(client)
    peer, message = await broker.next(Verb.GENERATE)
    broker.send(peer, protocol.encode(Verb.ERROR, message.request_id, Draining("bye").to_wire()))
    with pytest.raises(Draining):
        await generation.result()


async def test_no_broker_at_all() -> None:
    client = AsyncClient(["tcp://127.0.0.1:9"])
    with pytest.raises(BrokerUnavailable):
        await client.connect(0.1)
    await client.close()


@pytest.mark.parametrize("num_turns", range(5))
async def test_close_ends_while_a_broker_answers(num_turns: int) -> None:
    """The cancellation may meet the WELCOME at any turn of the loop."""
    client = AsyncClient(["tcp://127.0.0.1:9"])
    client.start()
    await asyncio.sleep(0)
    client._links[0].up.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await client.close()


async def test_too_large_a_request_is_refused_here(broker: ScriptedBroker, client: AsyncClient) -> None:
    with pytest.raises(RequestTooLarge):
        client.generate("m", GenerateBody(prompt="x" * (protocol.MAX_BODY_BYTES + 1)), stream=True)


async def test_lone_surrogate_is_refused_here(broker: ScriptedBroker, client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        client.generate("m", GenerateBody(prompt="a\ud800"), stream=True)


async def test_too_large_an_integer_is_refused_here(broker: ScriptedBroker, client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match="more than 64 bits"):
        client.generate("m", GenerateBody(prompt_token_ids=[2**64]), stream=True)


async def test_status(broker: ScriptedBroker, client: AsyncClient) -> None:
    asked = asyncio.ensure_future(client.status(PATIENCE_S))
    peer, message = await broker.next(Verb.STATUS)
    broker.send(peer, protocol.encode(Verb.STATUS, message.request_id, body={"uptime_s": 1}))
    assert await asked == {"uptime_s": 1}


async def test_asking_where_no_broker_is_fails_at_once() -> None:
    context = transport.make_context()
    link = Link(context, unused_endpoint(), "test", set(), 0, lambda: None, lambda generation: False)
    try:
        with pytest.raises(BrokerUnavailable, match="is gone"):
            await link.ask(Verb.STATUS, None, PATIENCE_S)
    finally:
        await link.close()
        transport.close_context(context)


async def test_a_question_is_not_waited_for_when_its_broker_is_lost(
    broker: ScriptedBroker, client: AsyncClient
) -> None:
    asked = asyncio.ensure_future(client.status(10 * PATIENCE_S))
    await broker.next(Verb.STATUS)
    broker.close()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokerUnavailable, match="is gone"):
            await asked
        with pytest.raises(BrokerUnavailable, match="no broker answers"):
            await client.status(10 * PATIENCE_S)


def test_background_loop_of_a_parent_process_says_so() -> None:
    script = """
import os
from mii_zmq.client import BackgroundLoop
async def one(): return 1
loop = BackgroundLoop()
assert loop.run(one()) == 1
if os.fork() == 0:
    try:
        loop.run(one())
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
"""
    said = subprocess.check_output([sys.executable, "-W", "ignore", "-c", script], text=True)
    assert said.startswith("ServiceError this client stayed behind")


def test_background_loop_serves_many_threads() -> None:
    loop = BackgroundLoop()
    results: list[int] = []

    async def double(value: int) -> int:
        return 2 * value

    threads = [threading.Thread(target=lambda v=v: results.append(loop.run(double(v)))) for v in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 2, 4, 6, 8, 10, 12, 14]

    async def nested() -> int:
        return loop.run(double(1))

    with pytest.raises(InternalError):
        loop.run(nested())
    loop.close()


def test_closing_a_background_loop_frees_those_who_wait() -> None:
    loop = BackgroundLoop()
    waiting, outcomes = threading.Event(), []

    async def wait_for_ever() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            loop.run(wait_for_ever())
        except ServiceError as error:
            outcomes.append(error.message)

    thread = threading.Thread(target=call)
    thread.start()
    assert waiting.wait(PATIENCE_S)
    loop.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    with pytest.raises(ServiceError, match="closed"):
        loop.run(wait_for_ever())
    assert len(outcomes) == 1


def test_fan_out_gives_each_choice_its_own_seed() -> None:
    params = SamplingParams.from_mapping({"n": 3, "seed": 5, "top_k": 4})
    mappings = fan_out(params)
    assert [m["top_k"] for m in mappings] == [4, 4, 4]
    assert len({m["seed"] for m in mappings}) == 3
    assert mappings[0]["seed"] == 5
    assert all("n" not in m for m in mappings)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_tools_count_as_part_of_the_prompt(broker: ScriptedBroker, client: AsyncClient) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * 40}]
    called = {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"text": "x" * 400}}]}
    bodies = [
        GenerateBody(messages=messages, params={"max_new_tokens": 5}),
        GenerateBody(messages=messages, params={"max_new_tokens": 5}, tools=[{"description": "x" * 400}]),
        GenerateBody(messages=[*messages, called], params={"max_new_tokens": 5}),
    ]
    counts = []
    for body in bodies:
        client.generate("m", body, stream=True)
        _, message = await broker.next(Verb.GENERATE)
        counts.append(message.header["num_tokens"])
    assert counts[0] == 15
    assert min(counts[1:]) >= 115


async def test_an_abort_goes_to_every_broker_and_the_answers_are_added_up(broker: ScriptedBroker) -> None:
    other = ScriptedBroker(unused_endpoint())
    client = AsyncClient([broker.endpoint, other.endpoint])
    try:
        await client.connect(PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            for link in client._links:
                await link.up.wait()
        task = asyncio.create_task(client.abort(names=["a", "b"], request_ids=[b"x" * 16], tenant="t"))
        for one, answer in (
            (broker, Aborted(num_requests=2, names=["b"])),
            (other, Aborted(num_requests=1, request_ids=[b"x" * 16], names=["a", "b"])),
        ):
            peer, message = await one.next(Verb.ABORT)
            assert message.header == {"names": ["a", "b"], "request_ids": [b"x" * 16], "tenant": "t"}
            one.send(peer, protocol.encode(Verb.ABORT, message.request_id, answer))
        assert await task == Aborted(num_requests=3, request_ids=[b"x" * 16], names=["a", "b"])
    finally:
        await client.close()
        other.close()


async def test_requests_bear_the_name_by_which_they_can_be_aborted(broker: ScriptedBroker, client: AsyncClient) -> None:
    generation = client.generate("m", GenerateBody(prompt="hi"), stream=True, name="mine")
    _, message = await broker.next(Verb.GENERATE)
    assert message.header["x_request_id"] == "mine"
    generation.cancel()


async def test_a_question_that_the_broker_refuses_or_does_not_answer(
    broker: ScriptedBroker, client: AsyncClient
) -> None:
    task = asyncio.create_task(client.reset_prefix_cache("m"))
    peer, message = await broker.next(Verb.RESET_PREFIX_CACHE)
    assert message.header == {"deployment": "m"}
    # As a broker says it that does not know the verb.
    error = ProtocolError("unknown verb 0x1a")
    broker.send(peer, protocol.encode(Verb.ERROR, message.request_id, error.to_wire()))
    with pytest.raises(ProtocolError, match="unknown verb"):
        await task
    with pytest.raises(BrokerUnavailable, match="did not answer"):
        await client.reset_prefix_cache("m", timeout_s=0.01)
    task = asyncio.create_task(client.reset_prefix_cache("m"))
    await broker.next(Verb.RESET_PREFIX_CACHE)
    peer, message = await broker.next(Verb.RESET_PREFIX_CACHE)
    answer = PrefixCacheReset(done=["g"], failed={"h": "gone"})
    broker.send(peer, protocol.encode(Verb.RESET_PREFIX_CACHE, message.request_id, answer))
    assert await task == answer


async def test_a_question_to_a_broker_that_is_lost_ends_at_once(broker: ScriptedBroker, client: AsyncClient) -> None:
    task = asyncio.create_task(client.reset_prefix_cache("m", timeout_s=10 * PATIENCE_S))
    peer, _ = await broker.next(Verb.RESET_PREFIX_CACHE)
    broker.send(peer, protocol.encode(Verb.DISCONNECT))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokerUnavailable, match="is gone"):
            await task


async def test_without_a_broker_nothing_is_aborted() -> None:
    client = AsyncClient([unused_endpoint()])
    with pytest.raises(BrokerUnavailable):
        await client.abort(everything=True)
    with pytest.raises(BrokerUnavailable):
        await client.reset_prefix_cache("m")
    await client.close()
