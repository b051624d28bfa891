# SPDX-License-Identifier: Apache-2.0
"""Clients of a deployment that runs on this host.

`MIIClient` may be used from many threads at once and inside a running event loop; `AsyncMIIClient` belongs to one
loop. Options are checked here already, so that a wrong one fails before anything is sent.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from mii_zmq.client import AsyncClient, BackgroundLoop, Generation, fan_out
from mii_zmq.embeddings import Embeddable, embed_all, embedding_bodies, values_of
from mii_zmq.errors import InvalidRequest, ServiceError
from mii_zmq.generation import run_each
from mii_zmq.protocol import GenerateBody
from mii_zmq.registry import DeploymentRecord, end_deployment
from mii_zmq.response import Response, ResponseReader
from mii_zmq.sampling_params import SamplingParams, check_text

MAX_CONCURRENT_PROMPTS = 1024
"""Of one `generate` call; the others wait here, so that a long list meets no full queue."""
END_TIMEOUT_S = 60.0

T = TypeVar("T")
Chat = list[dict[str, Any]]
StreamingFn = Callable[[list["Response"]], Any]


class MIIClient:
    """A synchronous client of one deployment, usable from any thread and inside a running event loop."""

    def __init__(self, record: DeploymentRecord) -> None:
        self._record = record
        self._loop = BackgroundLoop()
        self._client = AsyncClient(record.client_endpoints, name="python")
        self._closing = threading.Lock()
        self._is_closed = False
        try:
            self._run(self._client.connect())
        except BaseException:
            self.close()
            raise

    @property
    def deployment(self) -> str:
        return self._record.deployment

    @overload
    def generate(
        self, prompts: str | Sequence[str], streaming_fn: None = None, **generate_kwargs: Any
    ) -> list[Response]: ...

    @overload
    def generate(self, prompts: str | Sequence[str], streaming_fn: StreamingFn, **generate_kwargs: Any) -> None: ...

    def generate(
        self, prompts: str | Sequence[str], streaming_fn: StreamingFn | None = None, **generate_kwargs: Any
    ) -> list[Response] | None:
        """Generate for each prompt, each as a request of its own; see `Pipeline.__call__` for order and streaming.

        With `streaming_fn` the answer goes there, piece by piece, and None is returned, as in the original.
        """
        texts, params = checked_prompts(prompts, generate_kwargs)
        if streaming_fn is not None:
            check_streaming_fn(streaming_fn)
            check_streamable(texts, params)
            for response in self.stream(texts[0], **generate_kwargs):
                streaming_fn([response])
            return None
        return self._run(_generate_all(self._client, self._record.deployment, texts, params))

    __call__ = generate

    def stream(self, prompt: str | Chat, **generate_kwargs: Any) -> Iterator[Response]:
        """The parts of one answer as they arrive; see `Pipeline.stream`."""
        body, reader = _stream_body(prompt, generate_kwargs)
        generation = self._run(_start(self._client, self._record.deployment, body, stream=True))
        try:
            while (responses := self._run(_next_responses(generation, reader))) is not None:
                yield from responses
            yield _final_response(generation, reader)
        finally:
            self._run(_cancel(generation))

    def embed(
        self,
        inputs: Embeddable,
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[list[float]]:
        """The embeddings of one text (or list of token ids), or of each of several, in order.

        Args:
            pooling: which of the model's final hidden states: "last", "first", or the "mean" of all; None: as the
                deployment is set.
            dimensions: so many of the first numbers; None: all.
            normalize: scale each vector to length 1, after cutting it.

        Raises:
            RequestError: what is wrong with an option or a text.
        """
        bodies = embedding_bodies(inputs, pooling=pooling, dimensions=dimensions, normalize=normalize)
        return self._run(_embed(self._client, self._record.deployment, bodies))

    def status(self) -> dict[str, Any]:
        """What runs where, and what the broker reports of its worker groups."""
        return {**describe(self._record), "broker": self._run(self._client.status())}

    def terminate_server(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """End the deployment with all its processes and wait until they are gone.

        Running requests of other clients get up to `timeout_s` to finish, this one's are cancelled. Works from any
        process of this host and user; harmless when the deployment has ended already.
        """
        self.close()
        end_deployment(self._record, timeout_s)

    def close(self) -> None:
        """Disconnect; the deployment goes on."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._loop.run(self._client.close())
                self._loop.close()

    def __enter__(self) -> MIIClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            coroutine.close()
            raise ServiceError("this client was closed; make a new one with client()")
        return self._loop.run(coroutine)


