# SPDX-License-Identifier: Apache-2.0
"""The messages on the private channel between the actor and its engine process, and their bytes.

A message is two frames: one kind byte and one msgpack value; prompts travel as int32 arrays, a step's rows as plain
lists. Both ends are always of the same version, so nothing is negotiated; a message that does not decode is a bug
(`ProtocolError`) and ends the group. Knows neither sockets nor processes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgpack
import msgspec

from mii_zmq.errors import MiiError, ProtocolError, from_wire
from mii_zmq.protocol import Load, pack
from mii_zmq.worker.plan import EngineLimits, SamplingSpec, SequenceRequest

MAX_MESSAGE_ITEMS = 2**24
LOAD_FIELDS = Load.__struct_fields__


WireLogprobs: TypeAlias = tuple[float, int, Sequence[int], Sequence[float]]
"""The values of a plan.TokenLogprobs."""


class OutputRow(NamedTuple):
    """One sequence's output of one step (plan.SequenceOutput), with errors in their wire form."""

    seq_id: int
    token_ids: Sequence[int]
    finish_reason: str | None
    num_cached_tokens: int
    error: dict[str, Any] | None
    """`MiiError.to_wire`, with finish_reason 'error'."""
    logprobs: Sequence[WireLogprobs] | None = None
    """One for each of `token_ids`, where the request asked."""
    prompt_scores: Sequence[WireLogprobs] | None = None
    """With the first tokens of a request that asked: of prompt tokens 1, 2, ..."""
    timing: tuple[float, int] | None = None
    """As in plan.SequenceOutput."""
    pooled: bytes | None = None
    """Of a prompt that is pooled, on its only row: float32, little endian."""


@dataclass(frozen=True, slots=True)
class AddSequence:
    """To the engine: generate for this sequence. Answered by rows, the last of which has a finish reason."""

    request: SequenceRequest


@dataclass(frozen=True, slots=True)
class CancelSequences:
    """To the engine: end these with finish reason 'cancelled'; ids that ended before are ignored."""

    seq_ids: list[int]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """To the engine: forget all cached prefixes; answered by PrefixCacheReset with the same number."""

    number: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """To the engine: exit now with code 0, whatever is running."""


@dataclass(frozen=True, slots=True)
class Progress:
    """From the engine, while loading."""

    text: str
    fraction: float


@dataclass(frozen=True, slots=True)
class ModelResolved:
    """From the engine: the model's directory is complete, so that the actor can read the tokenizer meanwhile."""

    path: str


@dataclass(frozen=True, slots=True)
class EngineReady:
    """From the engine: loaded; from now on it takes sequences and reports."""

    limits: EngineLimits
    info: dict[str, Any] = field(default_factory=dict)
    """Facts for people: device, memory. Plain msgpack types."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """From the engine's loop after a step, and at a fixed interval when there is nothing to do."""

    step: int
    """Counts the loop's steps; unchanged while idle."""
    rows: Sequence[OutputRow | tuple[Any, ...]]
    """In the order of OutputRow; plain tuples once decoded."""
    load: Sequence[int | float]
    """The values of protocol.Load, in the order of its fields."""
    awaits_masks: bool = False
    """Its sequences all wait for masks of their grammars, so that there is no step to run."""
    times: dict[str, Any] | None = None
    """Now and then: step_times.StepTimes.values."""


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """From the engine: no prefix that was cached before is found any more."""

    number: int


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """From the engine, its last message: it cannot start, or it cannot go on."""

    error: MiiError


ToEngine: TypeAlias = AddSequence | CancelSequences | ResetPrefixCache | Shutdown
FromEngine: TypeAlias = Progress | ModelResolved | EngineReady | StepReport | PrefixCacheReset | EngineFailed

_KINDS: dict[type[Any], bytes] = {
    AddSequence: b"A", CancelSequences: b"C", ResetPrefixCache: b"R", Shutdown: b"Q",
    Progress: b"p", ModelResolved: b"m", EngineReady: b"r", StepReport: b"s", PrefixCacheReset: b"e",
    EngineFailed: b"f",
}  # fmt: skip


