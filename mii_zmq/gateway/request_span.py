# SPDX-License-Identifier: Apache-2.0
"""The gateway's span of one HTTP request, in the words of OpenTelemetry's conventions for HTTP and generative AI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from mii_zmq.gateway.access_log import is_probe, shown_path
from mii_zmq.gateway.request_record import RequestRecord
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.trace_context import parse
from mii_zmq.tracing import Span, Tracing, known

if TYPE_CHECKING:
    from mii_zmq.spans import Value

PROVIDER = "mii_zmq"
_CHAT = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
_TEXT = ("/v1/completions", "/mii/")
_DEFAULTS = SamplingParams()
MAX_AGENT_CHARS = 200
MAX_HOST_CHARS = 255


def enter(request: web.Request, record: RequestRecord, tracing: Tracing | None) -> None:
    """Take the caller's context over, and begin our span below it where there is `tracing`."""
    headers = request.headers
    if "traceparent" in headers:
        record.parent = record.trace = parse(headers["traceparent"], ",".join(headers.getall("tracestate", ())))
    if tracing is not None and not is_probe(request):
        record.trace = tracing.enter(record.parent, request.method)


def leave(request: web.Request, record: RequestRecord, tracing: Tracing, route: str, status: int, end: float) -> None:
    """The request has ended: record its span."""
    if record.trace is None or not record.trace.is_sampled or is_probe(request):
        return
    span = Span(f"{request.method} {route}", record.trace, record.started, record.parent, "server")
    span.attributes = {**_http(request, route, status), **_generation(record, route)}
    if record.is_gone:
        span.attributes["error.type"] = "client_disconnected"
    elif status >= 500 or record.error_code:
        span.attributes["error.type"] = record.error_code or str(status)
        # A client's own mistake is no failure of the server's, says the convention.
        span.error = (record.error_code or f"status {status}") if status >= 500 or status == 200 else None
    if record.first_token_s is not None:
        span.add_event("first token", record.started + record.first_token_s)
    for generation in record.generations:
        for sent in generation.sent_again:
            span.add_event("sent again", sent.at, broker=sent.endpoint, received_tokens=sent.num_tokens)
    tracing.record(span, end)


def _http(request: web.Request, route: str, status: int) -> dict[str, Value]:
    host, port = _authority(request.host)
    return known(
        http__request__method=request.method,
        http__route=route,
        http__response__status_code=status,
        url__path=shown_path(request),
        url__scheme=request.scheme,
        server__address=host,
        server__port=port,
        network__protocol__version=f"{request.version.major}.{request.version.minor}",
        user_agent__original=request.headers.get("User-Agent", "")[:MAX_AGENT_CHARS],
    )


def _authority(host: str) -> tuple[str, int | None]:
    """What the client wrote into Host, taken apart where it can be."""
    name, _, port = host.rpartition(":")
    if name and port.isascii() and port.isdigit() and len(port) <= 5:
        return name[:MAX_HOST_CHARS], int(port)
    return host[:MAX_HOST_CHARS], None


def _generation(record: RequestRecord, route: str) -> dict[str, Value]:
    values = known(mii__request_id=record.request_id)
    if not record.generations:
        return values
    params, reasons = record.params, record.finish_reasons
    is_sampled = params.get("do_sample", True) is not False
    return values | known(
        gen_ai__operation__name=_operation(route),
        gen_ai__provider__name=PROVIDER,
        gen_ai__request__model=record.model,
        gen_ai__response__model=record.model if reasons else None,
        gen_ai__request__max_tokens=params.get("max_new_tokens"),
        gen_ai__request__temperature=_number(params.get("temperature")) if is_sampled else 0.0,
        gen_ai__request__top_p=params.get("top_p", _DEFAULTS.top_p) if params and is_sampled else None,
        gen_ai__request__top_k=params.get("top_k"),
        gen_ai__request__frequency_penalty=_number(params.get("frequency_penalty")),
        gen_ai__request__presence_penalty=_number(params.get("presence_penalty")),
        gen_ai__request__seed=params.get("seed"),
        gen_ai__request__choice__count=record.num_choices if record.num_choices > 1 else None,
        gen_ai__usage__input_tokens=record.prompt_tokens,
        gen_ai__usage__output_tokens=record.output_tokens,
        gen_ai__response__finish_reasons=tuple(reasons) or None,
        mii__stream=record.stream,
        mii__cached_tokens=record.cached_tokens,
        mii__time_to_first_token_s=record.first_token_s,
        mii__num_generations=len(record.generations),
    )


def _operation(route: str) -> str | None:
    if route.startswith(_CHAT) and not route.endswith("count_tokens"):
        return "chat"
    if route.startswith(_TEXT):
        return "text_completion"
    return "embeddings" if "embed" in route else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
