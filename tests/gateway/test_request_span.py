# SPDX-License-Identifier: Apache-2.0
"""The gateway's span of a request."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from mii_zmq.config import GatewayConfig
from mii_zmq.errors import InternalError, WorkerLost
from mii_zmq.gateway.app import make_app
from mii_zmq.generation import SentAgain
from tests.gateway.fake_client import FakeClient, FakeGeneration, echo
from tests.gateway.reading import post
from tests.span_reader import Memory

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "open sesame"}]}


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
async def app(broker: FakeClient, memory: Memory) -> web.Application:
    return make_app(GatewayConfig(port=0), broker, memory.tracing)


async def test_chat_in_the_words_of_the_conventions(
    http: aiohttp.ClientSession, broker: FakeClient, memory: Memory, address: tuple[str, int]
) -> None:
    options = {"temperature": 0.5, "top_p": 0.8, "max_tokens": 7, "seed": 3, "n": 2, "stop": ["sesame"]}
    headers = {"traceparent": PARENT, "User-Agent": "test/1", "X-Request-ID": "mine"}
    await post(http, "/v1/chat/completions", {**CHAT, **options}, headers=headers)
    (span,) = memory.spans()
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "server.address": address[0],
        "server.port": address[1],
        "network.protocol.version": "1.1",
        "user_agent.original": "test/1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mii_zmq",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.8,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "mii.request_id": "mine",
        "mii.stream": False,
        "mii.cached_tokens": 0,
        "mii.num_generations": 2,
    }
    assert (span.name, span.is_error) == ("POST /v1/chat/completions", False)
    assert f"00-{span.trace_id}-{span.parent_id}-01" == PARENT
    for generation in broker.sent:
        assert generation.trace is not None
        assert (generation.trace.trace_id, generation.trace.span_id) == (span.trace_id, span.span_id)


async def test_first_token_and_new_brokers_are_events(
    http: aiohttp.ClientSession, broker: FakeClient, memory: Memory
) -> None:
    def answer(generation: FakeGeneration) -> None:
        generation.sent_again.append(SentAgain(1.0, "tcp://b:1", 5))
        echo(generation)

    broker.answer = answer
    async with http.post("/mii/fake", json={"prompts": "a b", "stream": True, "do_sample": False}) as response:
        await response.read()
    (span,) = memory.spans()
    assert span.name == "POST /mii/{deployment}"
    assert span.events == [
        ("first token", {}),
        ("sent again", {"mii.broker": "tcp://b:1", "mii.received_tokens": 5}),
    ]
    assert 0 <= span.attributes["mii.time_to_first_token_s"] < 60
    assert span.attributes["gen_ai.request.temperature"] == 0.0
    assert span.parent_id == ""


@pytest.mark.parametrize(
    ("error", "stream", "status", "is_error"),
    [(WorkerLost("x"), False, 502, True), (WorkerLost("x"), True, 200, True), (InternalError("x"), False, 500, True)],
)
async def test_failures(
    http: aiohttp.ClientSession, broker: FakeClient, memory: Memory, error: WorkerLost, stream: bool, status: int,
    is_error: bool,
) -> None:  # fmt: skip
    def fail(generation: FakeGeneration) -> None:
        generation.push("a")
        generation.fail(error)

    broker.answer = fail
    async with http.post("/mii/fake", json={"prompts": "a", "stream": stream}) as response:
        await response.read()
        assert response.status == status
    (span,) = memory.spans()
    assert (span.attributes["error.type"], span.is_error) == (error.code, is_error)


async def test_client_s_own_mistake_is_no_failure(http: aiohttp.ClientSession, memory: Memory) -> None:
    await post(http, "/mii/fake", {"prompts": ""})
    (span,) = memory.spans()
    assert (span.attributes["error.type"], span.is_error) == ("invalid_request", False)
    assert "gen_ai.request.model" not in span.attributes


async def test_what_is_not_sampled_and_probes_leave_none(
    http: aiohttp.ClientSession, broker: FakeClient, memory: Memory
) -> None:
    for path in ("/health", "/metrics"):
        async with http.get(path) as response:
            await response.read()
    await post(http, "/mii/fake", {"prompts": "a"}, headers={"traceparent": PARENT[:-1] + "0"})
    assert memory.spans() == []
    trace = broker.sent[0].trace
    assert trace is not None
    assert trace.traceparent.endswith("-00")
    assert trace.trace_id == PARENT.split("-")[1]


@pytest.mark.parametrize(
    ("host", "name"), [("a:\xb2", "a:\xb2"), ("[::1]", "[::1]"), (":80", ":80"), ("x" * 999, "x" * 255)]
)
async def test_odd_hosts(http: aiohttp.ClientSession, memory: Memory, host: str, name: str) -> None:
    async with http.get("/v1/models", headers={"Host": host}) as response:
        assert response.status == 200
    (span,) = memory.spans()
    assert span.attributes["server.address"] == name
    assert "server.port" not in span.attributes
