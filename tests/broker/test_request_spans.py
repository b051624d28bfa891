# SPDX-License-Identifier: Apache-2.0
"""The broker's spans: waits and attempts, retries and refusals, and what is passed on of a trace."""

from __future__ import annotations

import asyncio

import pytest

from mii_zmq import transport
from mii_zmq.broker.broker import Broker
from mii_zmq.config import BrokerConfig
from mii_zmq.protocol import Message, Verb
from mii_zmq.trace_context import parse
from tests.broker.bench import Bench, row
from tests.broker.peers import Site
from tests.span_reader import Memory, SeenSpan

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def bench(memory: Memory) -> Bench:
    bench = Bench(memory.tracing)
    bench.ready("w1", incarnation=1)
    bench.ready("w2", incarnation=2)
    return bench


def the_tree(memory: Memory) -> SeenSpan:
    (root,) = memory.trees()
    assert root.name == "mii.broker.request"
    return root


def test_request_that_ends_well(memory: Memory, bench: Bench) -> None:
    bench.generate("c", 1, traceparent=TRACEPARENT, tracestate="v=1", x_request_id="mine")
    sent = bench.last("w1", Verb.GENERATE).header
    bench.tokens("w1", row(1, 0, [7], "a", "stop"))
    bench.final("w1", 1)
    root = the_tree(memory)
    assert root.names() == ["mii.broker.request", ["mii.broker.queue", "mii.broker.attempt"]]
    assert (root.trace_id, root.parent_id, root.is_error) == (TRACE, PARENT, False)
    assert root.attributes == {
        "mii.request_id": "mine",
        "mii.wire_id": "00" * 15 + "01",
        "mii.deployment": "m",
        "mii.stream": True,
        "mii.finish_reason": "stop",
        "mii.output_tokens": 1,
    }
    context = parse(sent["traceparent"], sent["tracestate"])
    assert context is not None
    assert (context.trace_id, context.span_id, context.state) == (TRACE, root.one("mii.broker.attempt").span_id, "v=1")
    assert sent["x_request_id"] == "mine"


def test_group_dies_and_another_goes_on(memory: Memory, bench: Bench) -> None:
    bench.generate("c", 1)
    for seq in range(6):
        bench.tokens("w1", row(1, seq, [seq]))
    bench.perform(bench.state.worker_gone((b"w1",), bench.now))
    again = bench.last("w2", Verb.GENERATE).header["traceparent"]
    bench.final("w2", 1)
    root = the_tree(memory)
    first, second = root.all("mii.broker.attempt")
    assert (first.attributes, first.is_error) == ({"mii.group": "w1", "mii.attempt": 1}, True)
    assert second.attributes == {"mii.group": "w2", "mii.attempt": 2, "mii.resumed_tokens": 6}
    assert (second.span_id, second.is_error) == (again.split("-")[2], False)
    assert root.events == [
        ("retry", {"mii.group": "w1", "mii.why": "its connection closed"}),
        ("resume", {"mii.group": "w2", "mii.resumed_tokens": 6}),
    ]
    assert len(root.all("mii.broker.queue")) == 2
    assert not root.is_error


def test_errors_say_their_code(memory: Memory, bench: Bench) -> None:
    bench.generate("c", 1, deployment="nobody")
    bench.generate("c", 2)
    bench.client("c", Verb.CANCEL, 2)
    bench.generate("c", 3, deadline_ms=-1)
    codes = [(root.attributes["mii.wire_id"][-1], root.attributes["error.type"]) for root in memory.trees()]
    assert codes == [("1", "unknown_deployment"), ("2", "cancelled"), ("3", "invalid_request")]
    cancelled = memory.trees()[1]
    assert cancelled.one("mii.broker.attempt").is_error
    assert bench.spans is not None
    assert len(bench.spans) == 0


