# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: turns the deltas of one or several generations into a stream of events, one per delta.

The first byte leaves with the first delta, so an error before it is an ordinary HTTP error. Afterwards an error is an
event and the stream ends there, without what marks a good end at its door. Deltas that arrived together leave in one
write. A reader that takes nothing is cut (`delivery`). Knows no door: what an event looks like is its `EventFormat`'s
business.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
from aiohttp import web

from mii_zmq.errors import InternalError, MiiError
from mii_zmq.gateway.delivery import Delivery
from mii_zmq.gateway.generations import LogprobBudget, batches
from mii_zmq.gateway.metrics import StreamClock
from mii_zmq.gateway.state import GATEWAY

if TYPE_CHECKING:
    from mii_zmq.client import Generation
    from mii_zmq.protocol import FinalBody

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

log = logging.getLogger(__name__)
encode = msgspec.json.Encoder().encode


class EventFormat(Protocol):
    """One door's events, each complete with `data: ` and the empty line."""

    def first(self, index: int, prompt_length: int) -> bytes:
        """Before the first text of choice `index`; may be empty. `prompt_length` is 0 where it is not known yet."""

    def count(self, index: int, num_tokens: int) -> None:
        """So many tokens of choice `index` have arrived; their text, if any, is written next."""

    def delta(self, index: int, text: bytes, logprobs: bytes = b"") -> bytes:
        """`text` is a JSON string, quotes included; `logprobs` are the delta's records (mii_zmq.logprobs), if any."""

    def last(self, index: int, final: FinalBody) -> bytes:
        """Choice `index` has ended."""

    def end(self, finals: Sequence[FinalBody]) -> bytes:
        """All choices have ended; the last bytes of the stream."""

    def error(self, error: MiiError) -> bytes:
        """The stream ends here."""


async def respond(
    request: web.Request,
    deployment: str,
    generations: Sequence[Generation],
    events: EventFormat,
    clock: StreamClock,
    headers: dict[str, str] | None = None,
) -> web.StreamResponse:
    """Stream the generations to the client.

    Raises:
        MiiError: a generation failed before the first byte.
        ConnectionError: the client is gone.
    """
    gateway = request.app[GATEWAY]
    clock.deployment = deployment
    stream = Delivery(request, web.StreamResponse(headers={**HEADERS, **(headers or {})}))
    try:
        with gateway.abortable():
            finals = await _send_deltas(stream, generations, events, clock)
            for final in finals:
                gateway.metrics.count_tokens(
                    deployment, final.prompt_length, final.num_cached_tokens, final.generated_length
                )
            clock.on_end()
            await stream.send(events.end(finals))
            return await stream.finish()
    except MiiError as error:
        return await _fail(stream, events, clock, error)
    except ConnectionError:
        raise
    except Exception:
        log.exception("a stream failed")
        return await _fail(stream, events, clock, InternalError("internal error; the gateway's log has the details"))


async def _send_deltas(
    stream: Delivery, generations: Sequence[Generation], events: EventFormat, clock: StreamClock
) -> list[FinalBody]:
    has_begun = [False] * len(generations)
    budget = LogprobBudget()
    async with contextlib.aclosing(batches(generations)) as arrivals:
        async for index, deltas in arrivals:
            parts = []
            if not has_begun[index]:
                has_begun[index] = True
                begin = deltas[0] if deltas else final_of(generations[index])
                parts.append(events.first(index, begin.prompt_length))
            num_tokens = 0
            for delta in deltas:
                num_of_delta = len(delta.token_ids) // 4
                num_tokens += num_of_delta
                events.count(index, num_of_delta)
                budget.spend(len(delta.logprobs))
                if delta.text or delta.logprobs:
                    parts.append(events.delta(index, encode(delta.text.decode()), delta.logprobs))
            if deltas:
                clock.on_tokens(index, num_tokens)
            else:
                parts.append(events.last(index, final_of(generations[index])))
            if data := b"".join(parts):
                await stream.send(data)
    return [final_of(generation) for generation in generations]


async def _fail(stream: Delivery, events: EventFormat, clock: StreamClock, error: MiiError) -> web.StreamResponse:
    if not stream.is_started:
        raise error
    clock.on_error(error.code)
    await stream.send(events.error(error))
    return await stream.finish()


def final_of(generation: Generation) -> FinalBody:
    if generation.final is None:
        raise InternalError("a generation ended without its final message")
    return generation.final
