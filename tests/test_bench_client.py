# SPDX-License-Identifier: Apache-2.0
"""The benchmark's client against a real server that misbehaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from aiohttp import web

from mii_zmq.bench_client import BenchClient, ServerOptions, api_base
from mii_zmq.bench_datasets import BenchPrompt
from mii_zmq.bench_metrics import RequestRecord
from mii_zmq.errors import ConfigError, ServiceError
from tests.bench_server import BREAK, DONE, WAIT, BenchServer, Plan, delta, good, serving, text, usage

PROMPT = BenchPrompt([40, 41, 42], 3, 8)


async def ask(plan: Plan, prompt: BenchPrompt = PROMPT, **options: object) -> tuple[RequestRecord, BenchServer]:
    async with serving(plan) as server:
        defaults = ServerOptions(server.url, timeout_s=60.0)
        async with BenchClient(replace(defaults, **options), "m") as client:  # type: ignore[arg-type]
            return await client.send(prompt, 0.25), server


async def test_a_completion_of_token_ids() -> None:
    record, server = await ask(good, ignore_eos=True, temperature=0.0, extra_body={"top_k": 5, "max_tokens": 9})
    assert record.failure is None
    assert (record.prompt_tokens, record.output_tokens, record.has_usage, record.queued_s) == (7, 2, True, 0.25)
    assert len(record.chunk_times) == 2
    assert record.sent_at <= record.chunk_times[0] <= record.chunk_times[1] <= record.ended_at
    assert server.bodies == [
        {
            "model": "m", "prompt": [40, 41, 42], "max_tokens": 9, "temperature": 0.0, "ignore_eos": True, "top_k": 5,
            "stream": True, "stream_options": {"include_usage": True},
        }
    ]  # fmt: skip
    assert "Authorization" not in server.headers[0]


async def test_a_chat_with_a_key() -> None:
    def plan(_: int) -> list[bytes]:
        return [delta(role="assistant", content=""), delta(content="a"), usage(7, 1), DONE]

    prompt = BenchPrompt("time year", 2, 8)
    record, server = await ask(plan, prompt, endpoint="chat", api_key="secret", extra_body={"user": "u"})
    assert record.failure is None
    assert (len(record.chunk_times), record.tpot_s) == (1, None)
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "time year"}]
    assert server.bodies[0]["max_completion_tokens"] == 8
    assert "secret" not in repr(ServerOptions("http://x", api_key="secret"))


async def test_events_cut_anywhere() -> None:
    stream = b"".join(good(0))

    def plan(_: int) -> list[bytes]:
        return [stream[index : index + 7] for index in range(0, len(stream), 7)]

    record, _ = await ask(plan)
    assert record.failure is None
    assert (len(record.chunk_times), record.output_tokens) == (2, 2)


async def test_without_usage_chunks_are_counted() -> None:
    record, _ = await ask(lambda _: [text("a"), text("b"), text("c"), text("", "stop"), DONE])
    assert record.failure is None
    assert (record.prompt_tokens, record.output_tokens, record.has_usage) == (3, 3, False)


def refusal(status: int) -> web.Response:
    return web.json_response({"error": {"message": "later", "code": "overloaded"}}, status=status)


@pytest.mark.parametrize(
    ("plan", "kind", "message"),
    [
        (lambda _: refusal(429), "HTTP 429", "later"),
        (lambda _: refusal(503), "HTTP 503", "later"),
        (lambda _: web.Response(status=502), "HTTP 502", "Bad Gateway"),
        (lambda _: web.Response(status=307, headers={"Location": "/v1/completions"}), "HTTP 307", ""),
        (lambda _: [text("a"), BREAK], "broken connection", ""),
        (lambda _: [BREAK], "broken connection", ""),
        (lambda _: [text("a")], "truncated stream", "DONE"),
        (lambda _: [b"data: {\n\n", WAIT], "malformed event", ""),
    ],
)
async def test_a_failure_is_a_record(plan: Plan, kind: str, message: str) -> None:
    record, server = await ask(plan)
    assert record.failure is not None
    assert record.failure.kind == kind
    assert message in record.failure.message
    assert len(server.bodies) == 1
    assert record.ended_at >= record.sent_at


async def test_a_request_that_never_ends_times_out() -> None:
    record, _ = await ask(lambda _: [text("a"), WAIT], timeout_s=0.1)
    assert record.failure is not None
    assert (record.failure.kind, record.failure.message) == ("timeout", "not finished within 0.1 s")


async def test_nobody_listens() -> None:
    # Nothing can listen on port 1 here, and no connection can have it.
    async with BenchClient(ServerOptions("http://127.0.0.1:1"), "m") as client:
        record = await client.send(PROMPT)
        assert record.failure is not None
        assert record.failure.kind == "no connection"
        with pytest.raises(ServiceError, match=r"no model is served at http://127.0.0.1:1/v1 .*127.0.0.1"):
            await client.find_model(0.0)


async def test_connections_are_kept_and_the_model_is_found() -> None:
    async with serving() as server, BenchClient(ServerOptions(server.url + "/v1/")) as client:
        assert await client.find_model(0.0) == "m"
        for _ in range(3):
            assert (await client.send(PROMPT)).failure is None
        server.models.clear()
        with pytest.raises(ServiceError, match="lists none"):
            await client.find_model(0.0)


def test_addresses() -> None:
    assert {api_base(url) for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/")} == {
        "http://h:1/v1"
    }
    for url in ("h:1", "ftp://h", "http://", "nonsense"):
        with pytest.raises(ConfigError, match="no HTTP address"):
            api_base(url)