def encode(message: ToEngine | FromEngine) -> list[bytes]:
    """The two frames of a message."""
    value: Any
    match message:
        case StepReport(step, rows, load, awaits_masks, times):
            value = (step, rows, load, awaits_masks) if times is None else (step, rows, load, awaits_masks, times)
        case AddSequence(request):
            value = _sequence_to_wire(request)
        case CancelSequences(seq_ids):
            value = seq_ids
        case ResetPrefixCache(number) | PrefixCacheReset(number):
            value = number
        case Shutdown():
            value = None
        case Progress(text, fraction):
            value = (text, fraction)
        case ModelResolved(path):
            value = path
        case EngineReady(limits, info):
            value = (asdict(limits), info)
        case EngineFailed(error):
            value = error.to_wire()
    return [_KINDS[type(message)], pack(value)]


def decode_to_engine(frames: Sequence[bytes]) -> ToEngine:
    """Raises ProtocolError for anything that `encode` does not make."""
    kind, value = _open(frames)
    try:
        if kind == b"A":
            return AddSequence(_sequence_from_wire(value))
        if kind == b"C":
            return CancelSequences(list(value))
        if kind == b"R":
            return ResetPrefixCache(int(value))
        if kind == b"Q":
            return Shutdown()
    except (TypeError, ValueError, KeyError) as error:
        raise _malformed(kind, error) from None
    raise ProtocolError(f"the engine got a message of unknown kind {kind!r} from its actor")


def decode_from_engine(frames: Sequence[bytes]) -> FromEngine:
    """Raises ProtocolError for anything that `encode` does not make."""
    kind, value = _open(frames)
    try:
        if kind == b"s":
            return StepReport(*value)
        if kind == b"p":
            return Progress(*value)
        if kind == b"m":
            return ModelResolved(value)
        if kind == b"r":
            limits, info = value
            return EngineReady(EngineLimits(**limits), info)
        if kind == b"e":
            return PrefixCacheReset(int(value))
        if kind == b"f":
            return EngineFailed(from_wire(value))
    except (TypeError, ValueError, KeyError) as error:
        raise _malformed(kind, error) from None
    raise ProtocolError(f"the actor got a message of unknown kind {kind!r} from its engine")


def load_values(load: Load) -> tuple[int | float, ...]:
    """The wire form of a Load inside a StepReport."""
    return msgspec.structs.astuple(load)


def load_from_values(values: Sequence[int | float]) -> Load:
    """The Load that `load_values` took apart."""
    return msgspec.convert(dict(zip(LOAD_FIELDS, values, strict=True)), Load)


def ids_to_bytes(token_ids: Iterable[int]) -> bytes:
    """int32, little endian: the form of token ids in raw frames."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def ids_from_bytes(data: bytes) -> list[int]:
    """The ids in a raw frame; raises ValueError when it does not hold whole int32 numbers."""
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _open(frames: Sequence[bytes]) -> tuple[bytes, Any]:
    try:
        kind, data = frames
        value = msgpack.unpackb(
            data, raw=False, use_list=False, strict_map_key=True, max_ext_len=0, max_array_len=MAX_MESSAGE_ITEMS
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message between actor and engine does not decode: {error}") from None
    return kind, value


def _malformed(kind: bytes, error: Exception) -> ProtocolError:
    return ProtocolError(f"a message of kind {kind!r} between actor and engine is malformed: {error}")


def _sequence_to_wire(request: SequenceRequest) -> tuple[Any, ...]:
    return (
        request.seq_id,
        ids_to_bytes(request.prompt_token_ids),
        request.max_new_tokens,
        asdict(request.sampling),
        ids_to_bytes(request.resumed_token_ids),
        request.priority,
        request.deadline_s,
        request.cache_salt,
        request.score_prompt,
        request.grammar,
        request.grammar_lead,
    )


def _sequence_from_wire(value: Sequence[Any]) -> SequenceRequest:
    seq_id, prompt, max_new_tokens, sampling, resumed, priority, deadline_s, cache_salt, score_prompt, *rest = value
    grammar, grammar_lead = rest
    return SequenceRequest(
        seq_id=seq_id,
        prompt_token_ids=ids_from_bytes(prompt),
        max_new_tokens=max_new_tokens,
        sampling=SamplingSpec.from_wire(sampling),
        resumed_token_ids=ids_from_bytes(resumed),
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
        score_prompt=score_prompt,
        grammar=grammar,
        grammar_lead=grammar_lead,
    )
