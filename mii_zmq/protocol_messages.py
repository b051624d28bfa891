# SPDX-License-Identifier: Apache-2.0
"""What peers say to each other: the verbs, and the schema of every header and body. Data only; PROTOCOL.md explains it.

Headers may carry unknown keys within a major version (they are ignored); GENERATE's body may not. `protocol` turns
messages into frames and back, and has these names, too.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec


class Verb(enum.IntEnum):
    """The second frame. Values below 0x20 travel between clients and broker (most of them on to the worker), values
    from 0x20 between broker and worker only; DISCONNECT ends either kind of connection."""

    HELLO = 0x01
    WELCOME = 0x02
    GENERATE = 0x10
    ACCEPTED = 0x11
    TOKENS = 0x12
    FINAL = 0x13
    ERROR = 0x14
    CANCEL = 0x15
    CREDIT = 0x16
    STATUS = 0x17
    HEARTBEAT = 0x18
    ABORT = 0x19
    RESET_PREFIX_CACHE = 0x1A
    READY = 0x20
    REGISTERED = 0x21
    DRAIN = 0x22
    DISCONNECT = 0x23


class Header(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of header schemas: unknown keys are ignored (they belong to a newer minor version)."""


class Hello(Header):
    """Client to broker, first message of a connection that wants more than the plain behaviour."""

    name: str = ""
    """Free text for logs."""
    batch: bool = False
    """True: TOKENS messages may carry rows of several requests."""
    credit: int = 0
    """Rows per request that the client takes before it grants more; further ones are merged. 0: unlimited."""


class Welcome(Header):
    """Broker's answer to HELLO."""

    epoch: bytes
    """16 bytes, new at every start of the broker."""
    heartbeat_ms: int
    """The client sends HEARTBEAT at this interval; the broker answers each."""
    liveness: int
    """Missed intervals after which either side counts the other as dead."""
    max_body_bytes: int
    deployments: list[str]
    capabilities: list[str]


class GenerateHeader(Header):
    """All that the broker may look at in a GENERATE message."""

    deployment: str
    stream: bool = False
    """True: ACCEPTED, TOKENS..., FINAL. False: FINAL alone carries the text."""
    tenant: str = ""
    """Prefix blocks are shared within a tenant only, and tenants take turns in the queue."""
    priority: int = 0
    """Smaller is served first."""
    deadline_ms: int | None = None
    """Time that is left, at the moment of sending."""
    num_tokens: int = 0
    """The sender's estimate of prompt plus output tokens, for routing; 0: unknown."""
    prefix_hashes: list[bytes] = []
    seen: bool = False
    """The sender has known this deployment to serve: a broker that has just started waits for its workers instead of
    refusing the request."""
    x_request_id: str = ""
    """The caller's own name of the request, for logs, traces and ABORT; several may bear the same."""
    traceparent: str = ""
    """W3C trace context; a broker that traces passes on its own span in place of the caller's."""
    tracestate: str = ""
    client: int = 0
    """Set by the broker: a number for the client connection; the worker groups TOKENS rows by it."""
    attempt: int = 0
    """Set by the broker: how many groups had this request before."""
    first_seq: int = 0
    """Set by the broker: `seq` of the first row, so that a stream that changes groups is one sequence of rows."""


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to generate from: exactly one of prompt, prompt_token_ids and messages."""

    task: Literal["generate", "tokenize", "detokenize", "embed"] = "generate"
    """Other than to generate: FINAL has the prompt's token ids, or the text of prompt_token_ids, at once; or it has the
    prompt's embedding. Not streamed."""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    """Chat messages, rendered by the model's template: role and content, and what belongs to tool calls."""
    params: dict[str, Any] = {}
    """Fields of SamplingParams."""
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    """With messages: end the prompt with the opening of an assistant message."""
    tools: list[dict[str, Any]] | None = None
    """With messages: functions that the model may call, for its template: type and function."""
    chat_template_kwargs: dict[str, Any] = {}
    """With messages: more variables for the template; plain values."""
    continue_final_message: bool = False
    """With messages: end the prompt with the last one's content, for the model to go on with."""
    return_reasoning_start: bool = False
    """Where the template ends the prompt with an opening <think>, the text begins with it."""
    pooling: str | None = None
    """To embed: which final hidden state, 'last', 'first', or the 'mean' of all; None: as the deployment is set."""
    dimensions: int | None = None
    """To embed: so many of the first numbers; None: all."""
    normalize: bool = True
    """To embed: scale the vector to length 1, after cutting it."""


