# SPDX-License-Identifier: Apache-2.0
"""The wire protocol between clients, broker and worker groups; PROTOCOL.md is its contract in words.

One message is a list of frames (behind any routing frames, which transport handles):

    "MIIZ" major minor | verb (1 byte) | request id (16 bytes) | header (msgpack map) | body (msgpack map) | raw frames

Owns tags, verbs, sizes, the schema of every header and body, and their encoding. Knows no sockets. Headers may carry
unknown keys within a major version (they are ignored); bodies may not. msgpack extension types are refused everywhere.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import msgpack
import msgspec

from mii_zmq.errors import InvalidRequest, ProtocolError, RequestTooLarge
from mii_zmq.sampling_params import unknown_field

MAJOR = 1
MINOR = 0
TAG = b"MIIZ" + bytes((MAJOR, MINOR))
NO_ID = bytes(16)
"""The request id of messages that concern no request, or many."""

MAX_HEADER_BYTES = 4 * 2**20
MAX_BODY_BYTES = 8 * 2**20
MAX_RAW_BYTES = 16 * 2**20
MAX_FRAMES = 16
NUM_FIXED_FRAMES = 5
MAX_SHOWN_NAME = 80
"""A longer key is not repeated in an error."""

S = TypeVar("S", bound=msgspec.Struct)


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
    READY = 0x20
    REGISTERED = 0x21
    DRAIN = 0x22
    DISCONNECT = 0x23


_BAD_ROW = "a TOKENS row is [id, seq, token_offset, num_tokens, text_bytes, finish_reason]"
_VERBS = {bytes((verb,)): verb for verb in Verb}
_VERB_FRAMES = {verb: bytes((verb,)) for verb in Verb}


@dataclass(slots=True)
class Message:
    """A message whose frames were counted and whose header was decoded; the body is still bytes."""

    verb: Verb
    request_id: bytes
    header: dict[str, Any] = field(default_factory=dict)
    body: bytes = b"\x80"
    """An encoded msgpack map, opaque to the broker."""
    raw: Sequence[bytes] = ()

    def to_frames(self) -> list[bytes]:
        return encode(self.verb, self.request_id, self.header, self.body, self.raw)


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
    client: int = 0
    """Set by the broker: a number for the client connection; the worker groups TOKENS rows by it."""
    attempt: int = 0
    """Set by the broker: how many groups had this request before."""
    first_seq: int = 0
    """Set by the broker: `seq` of the first row, so that a stream that changes groups is one sequence of rows."""


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to generate from: exactly one of prompt, prompt_token_ids and messages."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    """Chat messages, rendered by the model's template: role and content."""
    params: dict[str, Any] = {}
    """Fields of SamplingParams."""
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    """With messages: end the prompt with the opening of an assistant message."""


class FinalBody(Header):
    """Terminal: the request ended well. Token counts include a stop token whose text is dropped."""

    finish_reason: str
    prompt_length: int
    generated_length: int
    num_cached_tokens: int = 0
    text: str | None = None
    """The whole text, when the request was not streamed; raw frame 0 then holds all token ids."""


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


class WorkerHeartbeat(Header):
    """Worker to broker, at the interval that REGISTERED named."""

    incarnation: bytes
    state: str
    """'ready' or 'draining'."""
    load: Load
    report_age_ms: int = 0
    """Since the engine's last report, which `load` is from."""


class TokenRow(NamedTuple):
    """One request's tokens of one step, as the header of TOKENS lists them."""

    request_id: bytes
    seq: int
    """Per request, without holes, from `first_seq` of GENERATE. Of rows that the broker merged: the last one's."""
    token_offset: int
    """Output tokens before this row."""
    num_tokens: int
    text_bytes: int
    finish_reason: str | None
    """Set on a request's last row; FINAL follows."""


class TokenDelta(NamedTuple):
    """A TokenRow joined with its share of the raw frames."""

    request_id: bytes
    seq: int
    token_offset: int
    token_ids: bytes
    """int32, little endian."""
    text: bytes
    """UTF-8, whole characters."""
    finish_reason: str | None