def test_who_does_not_read_the_end_has_not_waited_for_a_group(memory: Memory, bench: Bench) -> None:
    bench.client("c", Verb.HELLO, None, {"credit": 1})
    bench.generate("c", 1)
    bench.tokens("w1", row(1, 0, [0], "a"))
    bench.tokens("w1", row(1, 1, [1], "b", "stop"))
    bench.final("w1", 1)
    bench.client("c", Verb.CANCEL, 1)
    root = the_tree(memory)
    assert root.attributes["error.type"] == "cancelled"
    (queue,) = root.all("mii.broker.queue")
    assert not queue.is_error


def test_a_wait_after_a_lost_group_is_one(memory: Memory, bench: Bench) -> None:
    bench.generate("c", 1)
    for name in (b"w2", b"w1"):
        bench.perform(bench.state.worker_gone((name,), bench.now))
    bench.client("c", Verb.CANCEL, 1)
    assert [span.is_error for span in the_tree(memory).all("mii.broker.queue")] == [False, True]


def test_same_id_again_does_not_end_the_trace_of_the_first(memory: Memory, bench: Bench) -> None:
    def ends() -> list[str]:
        found = [span.attributes for span in memory.spans() if span.name == "mii.broker.request"]
        return [values.get("error.type") or values["mii.finish_reason"] for values in found]

    bench.generate("c", 1)
    bench.generate("c", 1)
    assert ends() == ["invalid_request"]
    bench.generate("other", 1)
    assert ends() == ["invalid_request", "cancelled"]
    bench.final("w2", 1)
    assert ends() == ["invalid_request", "cancelled", "stop"]


def test_what_its_caller_does_not_trace_leaves_no_span(memory: Memory, bench: Bench) -> None:
    bench.generate("c", 1, traceparent=TRACEPARENT[:-1] + "0")
    sent = parse(bench.last("w1", Verb.GENERATE).header["traceparent"])
    bench.final("w1", 1)
    assert memory.spans() == []
    assert sent is not None
    assert (sent.trace_id, sent.is_sampled) == (TRACE, False)


@pytest.mark.parametrize("odd", ["", "nonsense", "00-0-0-01"])
def test_broken_context_begins_a_trace(memory: Memory, bench: Bench, odd: str) -> None:
    bench.generate("c", 1, traceparent=odd)
    bench.final("w1", 1)
    root = the_tree(memory)
    assert root.parent_id == ""
    assert root.trace_id != TRACE


def test_broker_that_does_not_trace_passes_the_context_on() -> None:
    bench = Bench()
    bench.ready("w")
    bench.generate("c", 1, traceparent=TRACEPARENT, tracestate="v=1")
    sent = bench.last("w", Verb.GENERATE).header
    assert (sent["traceparent"], sent["tracestate"]) == (TRACEPARENT, "v=1")


@pytest.mark.slow
async def test_whole_broker_records_and_forgets(memory: Memory, tmp_path: object) -> None:
    context = transport.make_context()
    config = BrokerConfig(client_endpoint="tcp://127.0.0.1:0", worker_endpoint=f"ipc://{tmp_path}/w", liveness=600)
    broker = Broker(config, context, memory.tracing)
    site = Site(broker, context)
    try:
        worker, client = site.worker(), site.client()
        await worker.register()
        await client.send(Verb.GENERATE, bytes(15) + b"\1", {"deployment": 5, "traceparent": 7}, body={})
        assert (await client.wait_for(Verb.ERROR)).header["code"] == "protocol"
        request_id = await client.generate(traceparent=TRACEPARENT)
        given: Message = await worker.wait_for(Verb.GENERATE)
        await worker.finish(request_id)
        await client.wait_for(Verb.FINAL)
        refused, served = memory.trees()
        assert refused.attributes["error.type"] == "protocol"
        assert given.header["traceparent"].split("-")[2] == served.one("mii.broker.attempt").span_id
        left = await client.generate()
        await worker.wait_for(Verb.GENERATE)
    finally:
        site.close()
        broker.close()
        transport.close_context(context)
        await asyncio.sleep(0)
    last = memory.trees()[-1]
    assert (last.attributes["mii.wire_id"], last.attributes["error.type"]) == (left.hex(), "draining")