class FinalBody(Header):
    """Terminal: the request ended well. Token counts include a stop token whose text is dropped."""

    finish_reason: str
    prompt_length: int
    generated_length: int
    num_cached_tokens: int = 0
    matched_stop: str | None = None
    """The stop string that ended it."""
    text: str | None = None
    """The whole text, when the request was not streamed; raw frame 0 then holds all token ids, raw frame 1 the
    log-probabilities if they were asked for."""
    embedding: bytes | None = None
    """To embed: the vector, float32, little endian."""


class FinalHeader(Header):
    """FINAL from a worker names the reason here too, where the broker may read it (for its counters)."""

    finish_reason: str = ""


class ErrorHeader(Header):
    """Terminal: the request ended with an error (see mii_zmq.errors for the codes)."""

    code: str
    message: str
    retryable: bool = False
    emitted_tokens: int = 0
    retry_after_ms: int | None = None
    param: str | None = None


class Cancel(Header):
    """Client to broker to worker: end these requests, or the one that the request id frame names."""

    request_ids: list[bytes] = []


class Abort(Header):
    """Client to broker: end requests, whichever connection they came from."""

    tenant: str = ""
    """Whose requests; others' are not touched."""
    request_ids: list[bytes] = []
    names: list[str] = []
    """`x_request_id` of GENERATE."""
    everything: bool = False
    """All requests of the tenant."""


class Aborted(Header):
    """Broker's answer to ABORT: what it has ended."""

    num_requests: int = 0
    request_ids: list[bytes] = []
    """Those of the given ones that were running or waiting."""
    names: list[str] = []


class ResetPrefixCache(Header):
    """Client to broker to all groups of a deployment (there without a header): forget the cached prefixes."""

    deployment: str


class PrefixCacheReset(Header):
    """Broker's answer to RESET_PREFIX_CACHE, when every group has answered or is known not to."""

    done: list[str] = []
    """Groups that have forgotten their prefixes."""
    failed: dict[str, str] = {}
    """Groups that have not, as far as is known, and why."""


class Credit(Header):
    """Client to broker: that many more rows of these requests may be sent, or of the one that the request id frame
    names."""

    credit: int
    request_ids: list[bytes] = []


class BrokerHeartbeat(Header):
    """Broker's answer to a HEARTBEAT, and its question to a peer that was silent for an interval."""

    epoch: bytes
    is_draining: bool = False
    """To clients: it shuts down, takes no new requests, and finishes those that it has."""


class Disconnect(Header):
    """The sender no longer counts the connection as open; a worker that is alive sends READY again."""

    reason: str = ""


class Ready(Header):
    """Worker to broker: this group can take requests."""

    group: str
    incarnation: bytes
    """16 bytes, new at every start of the group."""
    deployment: str
    max_requests: int
    """Requests that the group wants at the same time; the broker queues the rest."""
    max_model_len: int
    in_flight: list[bytes] = []
    """Requests running in the group (after a broker restart)."""
    info: dict[str, Any] = {}
    """For STATUS: model, pid, device."""


class Registered(Header):
    """Broker's answer to READY."""

    epoch: bytes
    heartbeat_ms: int
    liveness: int


class Load(Header):
    """Carried by worker heartbeats; emitted by the engine's own loop, so that it stops when the loop stops."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    outstanding_tokens: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed since the start, cached ones excluded."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    step_ms: float = 0.0
    num_failed_steps: int = 0
    """Steps that raised; their requests were computed again."""
    num_numeric_errors: int = 0
    """Requests that ended because their logits were not finite."""
    token_budget: int = 0
    """Tokens per step at most; less than usual for a while when memory ran out."""


class HistogramValues(msgspec.Struct):
    """Observations since the start; see mii_zmq.telemetry.Histogram."""

    bounds: list[float]
    counts: list[int]
    """Per bucket, with one more for what is above the last bound."""
    total: float


class WorkerHeartbeat(Header):
    """Worker to broker, at the interval that REGISTERED named."""

    incarnation: bytes
    state: str
    """'ready' or 'draining'."""
    load: Load
    report_age_ms: int = 0
    """Since the engine's last report, which `load` is from."""
    histograms: dict[str, HistogramValues] = {}
    """Seconds: of steps by stage, and of requests by phase."""