class AsyncMIIClient:
    """An asynchronous client of one deployment. Belongs to the event loop in which it is first used."""

    def __init__(self, record: DeploymentRecord) -> None:
        self._record = record
        self._client = AsyncClient(record.client_endpoints, name="python-async")

    @property
    def deployment(self) -> str:
        return self._record.deployment

    async def generate(self, prompts: str | Sequence[str], **generate_kwargs: Any) -> list[Response]:
        """As `MIIClient.generate`. Cancelling the task cancels the requests."""
        texts, params = checked_prompts(prompts, generate_kwargs)
        await self._client.connect()
        return await _generate_all(self._client, self._record.deployment, texts, params)

    async def stream(self, prompt: str | Chat, **generate_kwargs: Any) -> AsyncIterator[Response]:
        """The parts of one answer as they arrive; leaving the iterator early cancels the request."""
        body, reader = _stream_body(prompt, generate_kwargs)
        await self._client.connect()
        generation = await _start(self._client, self._record.deployment, body, stream=True)
        try:
            while (responses := await _next_responses(generation, reader)) is not None:
                for response in responses:
                    yield response
            yield _final_response(generation, reader)
        finally:
            generation.cancel()

    async def embed(
        self,
        inputs: Embeddable,
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
    ) -> list[list[float]]:
        """As `MIIClient.embed`. Cancelling the task cancels the requests."""
        bodies = embedding_bodies(inputs, pooling=pooling, dimensions=dimensions, normalize=normalize)
        await self._client.connect()
        return await _embed(self._client, self._record.deployment, bodies)

    async def status(self) -> dict[str, Any]:
        """As `MIIClient.status`. Waits for a broker that does not answer yet, or any more, as every call here does: the
        first one connects, and a broker that is restarted is back in a second."""
        await self._client.connect()
        return {**describe(self._record), "broker": await self._client.status()}

    async def terminate_server(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """As `MIIClient.terminate_server`."""
        await self.close()
        await asyncio.to_thread(end_deployment, self._record, timeout_s)

    async def close(self) -> None:
        await self._client.close()

    async def __aenter__(self) -> AsyncMIIClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def checked_prompts(prompts: Any, options: Mapping[str, Any]) -> tuple[list[str], SamplingParams]:
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, list | tuple) or not texts:
        raise InvalidRequest("prompts must be a string or a list of at least one string", param="prompts")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidRequest(f"prompts[{index}] must be a string, got {type(text).__name__}", param="prompts")
        check_text(text, "prompts")
    return list(texts), SamplingParams.from_mapping(options)


def check_streamable(prompts: Sequence[Any], params: SamplingParams) -> None:
    if len(prompts) != 1 or params.n != 1:
        raise InvalidRequest("streaming takes one prompt and n = 1; start one stream for each", param="prompts")


def check_streaming_fn(streaming_fn: Any) -> None:
    if not callable(streaming_fn):
        raise InvalidRequest(
            f"streaming_fn must be callable with a list of one Response, got {type(streaming_fn).__name__}",
            param="streaming_fn",
        )


def _stream_body(prompt: str | Chat, options: Mapping[str, Any]) -> tuple[GenerateBody, ResponseReader]:
    params = SamplingParams.from_mapping(options)
    check_streamable([prompt], params)
    reader = ResponseReader(params)
    if isinstance(prompt, str):
        return GenerateBody(prompt=check_text(prompt, "prompt"), params=params.to_mapping()), reader
    try:
        check_text(json.dumps(prompt, ensure_ascii=False), "messages")
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"messages must be plain JSON values: {error}", param="messages") from None
    return GenerateBody(messages=prompt, params=params.to_mapping()), reader


async def _generate_all(
    client: AsyncClient, deployment: str, texts: Sequence[str], params: SamplingParams
) -> list[Response]:
    """All requests of one call, in order; the first failure cancels the others."""

    async def generate_one(_: int, body: GenerateBody) -> Response:
        generation = client.generate(deployment, body, stream=False)
        try:
            done = await generation.result()
        finally:
            generation.cancel()
        reader = ResponseReader(params)
        reader.add(done.logprobs)
        return reader.response(done.text, done.prompt_length, done.generated_length, done.finish_reason)

    bodies = [GenerateBody(prompt=text, params=choice) for text in texts for choice in fan_out(params)]
    return await run_each(generate_one, bodies, at_once=MAX_CONCURRENT_PROMPTS)


async def _embed(client: AsyncClient, deployment: str, bodies: Sequence[GenerateBody]) -> list[list[float]]:
    return [values_of(result.embedding) for result in await embed_all(client, deployment, bodies)]


async def _start(client: AsyncClient, deployment: str, body: GenerateBody, *, stream: bool) -> Generation:
    return client.generate(deployment, body, stream=stream)


async def _cancel(generation: Generation) -> None:
    generation.cancel()


async def _next_responses(generation: Generation, reader: ResponseReader) -> list[Response] | None:
    """What has arrived since the last call, one Response per piece of text; None at the end."""
    try:
        deltas = await anext(generation)
    except StopAsyncIteration:
        return None
    responses = []
    for delta in deltas:
        reader.add(delta.logprobs)
        if delta.text:
            num_tokens = delta.token_offset + len(delta.token_ids) // 4
            responses.append(reader.response(delta.text.decode(), 0, num_tokens))
    return responses


def _final_response(generation: Generation, reader: ResponseReader) -> Response:
    final = generation.final
    assert final is not None
    return reader.response("", final.prompt_length, final.generated_length, final.finish_reason)


def describe(record: DeploymentRecord) -> dict[str, Any]:
    """What the registry knows of a deployment, for people and programs."""
    return {
        "deployment": record.deployment,
        "model": record.model,
        "replicas": record.replicas,
        "rest_url": record.rest_url,
        "client_endpoints": record.client_endpoints,
        "worker_endpoints": record.worker_endpoints,
        "log_path": record.log_path,
        "processes": {"supervisor": record.pid, **record.processes},
    }
