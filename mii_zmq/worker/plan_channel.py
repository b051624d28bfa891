# SPDX-License-Identifier: Apache-2.0
"""The messages from rank 0 to the other ranks of its group, and their bytes: an invitation, then numbered step plans.

A message is two frames, one kind byte and one msgpack value. A plan is encoded once and sent to every rank as the same
bytes; its step number is its sequence number. Nothing comes back this way: ranks answer on their announcement pipes.
Both ends are always of the same version, so nothing is negotiated.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgpack

from mii_zmq.errors import ProtocolError
from mii_zmq.protocol import pack
from mii_zmq.worker.plan import StepPlan, StepResult

MAX_MESSAGE_ITEMS = 2**26
_INVITATION, _PLAN = b"J", b"P"


def encode_invitation(fields: dict[str, Any]) -> list[bytes]:
    return [_INVITATION, pack(fields)]


def encode_plan(plan: StepPlan) -> list[bytes]:
    return [_PLAN, pack(plan.to_wire())]


def decode_invitation(frames: Sequence[bytes]) -> dict[str, Any]:
    """Raises ProtocolError for anything but an invitation."""
    value = _open(frames, _INVITATION)
    if not isinstance(value, dict):
        raise ProtocolError("rank 0 sent a malformed invitation")
    return value


def decode_plan(frames: Sequence[bytes]) -> StepPlan:
    """Raises ProtocolError for anything but a plan."""
    value = _open(frames, _PLAN)
    try:
        return StepPlan.from_wire(value)
    except (TypeError, ValueError, KeyError) as error:
        raise ProtocolError(f"rank 0 sent a malformed plan: {error}") from None


def result_digest(result: StepResult) -> int:
    """Equal for equal results: ranks that drew different tokens are found by it."""
    drawn = array("q", result.token_ids)
    drawn.extend(sorted(result.failed))
    return zlib.crc32(drawn.tobytes(), result.step & 0xFFFFFFFF)


def _open(frames: Sequence[bytes], wanted: bytes) -> Any:
    try:
        kind, data = frames
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0, max_array_len=MAX_MESSAGE_ITEMS)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message from rank 0 does not decode: {error}") from None
    if kind != wanted:
        raise ProtocolError(f"rank 0 sent a message of kind {kind!r} where {wanted!r} was due")
    return value
