# SPDX-License-Identifier: Apache-2.0
"""A steady mixed load whose every answer is known in advance: streams over HTTP, whole answers over HTTP, streams and
whole answers over ZeroMQ; some of them cancelled half-way if wanted. All that the clients see goes into a History.

HTTP clients try another gateway when a connection cannot be made, and never send a request again that may have
arrived. ZeroMQ clients are the library's, which resend by themselves. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from mii_zmq.client import AsyncClient
from mii_zmq.errors import MiiError
from mii_zmq.protocol import GenerateBody
from tests.faults.harness.expectation import Expectation, expect
from tests.faults.harness.history import History

WORDS = ("a", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "wizards", "vex", "grumpy", "kings")
STATUS_CODES = {
    404: "unknown_deployment", 429: "overloaded", 499: "cancelled", 500: "internal", 502: "worker_lost",
    503: "unavailable", 504: "deadline_exceeded",
}  # fmt: skip
"""What the door of MII, whose errors carry no code outside of streams, means by its status."""
RECONNECT_S = 0.05
CONNECT_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its one right answer."""

    prompt: str
    params: dict[str, Any]
    expected: Expectation | None


def make_case(rng: random.Random, max_tokens: int) -> Case:
    """Short answers are more frequent than long ones; some share a prefix, some stop at a string."""
    words = rng.choices(WORDS, k=rng.randint(2, 30))
    prefix = rng.choice(["", "", "once upon a time there was " * 8])
    prompt = f"{prefix}{' '.join(words)} {rng.getrandbits(48):x}"
    num_tokens = max(1, int(max_tokens * rng.random() ** 2))
    params: dict[str, Any] = {"max_new_tokens": num_tokens, "do_sample": False, "ignore_eos": True}
    if rng.random() < 0.15:
        whole = expect(prompt, **params).text
        at = rng.randrange(len(whole))
        del params["ignore_eos"]
        params["stop"] = [whole[at : at + 3]]
    elif rng.random() < 0.2:
        params |= {"do_sample": True, "temperature": 0.7, "seed": rng.getrandbits(32)}
    return Case(prompt, params, expect(prompt, **params))


