# SPDX-License-Identifier: Apache-2.0
"""The generations behind one HTTP request: one per prompt and choice, sent together, ended together.

Whatever ends the HTTP request (an answer, an error of one generation, a vanished client) cancels what still runs.
Knows no door and no JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mii_zmq.config import check_deployment_name
from mii_zmq.errors import ConfigError, InternalError, InvalidRequest, MiiError, UnknownDeployment
from mii_zmq.gateway.metrics import Metrics, StreamClock
from mii_zmq.gateway.terms import Terms

if TYPE_CHECKING:
    from mii_zmq.client import AsyncClient, Completion, Generation
    from mii_zmq.protocol import GenerateBody, TokenDelta

MAX_GENERATIONS = 1024
"""Prompts times choices of one HTTP request."""
MAX_LOGPROB_BYTES = 4 * 2**20
"""Records of one HTTP request; as JSON they are about ten times as long."""
SMALL_LOGPROB_BYTES = 2**15


def check_count(num_prompts: int, num_choices: int, param: str) -> None:
    """Refuse a request that would become too many generations, before any of them is built."""
    if num_prompts * num_choices > MAX_GENERATIONS:
        raise InvalidRequest(
            f"{param} holds {num_prompts} prompts of {num_choices} choices each; the limit is {MAX_GENERATIONS} "
            "choices in all",
            param=param,
        )


def check_model(deployment: str) -> None:
    """Raises UnknownDeployment for a name that cannot be one."""
    try:
        check_deployment_name(deployment)
    except ConfigError as error:
        raise UnknownDeployment(error.message, param="model") from None


@contextlib.contextmanager
def submitted(
    client: AsyncClient, deployment: str, bodies: Sequence[GenerateBody], terms: Terms, *, stream: bool
) -> Iterator[list[Generation]]:
    """Send all bodies; cancels what is unfinished when the block is left.

    Raises:
        UnknownDeployment: the name cannot be one.
        DeadlineExceeded: there is no time left.
    """
    check_model(deployment)
    generations: list[Generation] = []
    record = terms.record
    if record is not None:
        record.model, record.stream, record.generations = deployment, stream, generations
        record.params = bodies[0].params if bodies else {}
    try:
        for body in bodies:
            generation = client.generate(
                deployment,
                body,
                stream=stream,
                tenant=terms.tenant,
                priority=terms.priority,
                deadline_s=terms.left_s(),
                name="" if record is None else record.request_id,
                trace=None if record is None else record.trace,
            )
            generations.append(generation)
        yield generations
    finally:
        for generation in generations:
            generation.cancel()


class LogprobBudget:
    """What the log-probabilities of one HTTP request may come to, over all its prompts and choices."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def spend(self, num_bytes: int) -> None:
        """Raises InvalidRequest when that is too much."""
        self.num_bytes += num_bytes
        if self.num_bytes > MAX_LOGPROB_BYTES:
            raise InvalidRequest(
                f"the log-probabilities of this request exceed {MAX_LOGPROB_BYTES} bytes; send fewer or shorter "
                "prompts, fewer choices, or ask for fewer tokens beside each",
                param="logprobs",
            )


async def collect(
    generations: Sequence[Generation], metrics: Metrics, deployment: str, clock: StreamClock
) -> list[Completion]:
    """All results in order; the first error of any of them is raised."""
    clock.deployment = deployment
    budget = LogprobBudget()
    results = await asyncio.gather(*(_result(generation, budget) for generation in generations))
    for result in results:
        metrics.count_tokens(deployment, result.prompt_length, result.num_cached_tokens, result.generated_length)
    clock.on_end()
    return results


async def build(make: Callable[[], bytes], results: Sequence[Completion]) -> bytes:
    """An answer's body; where it is long work, in a thread, so that others' streams go on."""
    if sum(len(result.logprobs) for result in results) < SMALL_LOGPROB_BYTES:
        return make()
    return await asyncio.to_thread(make)


async def batches(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Sequence[TokenDelta]], None]:
    """What arrives, as (index, deltas); an empty list says that generation `index` has ended.

    Close it (`contextlib.aclosing`) when leaving early.
    """
    if len(generations) == 1:
        async for deltas in generations[0]:
            yield 0, deltas
        yield 0, ()
        return
    # As many places as generations: while the reader is slow, new deltas gather inside their generation.
    queue: asyncio.Queue[tuple[int, Sequence[TokenDelta] | MiiError]] = asyncio.Queue(len(generations))
    pumps = [asyncio.create_task(_pump(index, generation, queue)) for index, generation in enumerate(generations)]
    try:
        num_running = len(pumps)
        while num_running:
            index, item = await queue.get()
            if isinstance(item, MiiError):
                raise item
            if not item:
                num_running -= 1
            yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _result(generation: Generation, budget: LogprobBudget) -> Completion:
    result = await generation.result()
    budget.spend(len(result.logprobs))
    return result


async def _pump(
    index: int, generation: Generation, queue: asyncio.Queue[tuple[int, Sequence[TokenDelta] | MiiError]]
) -> None:
    try:
        async for deltas in generation:
            await queue.put((index, deltas))
        await queue.put((index, ()))
    except MiiError as error:
        await queue.put((index, error))
    except Exception as error:  # noqa: BLE001 - must reach the reader of the queue, which would wait for ever
        await queue.put((index, InternalError(f"{type(error).__name__}: {error}")))
