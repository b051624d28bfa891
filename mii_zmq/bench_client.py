# SPDX-License-Identifier: Apache-2.0
"""Sends the requests of a serving benchmark to an OpenAI-compatible server and times their streamed answers.

`send` always returns a record: whatever goes wrong with a request is a failure of a kind in there, nothing is retried
and nothing is raised. Times are taken when bytes arrive, before they are understood.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from mii_zmq.bench_datasets import BenchPrompt
from mii_zmq.bench_metrics import Failure, RequestRecord
from mii_zmq.bench_stream import StreamReader, error_text
from mii_zmq.errors import ConfigError, ServiceError

KEEP_ALIVE_S = 10.0
"""Idle connections are closed before a server does so: a request that meets a closing connection would be a failure of
the benchmark's."""
POLL_S = 0.25

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where requests go and what all of them have in common."""

    url: str
    endpoint: Endpoint = "completions"
    api_key: str | None = field(default=None, repr=False)
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Fields of the request's body, above all others."""
    timeout_s: float = 600.0
    """For one request, from sending it to its end."""


def api_base(url: str) -> str:
    """The address below which OpenAI's paths are, as in 'http://HOST:PORT/v1'.

    Raises:
        ConfigError: no HTTP address.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--url {url!r} is no HTTP address; use one like http://127.0.0.1:28080")
    return url.rstrip("/").removesuffix("/v1") + "/v1"


class BenchClient:
    """An asynchronous context manager. As many connections as there are requests at a time, kept alive between them."""

    def __init__(self, options: ServerOptions, model: str | None = None) -> None:
        self.model = model
        self._options = options
        self._base = api_base(options.url)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def find_model(self, patience_s: float) -> str:
        """The first model that the server lists, once it lists one; also set as `model`.

        Raises:
            ServiceError: it lists none within `patience_s` seconds; says why the last attempt failed.
        """
        deadline = time.monotonic() + patience_s
        is_told = False
        while True:
            try:
                async with asyncio.timeout(max(1.0, deadline - time.monotonic())):
                    self.model = await self._first_model()
                return self.model
            except ServiceError as error:
                reason = str(error)
            except TimeoutError:
                reason = "no answer in time"
            except (aiohttp.ClientError, OSError) as error:
                reason = str(error) or type(error).__name__
            if time.monotonic() + POLL_S >= deadline:
                raise ServiceError(f"no model is served at {self._base} ({reason}); start a server or name its --url")
            if not is_told:
                is_told = True
                print(f"waiting up to {patience_s:g} s for {self._base} ({reason})", file=sys.stderr, flush=True)
            await asyncio.sleep(POLL_S)

    async def _first_model(self) -> str:
        async with self._session.get(f"{self._base}/models", allow_redirects=False) as response:
            body = await response.read()
        if response.status != 200:
            raise ServiceError(f"/models answers {response.status}: {error_text(body)}")
        try:
            return str(msgspec.json.decode(body)["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError):
            raise ServiceError("/models lists none") from None

    async def send(self, prompt: BenchPrompt, queued_s: float = 0.0) -> RequestRecord:
        """One request from its first to its last byte."""
        body = self._body(prompt)
        reader = StreamReader()
        sent_at = time.perf_counter()
        failure: Failure | None = None
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._exchange(body, reader)
        except TimeoutError:
            failure = Failure("timeout", f"not finished within {self._options.timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            kind = "no connection" if isinstance(error, aiohttp.ClientConnectorError) else "broken connection"
            failure = Failure(kind, str(error) or type(error).__name__)
        failure = reader.failure or failure
        ended_at = reader.last_choice_at if failure is None else None
        usage = reader.usage
        prompt_tokens = usage.prompt_tokens if usage else None
        output_tokens = usage.completion_tokens if usage else None
        return RequestRecord(
            prompt_tokens=prompt.num_tokens if prompt_tokens is None else prompt_tokens,
            output_tokens=len(reader.chunk_times) if output_tokens is None else output_tokens,
            sent_at=sent_at,
            ended_at=time.perf_counter() if ended_at is None else ended_at,
            chunk_times=tuple(reader.chunk_times),
            queued_s=queued_s,
            has_usage=output_tokens is not None,
            failure=failure,
        )

    async def _exchange(self, body: bytes, reader: StreamReader) -> None:
        """Leaves the answer, or why there is none, in `reader`."""
        path = PATHS[self._options.endpoint]
        async with self._session.post(self._base + path, data=body, allow_redirects=False) as response:
            if response.status != 200:
                text = error_text(await response.read())
                reader.failure = Failure(f"HTTP {response.status}", text or str(response.reason))
                return
            async for data in response.content.iter_any():
                reader.feed(data, time.perf_counter())
                if reader.failure is not None:
                    return
            reader.close(time.perf_counter())

    def _body(self, prompt: BenchPrompt) -> bytes:
        options = self._options
        fields: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if options.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt.content}]
            fields["max_completion_tokens"] = prompt.output_tokens
        else:
            fields["prompt"] = prompt.content
            fields["max_tokens"] = prompt.output_tokens
        if options.temperature is not None:
            fields["temperature"] = options.temperature
        if options.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode({**fields, **options.extra_body})
