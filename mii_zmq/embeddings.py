# SPDX-License-Identifier: Apache-2.0
"""Embeddings of many prompts as one call: each is a request of its own, so that they are batched, routed and retried
like any other.

Only so many are under way at the same time that a long list fills no queue. Knows neither HTTP nor numbers: vectors are
bytes (float32, little endian).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mii_zmq.errors import InvalidRequest, MiiError
from mii_zmq.generation import run_each
from mii_zmq.protocol import GenerateBody
from mii_zmq.sampling_params import check_text

if TYPE_CHECKING:
    from mii_zmq.client import AsyncClient
    from mii_zmq.generation import Completion, Generation
    from mii_zmq.trace_context import TraceContext

MAX_CONCURRENT_PROMPTS = 256
"""Of one call."""
MAX_PROMPTS = 2048
"""Of one HTTP request."""
MAX_VECTOR_BYTES = 32 * 2**20
"""Of one HTTP request; as JSON they are about five times as long."""

Embeddable = str | Sequence[int] | Sequence[str | Sequence[int]]
"""One text, the token ids of one, or several of either."""
Left = Callable[[], float | None]
"""Seconds until a deadline, None without one; raises DeadlineExceeded when it has passed."""


Rename = Callable[[int, MiiError], MiiError]


def no_deadline() -> None:
    return None


def as_it_is(index: int, error: MiiError) -> MiiError:
    return error


def values_of(vector: bytes) -> list[float]:
    """The numbers of a vector."""
    values = array("f")
    values.frombytes(vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def embedding_bodies(
    inputs: Embeddable,
    *,
    pooling: str | None = None,
    dimensions: int | None = None,
    normalize: bool = True,
) -> list[GenerateBody]:
    """The requests for one text, for one list of token ids, or for each of several.

    Raises:
        InvalidRequest: that is none of these; whether the options suit the model is for the workers to say.
    """
    is_one = isinstance(inputs, str) or (len(inputs) > 0 and isinstance(inputs[0], int))
    prompts: Sequence[Any] = [inputs] if is_one else inputs
    if not prompts:
        raise InvalidRequest("inputs must be a text, token ids, or a list of at least one of them", param="inputs")
    options: dict[str, Any] = {
        "task": "embed", "pooling": pooling, "dimensions": dimensions, "normalize": normalize
    }  # fmt: skip
    bodies = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            bodies.append(GenerateBody(prompt=check_text(prompt, "inputs"), **options))
        elif isinstance(prompt, Sequence) and all(type(item) is int for item in prompt):
            bodies.append(GenerateBody(prompt_token_ids=list(prompt), **options))
        else:
            raise InvalidRequest(
                f"inputs[{index}] must be a text or a list of token ids, got {type(prompt).__name__}", param="inputs"
            )
    return bodies


async def embed_all(
    client: AsyncClient,
    deployment: str,
    bodies: Sequence[GenerateBody],
    *,
    tenant: str = "",
    priority: int = 0,
    left_s: Left = no_deadline,
    name: str = "",
    trace: TraceContext | None = None,
    generations: list[Generation] | None = None,
    rename: Rename = as_it_is,
    max_bytes: int | None = None,
) -> list[Completion]:
    """The results in order, each with its `embedding`; the first failure, or a cancellation, ends all others.

    `rename`: puts the error of the body of that index into the caller's words. `max_bytes`: of all vectors together.
    `generations` gets each request when it is sent.

    Raises:
        MiiError: with which any of them ended.
        InvalidRequest: together the vectors are too long.
    """
    num_bytes = 0

    async def embed(index: int, body: GenerateBody) -> Completion:
        nonlocal num_bytes
        generation = client.generate(
            deployment,
            body,
            stream=False,
            tenant=tenant,
            priority=priority,
            deadline_s=left_s(),
            name=name,
            trace=trace,
        )
        if generations is not None:
            generations.append(generation)
        try:
            result = await generation.result()
        except MiiError as error:
            raise rename(index, error) from None
        finally:
            generation.cancel()
        num_bytes += len(result.embedding)
        if max_bytes is not None and num_bytes > max_bytes:
            raise InvalidRequest(f"together the embeddings exceed {max_bytes} bytes; send fewer at a time")
        return result

    return await run_each(embed, bodies, at_once=MAX_CONCURRENT_PROMPTS)
