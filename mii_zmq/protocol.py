# SPDX-License-Identifier: Apache-2.0
"""The wire protocol between clients, broker and worker groups; PROTOCOL.md is its contract in words.

One message is a list of frames (behind any routing frames, which transport handles):

    "MIIZ" major minor | verb (1 byte) | request id (16 bytes) | header (msgpack map) | body (msgpack map) | raw frames

Owns tags, sizes, the encoding and the rows of TOKENS; the verbs and the schema of every header and body are those of
`protocol_messages`. Knows no sockets. msgpack extension types are refused everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Annotated, Any, NamedTuple, TypeVar

import msgpack
import msgspec

from mii_zmq.errors import InvalidRequest, ProtocolError, RequestTooLarge
from mii_zmq.protocol_messages import (
    Abort,
    Aborted,
    BrokerHeartbeat,
    Cancel,
    Credit,
    Disconnect,
    ErrorHeader,
    FinalBody,
    FinalHeader,
    GenerateBody,
    GenerateHeader,
    Header,
    Hello,
    HistogramValues,
    Load,
    PrefixCacheReset,
    Ready,
    Registered,
    ResetPrefixCache,
    Verb,
    Welcome,
    WorkerHeartbeat,
)
from mii_zmq.sampling_params import unknown_field

__all__ = [
    "MAJOR", "MAX_BODY_BYTES", "MAX_FRAMES", "MAX_GENERATE_HEADER_BYTES", "MAX_HEADER_BYTES", "MAX_RAW_BYTES",
    "MAX_SHOWN_NAME", "MINOR", "NO_ID", "NUM_FIXED_FRAMES", "TAG", "Abort", "Aborted", "BrokerHeartbeat", "Cancel",
    "Credit", "Disconnect", "ErrorHeader", "FinalBody", "FinalHeader", "GenerateBody", "GenerateHeader", "Header",
    "Hello", "HistogramValues", "Load", "Message", "PrefixCacheReset", "Ready", "Registered", "ResetPrefixCache",
    "TokenDelta", "TokenRow", "TokenRows", "Verb", "Welcome", "WorkerHeartbeat", "decode", "encode", "encode_body",
    "iterate_tokens", "new_request_id", "pack", "parse_body", "parse_header", "readable_id", "token_rows",
    "unpack_map",
]  # fmt: skip

MAJOR = 1
MINOR = 1
TAG = b"MIIZ" + bytes((MAJOR, MINOR))
NO_ID = bytes(16)
"""The request id of messages that concern no request, or many."""

MAX_HEADER_BYTES = 4 * 2**20
MAX_GENERATE_HEADER_BYTES = 64 * 2**10
"""From a client: the broker keeps it decoded, and what it adds must not make it too large for a worker."""
MAX_BODY_BYTES = 8 * 2**20
MAX_RAW_BYTES = 16 * 2**20
MAX_FRAMES = 16
NUM_FIXED_FRAMES = 5
MAX_SHOWN_NAME = 80
"""A longer key is not repeated in an error."""

S = TypeVar("S", bound=msgspec.Struct)


_Count = Annotated[int, msgspec.Meta(ge=0)]
_num_tokens_of, _text_bytes_of = itemgetter(3), itemgetter(4)
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
    num_header_bytes: int = field(default=0, compare=False)
    """Of the header as it came."""

    @property
    def num_bytes(self) -> int:
        """Of header, body and raw frames."""
        return self.num_header_bytes + len(self.body) + sum(map(len, self.raw))

    def to_frames(self) -> list[bytes]:
        return encode(self.verb, self.request_id, self.header, self.body, self.raw)


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


class _Tokens(msgspec.Struct):
    """The header of TOKENS; rows have the fields of TokenRow, as plain tuples."""

    rows: list[tuple[bytes, int, int, _Count, _Count, str | None]]
    logprob_bytes: list[_Count] = []
    """By row; none where no row has log-probabilities."""
    prompt_lengths: list[_Count] = []
    """By row; none where no row says its own."""


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
    logprobs: bytes = b""
    """Records of mii_zmq.logprobs, of requests that ask for them."""
    prompt_length: int = 0
    """Tokens of the prompt, in the first row that a group sends of a request; 0 says nothing."""


def new_request_id() -> bytes:
    return os.urandom(16)


def pack(value: Any) -> bytes:
    """msgpack, plain types only."""
    packed: bytes = _packer.pack(value)
    return packed


def encode_body(body: msgspec.Struct) -> bytes:
    """A body Struct as msgpack bytes.

    Raises:
        InvalidRequest: some text holds a lone surrogate, or some integer has more than 64 bits.
        RequestTooLarge: the body exceeds the protocol's limit.
    """
    try:
        packed = pack(msgspec.to_builtins(body, builtin_types=(bytes,)))
    except UnicodeEncodeError:
        raise InvalidRequest("the request holds a lone surrogate; send valid Unicode", param="prompt") from None
    except OverflowError:
        raise InvalidRequest("the request holds an integer of more than 64 bits", param="prompt") from None
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
    return Message(verb, request_id, unpack_map(header, "header"), body, raw, len(header))


def readable_id(frames: Sequence[bytes]) -> bytes:
    """The request id of a message that `decode` refused, for the answer; NO_ID where none can be told."""
    return frames[2] if len(frames) > 2 and len(frames[2]) == len(NO_ID) else NO_ID


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

    __slots__ = ("_ids", "_logprobs", "_prompt_lengths", "_rows", "_texts", "logprob_bytes")

    def __init__(self) -> None:
        self._rows: list[TokenRow] = []
        self._ids: list[bytes] = []
        self._texts: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._prompt_lengths: list[int] = []
        self.logprob_bytes = 0
        """Of all rows so far."""

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
        self._logprobs.append(delta.logprobs)
        self.logprob_bytes += len(delta.logprobs)
        self._prompt_lengths.append(delta.prompt_length)

    def to_frames(self, client: int | None = None) -> list[bytes]:
        """`client` is the broker's connection number, on the way from worker to broker."""
        request_id = self._rows[0].request_id if len(self._rows) == 1 else NO_ID
        header: dict[str, Any] = {"rows": self._rows}
        if client is not None:
            header["client"] = client
        raw = [b"".join(self._ids), b"".join(self._texts)]
        if self.logprob_bytes:
            header["logprob_bytes"] = list(map(len, self._logprobs))
            raw.append(b"".join(self._logprobs))
        if any(self._prompt_lengths):
            header["prompt_lengths"] = self._prompt_lengths
        return encode(Verb.TOKENS, request_id, header, raw=raw)


