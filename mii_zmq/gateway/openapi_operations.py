# SPDX-License-Identifier: Apache-2.0
"""What OpenAPI says of each operation: the bodies that it takes and gives, its parameters, the errors it can end with.

A route without an entry is described from its handler alone, with every error that a request can meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mii_zmq.errors import (
    BrokerUnavailable,
    InternalError,
    InvalidRequest,
    MiiError,
    ProtocolError,
    RequestError,
    ServiceError,
    UnknownDeployment,
)
from mii_zmq.gateway import metrics, page, terms
from mii_zmq.gateway.core_request import MAX_PRIORITY
from mii_zmq.gateway.http_errors import JSON, EndpointDisabled, ForbiddenOrigin, MethodNotAllowed, NotFound
from mii_zmq.gateway.openapi_requests import Schema, ref
from mii_zmq.gateway.sse import HEADERS as STREAM_HEADERS

TEXT: Schema = {"type": "string"}
EVENTS = STREAM_HEADERS["Content-Type"].partition(";")[0]
"""The media type of streams."""


def subclasses(*bases: type[MiiError]) -> tuple[type[MiiError], ...]:
    """The classes and all below them."""
    found: list[type[MiiError]] = []
    for base in bases:
        found += [base, *subclasses(*base.__subclasses__())]
    return tuple(found)


ALWAYS: tuple[type[MiiError], ...] = (ForbiddenOrigin, InternalError)
ASKS_BROKER = (*ALWAYS, BrokerUnavailable)
_NOT_OF_A_REQUEST = (NotFound, MethodNotAllowed, EndpointDisabled)
GENERATES = tuple(
    kind
    for kind in subclasses(RequestError, ServiceError, ProtocolError, InternalError)
    if kind not in _NOT_OF_A_REQUEST
)
"""A request that goes to a worker group can end with any error but those of the route itself."""


@dataclass(frozen=True, slots=True)
class Operation:
    tag: str
    summary: str
    answers: Mapping[str, Schema]
    """Of status 200, by media type."""
    errors: tuple[type[MiiError], ...]
    request: Schema | None = None
    examples: Mapping[str, Any] = field(default_factory=dict)
    """Request bodies; they get the name of a deployment where the body `names_model`."""
    names_model: bool = True
    needs_body: bool = True
    has_terms: bool = False
    """Takes the headers of `terms`."""
    parameters: tuple[Schema, ...] = ()
    others: Mapping[int, tuple[str, Mapping[str, Schema]]] = field(default_factory=dict)
    """Further statuses: what they mean, and bodies by media type. They win over those of `errors`."""


TERMS: tuple[Schema, ...] = (
    {
        "name": terms.TENANT,
        "in": "header",
        "description": "Who shares queues and cached prefixes with this request.",
        "schema": {"type": "string", "pattern": f"^{terms.TENANT_PATTERN.pattern}$"},
    },
    {
        "name": terms.PRIORITY,
        "in": "header",
        "description": "Smaller is more urgent.",
        "schema": {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY, "default": 0},
    },
    {
        "name": terms.DEADLINE,
        "in": "header",
        "description": "The time that the client will wait, in milliseconds; the request ends with 504 then.",
        "schema": {"type": "integer", "minimum": 1, "maximum": terms.MAX_DEADLINE_MS},
    },
)
REQUEST_ID: Schema = {
    "name": "X-Request-ID",
    "in": "header",
    "description": "Names the request in logs and traces. Sent back as it is where it is short and plain; else a new "
    "one is.",
    "schema": TEXT,
}
TRACE_CONTEXT: tuple[Schema, ...] = (
    {
        "name": "traceparent",
        "in": "header",
        "description": "W3C trace context: the caller's span, of which the request becomes a part.",
        "schema": TEXT,
    },
    {
        "name": "tracestate",
        "in": "header",
        "description": "W3C trace context: passed on as it is.",
        "schema": TEXT,
    },
)
_DEPLOYMENT: Schema = {
    "name": "deployment",
    "in": "query",
    "description": "Ask for one deployment only.",
    "schema": TEXT,
}

_CHAT = {"messages": [{"role": "user", "content": "Say hello."}]}
_TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
_JSON_SCHEMA_TOOL = {"name": "get_weather", "input_schema": _TOOL["parameters"]}


def _events(*kinds: str, has_done: bool = False) -> Schema:
    """The schema of each event of a stream, which OpenAPI before 3.2 has no other place for; `kinds`: of its data."""
    data: Schema = {"contentMediaType": JSON, "contentSchema": {"anyOf": [ref(kind) for kind in kinds]}}
    if has_done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {
        "type": "object",
        "properties": {"data": {"type": "string", **data}, "event": {"type": "string"}},
        "required": ["data"],
    }


_CHUNKS = _events("Chunk", "OpenAIErrorAnswer", has_done=True)


def _generates(
    tag: str, summary: str, request: str, answer: Schema, events: Schema, examples: Mapping[str, Any]
) -> Operation:
    return Operation(tag, summary, {JSON: answer, EVENTS: events}, GENERATES, ref(request), examples, has_terms=True)


def _probe(
    summary: str,
    answer: str,
    unwell: str,
    errors: tuple[type[MiiError], ...] = ALWAYS,
    parameters: tuple[Schema, ...] = (),
) -> Operation:
    body = {JSON: ref(answer)}
    return Operation("health", summary, body, errors, parameters=parameters, others={503: (unwell, body)})


_READY = _probe(
    "Would a request sent now be taken?",
    "Readiness",
    "It would not; `code` says why.",
    (*ALWAYS, UnknownDeployment),
    (_DEPLOYMENT,),
)
_HTML = "text/html"
_SCORE = Operation(
    "embeddings", "How alike texts are: vLLM's scores", {JSON: ref("ScoreList")}, GENERATES, ref("ScoreRequest"),
    {
        "each": {"text_1": "Hello", "text_2": ["Hi", "Goodbye"]},
        "pairs": {"text_1": ["Hello", "Hi"], "text_2": ["Hi", "Goodbye"]},
    },
    has_terms=True,
)  # fmt: skip
_RERANK = Operation(
    "embeddings", "Documents by how alike they are to a query: Jina's and Cohere's", {JSON: ref("Ranking")}, GENERATES,
    ref("RerankRequest"),
    {
        "plain": {"query": "Hello", "documents": ["Goodbye", "Hello there"]},
        "best": {"query": "Hello", "documents": [{"text": "Hi"}, {"text": "Hello"}], "top_n": 1},
    },
    has_terms=True,
)  # fmt: skip

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/"): Operation(
        "service", "The list of endpoints, or the page where HTML is asked for", {JSON: ref("Index"), _HTML: TEXT},
        ALWAYS, others={304: ("The page is the one that the client has.", {})},
    ),
    ("GET", "/page/{name}"): Operation(
        "service", "A file of the page", {kind.partition(";")[0]: TEXT for kind in page.CONTENT_TYPES.values()},
        (*ALWAYS, NotFound), others={304: ("The file is the one that the client has.", {})},
    ),
    ("GET", "/status"): Operation(
        "service", "The broker's status, and the gateway's", {JSON: ref("Status")}, ASKS_BROKER
    ),
    ("GET", "/openapi.json"): Operation("service", "This description", {JSON: {"type": "object"}}, ALWAYS),
    ("GET", "/healthz"): Operation(
        "health", "Is a broker connected?", {_HTML: TEXT}, ALWAYS,
        others={503: ("No broker is connected, or the gateway is shutting down.", {_HTML: TEXT})},
    ),
    ("GET", "/health"): _READY,
    ("GET", "/health/ready"): _READY,
    ("GET", "/health/live"): _probe("Does the event loop move?", "Liveness", "It was held up until just now."),
    ("GET", "/health/started"): _probe("Has a model been loaded?", "Startup", "No group has registered yet."),
    ("GET", "/metrics"): Operation(
        "service", "Metrics for Prometheus", {metrics.CONTENT_TYPE.partition(";")[0]: TEXT}, ALWAYS
    ),
    ("GET", "/v1/models"): Operation("models", "What is served", {JSON: ref("ModelList")}, ASKS_BROKER),
    ("GET", "/v1/models/{model}"): Operation(
        "models", "One model", {JSON: ref("Model")}, (*ASKS_BROKER, UnknownDeployment)
    ),
    ("POST", "/mii/{deployment}"): _generates(
        "MII", "MII's REST call", "MiiRequest", {"type": "array", "items": ref("MiiCompletion")},
        _events("MiiEvent", "MiiErrorEvent", has_done=True),
        {
            "several": {"prompts": ["DeepSpeed is", "Seattle is"], "max_new_tokens": 8},
            "streamed": {"prompts": "DeepSpeed is", "max_new_tokens": 8, "stream": True},
        },
    ),
    ("POST", "/v1/chat/completions"): _generates(
        "OpenAI", "OpenAI's chat completions", "ChatCompletionRequest", ref("ChatCompletion"), _CHUNKS,
        {
            "plain": {**_CHAT, "max_completion_tokens": 8},
            "streamed": {**_CHAT, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}},
            "tools": {**_CHAT, "max_completion_tokens": 8, "tools": [{"type": "function", "function": _TOOL}]},
        },
    ),
    ("POST", "/v1/completions"): _generates(
        "OpenAI", "OpenAI's completions", "CompletionRequest", ref("Completion"), _CHUNKS,
        {
            "plain": {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0},
            "ids": {"prompt": [[72, 105], [72, 111]], "max_tokens": 8, "n": 2, "seed": 1},
            "streamed": {"prompt": "Once upon a time", "max_tokens": 8, "stream": True},
        },
    ),
    ("POST", "/v1/responses"): _generates(
        "OpenAI", "OpenAI's Responses", "ResponsesRequest", ref("Response"), _events("ResponseEvent"),
        {
            "plain": {"input": "Say hello.", "max_output_tokens": 8},
            "streamed": {"input": "Say hello.", "max_output_tokens": 8, "stream": True},
            "tools": {"input": "Say hello.", "max_output_tokens": 8, "tools": [{"type": "function", **_TOOL}]},
        },
    ),
    ("POST", "/v1/messages"): _generates(
        "Anthropic", "Anthropic's Messages", "MessagesRequest", ref("AnthropicMessage"),
        _events("MessagesEvent"),
        {
            "plain": {**_CHAT, "max_tokens": 8},
            "streamed": {**_CHAT, "max_tokens": 8, "stream": True},
            "tools": {**_CHAT, "max_tokens": 8, "tools": [_JSON_SCHEMA_TOOL]},
        },
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Anthropic", "The length of a conversation", {JSON: ref("TokenCount")}, GENERATES, ref("CountTokensRequest"),
        {"plain": _CHAT}, has_terms=True,
    ),
    ("POST", "/v1/embeddings"): Operation(
        "embeddings", "OpenAI's embeddings", {JSON: ref("EmbeddingList")}, GENERATES, ref("EmbeddingRequest"),
        {
            "plain": {"input": "Hello", "encoding_format": "float"},
            "several": {"input": ["Hello", "Hi"], "encoding_format": "base64", "dimensions": 4, "pooling": "mean"},
            "ids": {"input": [[72, 105], [72, 111]]},
        },
        has_terms=True,
    ),
    **dict.fromkeys((("POST", "/score"), ("POST", "/v1/score")), _SCORE),
    **dict.fromkeys((("POST", "/rerank"), ("POST", "/v1/rerank"), ("POST", "/v2/rerank")), _RERANK),
    ("POST", "/abort_request"): Operation(
        "service", "End requests by their ids", {JSON: ref("AbortedRequests")}, (*GENERATES, EndpointDisabled),
        ref("AbortRequest"), {"one": {"request_id": "chatcmpl-0123456789abcdef0123456789abcdef"}},
        parameters=TERMS[:1], names_model=False,
    ),
    ("POST", "/reset_prefix_cache"): Operation(
        "service", "Let a deployment's groups forget their cached prefixes", {JSON: ref("ResetGroups")},
        (*GENERATES, EndpointDisabled), ref("ResetPrefixCacheRequest"), needs_body=False,
    ),
    ("POST", "/tokenize"): Operation(
        "tokens", "Token ids of a prompt or a conversation", {JSON: ref("Tokenized")}, GENERATES,
        {"anyOf": [ref("TokenizePromptRequest"), ref("TokenizeChatRequest")]},
        {"prompt": {"prompt": "Hello"}, "chat": _CHAT}, has_terms=True,
    ),
    ("POST", "/detokenize"): Operation(
        "tokens", "The text of token ids", {JSON: ref("Detokenized")}, GENERATES, ref("DetokenizeRequest"),
        {"plain": {"tokens": [72, 105]}}, has_terms=True,
    ),
}  # fmt: skip
"""By method and path."""


def operation_of(method: str, path: str, handler: Any) -> Operation:
    """The entry, or what can be said of any route."""
    known = OPERATIONS.get((method, path))
    if known is not None:
        return known
    summary = (handler.__doc__ or path).partition("\n")[0].partition(": ")
    return Operation(
        tag="service",
        summary=(summary[2] or summary[0]).rstrip("."),
        answers={"*/*": {}},
        errors=(*GENERATES, NotFound, InvalidRequest),
        request={"type": "object"} if method in ("POST", "PUT", "PATCH") else None,
        has_terms=method == "POST",
    )
