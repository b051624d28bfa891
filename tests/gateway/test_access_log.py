# SPDX-License-Identifier: Apache-2.0
"""One line per request: what stands in it, in both forms, and what never does."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mii_zmq.config import GatewayConfig
from mii_zmq.errors import WorkerLost
from mii_zmq.gateway.app import make_app
from tests.gateway.fake_client import FakeClient, FakeGeneration
from tests.gateway.reading import post

SECRET = "sesame"
LOGGER = "mii_zmq.access"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, logger=LOGGER)

    def found() -> list[dict[str, Any]]:
        records = [record for record in caplog.records if record.name == LOGGER]
        assert not any(SECRET in record.getMessage() or SECRET in str(vars(record)["facts"]) for record in records)
        return [{"text": record.getMessage(), **vars(record)["facts"]} for record in records]

    return found


async def test_stream_and_whole_answer(http: aiohttp.ClientSession, lines: Any) -> None:
    body = {"prompts": f"{SECRET} b", "stream": True}
    headers = {"X-Request-ID": "mine", "Authorization": SECRET}
    async with http.post(f"/mii/fake?key={SECRET}", json=body, headers=headers) as response:
        await response.read()
    await post(http, "/v1/completions", {"model": "fake", "prompt": [SECRET, "b c"], "n": 2})
    stream, whole = lines()
    assert stream["text"].startswith("POST /mii/fake 200 ")
    assert ", model 'fake', tokens 2+2, first " in stream["text"]
    assert stream["text"].endswith(" ms, length")
    assert {"request_id": "mine", "status": 200, "model": "fake", "finish_reason": "length"}.items() <= stream.items()
    assert 0 <= stream["first_token_ms"] <= stream["total_ms"]
    assert (whole["prompt_tokens"], whole["output_tokens"], whole["stream"]) == (3, 6, False)
    assert not {"first_token_ms", "error", "disconnected"} & whole.keys()


async def test_errors_before_and_within_an_answer(http: aiohttp.ClientSession, broker: FakeClient, lines: Any) -> None:
    await post(http, "/v1/completions", {"model": "fake", "prompt": "a", "no_such": SECRET})
    await post(http, "/v1/completions", {"model": "nobody", "prompt": "a"})

    def fail(generation: FakeGeneration) -> None:
        generation.push("a")
        generation.fail(WorkerLost("gone"))

    broker.answer = fail
    async with http.post("/mii/fake", json={"prompts": "a", "stream": True}) as response:
        await response.read()
    async with http.get("/no/such%0aplace") as response:
        assert response.status == 404
    found = lines()
    assert [(line["status"], line["error"]) for line in found] == [
        (400, "invalid_request"), (404, "unknown_deployment"), (200, "worker_lost"), (404, "not_found"),
    ]  # fmt: skip
    assert found[2]["output_tokens"] == 1
    assert found[3]["path"] == "/no/such%0Aplace"
    assert all("\n" not in line["text"] for line in found)


async def test_client_that_leaves(
    address: tuple[str, int], broker: FakeClient, lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broker.answer = lambda generation: generation.push("one", "two")
    reader, writer = await asyncio.open_connection(*address)
    body = b'{"prompts": "a", "stream": true}'
    head = b"POST /mii/fake HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    assert await reader.readuntil(b"two")
    writer.close()
    async with asyncio.timeout(30):
        while not lines():
            await asyncio.sleep(0.01)
    (line,) = lines()
    assert (line["status"], line["disconnected"], line["output_tokens"]) == (499, True, 2)
    assert line["text"].endswith("the client left")
    assert "prompt_tokens" not in line


async def test_probes_are_quiet(http: aiohttp.ClientSession, lines: Any, caplog: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/healthz", "/metrics", "/health/live"):
        async with http.get(path) as response:
            await response.read()
    assert lines() == []
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    async with http.get("/health") as response:
        await response.read()
    assert [line["path"] for line in lines()] == ["/health"]


class TestSwitchedOff:
    @pytest.fixture
    async def app(self, broker: FakeClient) -> web.Application:
        return make_app(GatewayConfig(port=0, access_log=False), broker)

    async def test_no_line(self, http: aiohttp.ClientSession, lines: Any) -> None:
        await post(http, "/mii/fake", {"prompts": "a"})
        assert lines() == []


async def test_names_travel_to_the_broker(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"X-Request-ID": "mine", "traceparent": parent, "tracestate": "a=1"}
    await post(http, "/mii/fake", {"prompts": ["a", "b"]}, headers=headers)
    await post(http, "/tokenize", {"model": "fake", "prompt": "a"}, headers={"traceparent": "odd"})
    first, second, third = broker.sent
    assert first.name == second.name == "mine"
    assert first.trace is not None
    assert (first.trace.traceparent, first.trace.state) == (parent, "a=1")
    assert third.trace is None
    assert len(third.name) == 32
