# SPDX-License-Identifier: Apache-2.0
"""The way of a request through any door that speaks of models: understand, send, and answer in the door's format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from aiohttp import web

from mii_zmq.errors import BrokerUnavailable, MiiError
from mii_zmq.gateway.broker_status import DeploymentStatus
from mii_zmq.gateway.constraints import constrain
from mii_zmq.gateway.core_request import CoreRequest
from mii_zmq.gateway.generations import build, collect, submitted
from mii_zmq.gateway.http_errors import JSON
from mii_zmq.gateway.metrics import StreamClock
from mii_zmq.gateway.middlewares import route_of
from mii_zmq.gateway.request_body import Fields, read_fields
from mii_zmq.gateway.request_record import RECORD
from mii_zmq.gateway.sse import EventFormat, respond
from mii_zmq.gateway.state import GATEWAY, Gateway
from mii_zmq.gateway.terms import terms_of
from mii_zmq.gateway.tool_formats import ANY, FORMATS, ToolFormat

if TYPE_CHECKING:
    from mii_zmq.client import Completion, Generation

R = TypeVar("R", bound=CoreRequest)


class AnswerFormat(EventFormat, Protocol):
    """One door's answer to one request: the events of a stream, or the whole body."""

    def body(self, results: Sequence[Completion]) -> bytes:
        """The answer to a request that was not streamed."""


async def serve(
    request: web.Request,
    parse: Callable[[Fields], R],
    make_answer: Callable[[R, Sequence[Generation], ToolFormat], AnswerFormat],
) -> web.StreamResponse:
    """Answer a request; its errors bear the door's names.

    Raises:
        MiiError: before the first byte of the answer.
        ConnectionError: the client is gone.
    """
    gateway = request.app[GATEWAY]
    clock, terms = StreamClock(gateway.metrics, route_of(request), request[RECORD]), terms_of(request)
    asked = parse(await read_fields(request))
    request[RECORD].num_choices = asked.params.n
    if asked.priority:
        terms = replace(terms, priority=asked.priority)
    tool_format = ANY
    if asked.tools is not None or asked.params.structured_output is not None:
        deployment = await find_deployment(gateway, asked.model)
        tool_format = _tool_format(deployment)
        asked = constrain(asked, deployment, tool_format)
    sent = submitted(gateway.client, asked.model, asked.bodies(), terms, stream=asked.stream)
    try:
        with gateway.running(), sent as generations:
            answer = make_answer(asked, generations, tool_format)
            if asked.stream:
                return await respond(request, asked.model, generations, answer, clock, asked.headers)
            results = await collect(generations, gateway.metrics, asked.model, clock)
            body = await build(lambda: answer.body(results), results)
            return web.Response(body=body, content_type=JSON, headers=asked.headers)
    except MiiError as error:
        raise asked.rename(error) from None


async def find_deployment(gateway: Gateway, name: str) -> DeploymentStatus | None:
    """What is known of a deployment, its groups as they were when they were last there; None where nothing ever was."""
    try:
        found = (await gateway.status()).deployments.get(name)
    except BrokerUnavailable:
        found = None  # sending the request says it better, and with several brokers may well work
    # A request may wait for the broker or for a group that starts again, and will be served by what was there before.
    return found if found is not None and found.has_groups else gateway.known.get(name, found)


def _tool_format(deployment: DeploymentStatus | None) -> ToolFormat:
    """How the model writes tool calls, as its groups say; all known ways where they do not."""
    return FORMATS.get(deployment.tool_format or "", ANY) if deployment is not None else ANY