def new_request_id() -> bytes:
    return os.urandom(16)


def pack(value: Any) -> bytes:
    """msgpack, plain types only."""
    packed: bytes = _packer.pack(value)
    return packed


def encode_body(body: msgspec.Struct) -> bytes:
    """A body Struct as msgpack bytes.

    Raises:
        InvalidRequest: some text holds a lone surrogate.
        RequestTooLarge: the body exceeds the protocol's limit.
    """
    try:
        packed = pack(msgspec.to_builtins(body, builtin_types=(bytes,)))
    except UnicodeEncodeError:
        raise InvalidRequest("the request holds a lone surrogate; send valid Unicode", param="prompt") from None
    if len(packed) > MAX_BODY_BYTES:
        raise RequestTooLarge(f"the request has {len(packed)} bytes; the limit is {MAX_BODY_BYTES}")
    return packed


def encode(
    verb: Verb, request_id: bytes = NO_ID, header: Any = None, body: Any = b"\x80", raw: Sequence[bytes] = ()
) -> list[bytes]:
    """Frames of one message. `header` and `body` may be Structs, dicts or (body) bytes encoded before."""
    if isinstance(header, msgspec.Struct):
        header = msgspec.to_builtins(header, builtin_types=(bytes,))
    if isinstance(body, msgspec.Struct):
        body = msgspec.to_builtins(body, builtin_types=(bytes,))
    return [
        TAG,
        _VERB_FRAMES[verb],
        request_id,
        pack(header or {}),
        body if isinstance(body, bytes) else pack(body),
        *raw,
    ]


def decode(frames: Sequence[bytes]) -> Message:
    """Check the frames of one message and decode its header.

    Raises:
        ProtocolError: wrong tag, version, verb, frame count, id length, or a header that is no map.
        RequestTooLarge: a part exceeds its limit; nothing of it was decoded.
    """
    if not NUM_FIXED_FRAMES <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"a message has {NUM_FIXED_FRAMES} to {MAX_FRAMES} frames, this one has {len(frames)}")
    tag, verb_frame, request_id, header, body = frames[:NUM_FIXED_FRAMES]
    if tag[:4] != TAG[:4] or len(tag) != len(TAG):
        raise ProtocolError("the first frame is not the protocol tag MIIZ with two version bytes")
    if tag[4] != MAJOR:
        raise ProtocolError(f"protocol version {tag[4]}.{tag[5]} is not supported; supported: {MAJOR}.x")
    verb = _VERBS.get(verb_frame)
    if verb is None:
        raise ProtocolError(f"unknown verb 0x{verb_frame[:4].hex()}")
    if len(request_id) != 16:
        raise ProtocolError(f"a request id has 16 bytes, this one has {len(request_id)}")
    raw = frames[NUM_FIXED_FRAMES:]
    if len(header) > MAX_HEADER_BYTES:
        raise RequestTooLarge(f"the header has {len(header)} bytes; the limit is {MAX_HEADER_BYTES}")
    if len(body) > MAX_BODY_BYTES:
        raise RequestTooLarge(f"the body has {len(body)} bytes; the limit is {MAX_BODY_BYTES}")
    if sum(map(len, raw)) > MAX_RAW_BYTES:
        raise RequestTooLarge(f"the raw frames exceed {MAX_RAW_BYTES} bytes")
    return Message(verb, request_id, unpack_map(header, "header"), body, raw)


def unpack_map(data: bytes, what: str) -> dict[str, Any]:
    """Decode one msgpack map with string keys and no extension types; raises ProtocolError."""
    try:
        value = msgpack.unpackb(data, strict_map_key=True, raw=False, max_ext_len=0, ext_hook=_refuse_ext)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        name = _faulty_field(data)
        where = f"field {name!r} of the {what}" if name else f"the {what}"
        text = f"{where} is not valid msgpack: {type(error).__name__}: {str(error)[:120]}"
        raise ProtocolError(text, param=name) from None
    if not isinstance(value, dict) or any(not isinstance(key, str) for key in value):
        raise ProtocolError(f"the {what} must be a msgpack map with string keys")
    return value