def token_rows(message: Message) -> list[tuple[bytes, int, int, int, int, str | None]]:
    """The rows of a TOKENS message, their fields in the order of TokenRow; raises ProtocolError when they do not add up
    with the raw frames."""
    if len(message.raw) not in (2, 3):
        raise ProtocolError("TOKENS needs two raw frames (token ids, text), or three (log-probabilities)")
    try:
        # In C: every generated token comes this way.
        header = msgspec.convert(message.header, _Tokens)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"TOKENS needs rows of [{', '.join(TokenRow._fields)}]: {error}") from None
    checked = header.rows
    ids, texts, logprobs = (*message.raw, b"")[:3]
    if header.logprob_bytes and len(header.logprob_bytes) != len(checked):
        raise ProtocolError("TOKENS has another number of logprob_bytes than rows")
    if header.prompt_lengths and len(header.prompt_lengths) != len(checked):
        raise ProtocolError("TOKENS has another number of prompt_lengths than rows")
    if sum(header.logprob_bytes) > len(logprobs):
        raise ProtocolError("TOKENS announces more log-probabilities than the raw frame holds")
    if 4 * sum(map(_num_tokens_of, checked)) > len(ids) or sum(map(_text_bytes_of, checked)) > len(texts):
        raise ProtocolError("TOKENS rows announce more ids or text than the raw frames hold")
    return checked


def iterate_tokens(message: Message) -> list[TokenDelta]:
    """The rows of a TOKENS message with what is theirs; raises ProtocolError when they do not add up."""
    rows = token_rows(message)
    ids, texts = message.raw[:2]
    deltas = []
    id_at = text_at = 0
    for request_id, seq, token_offset, num_tokens, text_bytes, finish_reason in rows:
        id_end, text_end = id_at + 4 * num_tokens, text_at + text_bytes
        deltas.append(
            TokenDelta(request_id, seq, token_offset, ids[id_at:id_end], texts[text_at:text_end], finish_reason)
        )
        id_at, text_at = id_end, text_end
    if sizes := message.header.get("logprob_bytes"):
        ends = list(accumulate(sizes, initial=0))
        logprobs = message.raw[2] if len(message.raw) > 2 else b""
        shares = [logprobs[begin:end] for begin, end in pairwise(ends)]
        deltas = [delta._replace(logprobs=share) for delta, share in zip(deltas, shares, strict=True)]
    if lengths := message.header.get("prompt_lengths"):
        deltas = [delta._replace(prompt_length=length) for delta, length in zip(deltas, lengths, strict=True)]
    return deltas


def _refuse_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"msgpack extension type {code} is not allowed")


def _path_of(error: msgspec.ValidationError) -> str | None:
    _, _, path = str(error).partition(" - at `$.")
    return path.rstrip("`").split("[")[0] or None


_packer = msgpack.Packer(use_bin_type=True, autoreset=True)