@dataclass(slots=True)
class Load:
    """Clients in a closed loop: each sends its next request when the last one has ended."""

    history: History
    deployment: str
    urls: Sequence[str]
    endpoints: Sequence[str]
    seed: int
    max_tokens: int = 200
    cancel_share: float = 0.0
    """Of the streams, left after some tokens."""
    case: Callable[[random.Random, int], Case] = make_case
    think_s: float = 0.0
    num_reconnects: int = 0
    num_cancelled: int = 0
    is_stopping: bool = False
    _numbers: Any = field(default_factory=itertools.count)

    async def run(self, clients: dict[str, int]) -> None:
        """Until `is_stopping`; `clients` says how many of each kind (a method's name) there are."""
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        zmq_clients = [AsyncClient(self.endpoints, name=f"load {i}") for i in range(2)]
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            try:
                for client in zmq_clients:
                    await client.connect(30)
                await asyncio.gather(
                    *(
                        self._loop(kind, random.Random(f"{self.seed} {kind} {i}"), session, zmq_clients[i % 2])
                        for kind, count in clients.items()
                        for i in range(count)
                    )
                )
            finally:
                for client in zmq_clients:
                    await client.close()

    async def _loop(self, kind: str, rng: random.Random, session: aiohttp.ClientSession, client: AsyncClient) -> None:
        while not self.is_stopping:
            case = self.case(rng, self.max_tokens)
            key = f"{kind}-{next(self._numbers)}"
            self.history.invoke(key, case.expected, kind, (case.prompt, case.params.get("max_new_tokens")))
            leave_after = rng.randint(0, 20) if rng.random() < self.cancel_share else None
            if kind == "http_stream":
                await self.http_stream(session, key, case, leave_after, rng)
            elif kind == "http_whole":
                await self.http_whole(session, key, case, rng)
            elif kind == "zmq_stream":
                await self.zmq_stream(client, key, case, leave_after)
            else:
                await self.zmq_whole(client, key, case)
            if self.think_s:
                await asyncio.sleep(rng.expovariate(1 / self.think_s))

    async def http_stream(
        self, session: aiohttp.ClientSession, key: str, case: Case, leave_after: int | None, rng: random.Random
    ) -> None:
        body = {"prompts": case.prompt, "stream": True, **case.params}
        try:
            async with self._post(session, body, rng) as response:
                if response.status != 200:
                    self._http_error(key, response.status, await response.text())
                    return
                num_read = 0
                async for line in response.content:
                    if leave_after is not None and num_read > leave_after:
                        self._cancelled(key)
                        return
                    num_read += self._event(key, line)
        except (aiohttp.ClientError, OSError) as error:
            self.history.broken(key, _cause(error))
            return
        if not self.history.has_ended(key):
            self.history.broken(key, "the stream ended without its last event")

    def _event(self, key: str, line: bytes) -> int:
        """Log one line of a stream; returns the number of texts in it."""
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            return 0
        event = json.loads(line[6:])
        if "message" in event:
            self.history.fail(key, event["code"], event["message"])
        elif event["finish_reason"] != "none":
            self.history.complete(key, event["finish_reason"], num_tokens=event["generated_length"])
        else:
            self.history.delta(key, event["generated_text"])
            return 1
        return 0

    async def http_whole(self, session: aiohttp.ClientSession, key: str, case: Case, rng: random.Random) -> None:
        body = {"prompts": case.prompt, **case.params}
        try:
            async with self._post(session, body, rng) as response:
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            self.history.broken(key, _cause(error))
            return
        if response.status != 200:
            self._http_error(key, response.status, data.decode())
            return
        (entry,) = json.loads(data)
        self.history.complete(
            key, entry["finish_reason"], text=entry["generated_text"], num_tokens=entry["generated_length"]
        )

    async def zmq_stream(self, client: AsyncClient, key: str, case: Case, leave_after: int | None) -> None:
        try:
            body = GenerateBody(prompt=case.prompt, params=case.params)
            generation = client.generate(self.deployment, body, stream=True)
            num_read = 0
            async for deltas in generation:
                for delta in deltas:
                    ids = memoryview(delta.token_ids).cast("i").tolist()
                    self.history.delta(key, delta.text.decode(), offset=delta.token_offset, token_ids=ids)
                    num_read += len(ids)
                if leave_after is not None and num_read > leave_after:
                    generation.cancel()
                    self._cancelled(key)
                    return
            final = generation.final
            assert final is not None
            self.history.complete(key, final.finish_reason, num_tokens=final.generated_length)
        except MiiError as error:
            self.history.fail(key, error.code, error.message)

    async def zmq_whole(self, client: AsyncClient, key: str, case: Case) -> None:
        try:
            body = GenerateBody(prompt=case.prompt, params=case.params)
            result = await client.generate(self.deployment, body, stream=False).result()
        except MiiError as error:
            self.history.fail(key, error.code, error.message)
            return
        self.history.complete(
            key, result.finish_reason, text=result.text, token_ids=result.token_ids, num_tokens=result.generated_length
        )

    @contextlib.asynccontextmanager
    async def _post(
        self, session: aiohttp.ClientSession, body: dict[str, Any], rng: random.Random
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """To any gateway, and to the next one while no connection can be made."""
        first = rng.randrange(len(self.urls))
        deadline = asyncio.get_running_loop().time() + CONNECT_PATIENCE_S
        for attempt in itertools.count():
            url = self.urls[(first + attempt) % len(self.urls)]
            try:
                response = await session.post(f"{url}/mii/{self.deployment}", json=body)
            except aiohttp.ClientConnectorError:
                self.num_reconnects += 1
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(RECONNECT_S)
                continue
            async with response:
                yield response
            return

    def _cancelled(self, key: str) -> None:
        self.num_cancelled += 1
        self.history.fail(key, "cancelled by the client")

    def _http_error(self, key: str, status: int, body: str) -> None:
        self.history.fail(key, STATUS_CODES.get(status, str(status)), body[:200])


def _cause(error: BaseException) -> str:
    return type(error).__name__
