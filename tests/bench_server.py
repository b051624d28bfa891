# SPDX-License-Identifier: Apache-2.0
"""A server with OpenAI's API for the serving benchmark: real sockets, answers that a test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from mii_zmq.bench_metrics import RequestRecord

Plan = Callable[[int], list[bytes] | web.Response]
"""By the number of the request, counted from 0: the pieces that are written, or an ordinary response. The piece BREAK
cuts the connection, WAIT never ends."""
BREAK = b"break"
WAIT = b"wait"
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content: str | None, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": content, "finish_reason": finish_reason}], usage=None)


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


def good(_: int) -> list[bytes]:
    return [text("a"), text("b"), text("", "length"), usage(7, 2), DONE]


@dataclass
class BenchServer:
    """What it was asked is in `bodies` and `headers`."""

    plan: Plan = good
    models: list[str] = field(default_factory=lambda: ["m"])
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    async def list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json())
        planned = self.plan(number)
        if isinstance(planned, web.Response):
            return planned
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            for piece in planned:
                if piece == WAIT:
                    await asyncio.Event().wait()
                if piece == BREAK:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await response.write(piece)
                # Others get their turn, as between the steps of an engine.
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1
        return response


@asynccontextmanager
async def serving(plan: Plan = good) -> AsyncIterator[BenchServer]:
    server = BenchServer(plan)
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def record(*gaps: float, ttft: float = 0.1, prompt_tokens: int = 512, **fields: Any) -> RequestRecord:
    """A completed request sent at 0: its first chunk after `ttft`, the others after `gaps`, one token each."""
    times = [ttft]
    for gap in gaps:
        times.append(times[-1] + gap)
    defaults = {"output_tokens": len(times), "sent_at": 0.0, "ended_at": times[-1], "chunk_times": tuple(times)}
    return RequestRecord(prompt_tokens=prompt_tokens, **{**defaults, **fields})