def _faulty_field(data: bytes) -> str | None:
    """Which top-level key's value could not be decoded, as far as that can be told."""
    name: object = None
    try:
        unpacker = msgpack.Unpacker(strict_map_key=True, raw=False, max_ext_len=0, ext_hook=_refuse_ext)
        unpacker.feed(data)
        for _ in range(unpacker.read_map_header()):
            name = None
            name = unpacker.unpack()
            unpacker.unpack()
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return name if isinstance(name, str) and len(name) <= MAX_SHOWN_NAME else None
    return None


def parse_header(message: Message, cls: type[S]) -> S:
    """The header as a typed Struct; raises ProtocolError naming the field."""
    try:
        return msgspec.convert(message.header, cls)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{message.verb.name} header: {error}", param=_path_of(error)) from None


def parse_body(message: Message, cls: type[S]) -> S:
    """The body as a typed Struct; unknown fields are refused where `cls` forbids them.

    Raises:
        ProtocolError: no msgpack map.
        InvalidRequest: a field is unknown or of the wrong type; `param` names it.
    """
    values = unpack_map(message.body, "body")
    if cls.__struct_config__.forbid_unknown_fields:
        for name in values:
            if name not in cls.__struct_fields__:
                raise unknown_field(name, cls.__struct_fields__)
    try:
        return msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{message.verb.name} body: {error}", param=_path_of(error)) from None


class TokenRows:
    """Collects the rows of one step for one client connection and encodes them as one TOKENS message."""

    __slots__ = ("_ids", "_rows", "_texts")

    def __init__(self) -> None:
        self._rows: list[TokenRow] = []
        self._ids: list[bytes] = []
        self._texts: list[bytes] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, delta: TokenDelta) -> None:
        self._rows.append(
            TokenRow(
                delta.request_id,
                delta.seq,
                delta.token_offset,
                len(delta.token_ids) // 4,
                len(delta.text),
                delta.finish_reason,
            )
        )
        self._ids.append(delta.token_ids)
        self._texts.append(delta.text)

    def to_frames(self, client: int | None = None) -> list[bytes]:
        """`client` is the broker's connection number, on the way from worker to broker."""
        request_id = self._rows[0].request_id if len(self._rows) == 1 else NO_ID
        header: dict[str, Any] = {"rows": self._rows}
        if client is not None:
            header["client"] = client
        return encode(Verb.TOKENS, request_id, header, raw=(b"".join(self._ids), b"".join(self._texts)))


def iterate_tokens(message: Message) -> Iterator[TokenDelta]:
    """The rows of a TOKENS message with their ids and text; raises ProtocolError when they do not add up."""
    rows = message.header.get("rows")
    if not isinstance(rows, list) or len(message.raw) != 2:
        raise ProtocolError("TOKENS needs a header with rows and two raw frames (token ids, text)")
    ids, texts = message.raw
    id_at = text_at = 0
    for row in rows:
        try:
            request_id, seq, token_offset, num_tokens, text_bytes, finish_reason = row
        except (TypeError, ValueError):
            raise ProtocolError(_BAD_ROW) from None
        if type(request_id) is not bytes or type(num_tokens) is not int or type(text_bytes) is not int:
            raise ProtocolError(_BAD_ROW)
        if type(seq) is not int or type(token_offset) is not int or type(finish_reason) not in (str, NoneType):
            raise ProtocolError(_BAD_ROW)
        id_end = id_at + 4 * num_tokens
        text_end = text_at + text_bytes
        if not id_at <= id_end <= len(ids) or not text_at <= text_end <= len(texts):
            raise ProtocolError("TOKENS rows announce more ids or text than the raw frames hold")
        yield TokenDelta(request_id, seq, token_offset, ids[id_at:id_end], texts[text_at:text_end], finish_reason)
        id_at, text_at = id_end, text_end


def _refuse_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"msgpack extension type {code} is not allowed")


def _path_of(error: msgspec.ValidationError) -> str | None:
    _, _, path = str(error).partition(" - at `$.")
    return path.rstrip("`").split("[")[0] or None


_packer = msgpack.Packer(use_bin_type=True, autoreset=True)
