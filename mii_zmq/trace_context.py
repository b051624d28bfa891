# SPDX-License-Identifier: Apache-2.0
"""W3C trace context: which trace a request belongs to, and which span of it is the parent of what comes next. Pure.

Travels as the HTTP headers `traceparent` and `tracestate`, and as the GENERATE header keys of the same names. What does
not parse counts as absent, as the standard wants it: a caller's broken trace is no reason to refuse its request.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import NamedTuple

MAX_STATE_CHARS = 512
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""A caller's own name of a request (x-request-id) that may stand in logs and headers."""
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[ -~]*")


class TraceContext(NamedTuple):
    """A span as others refer to it."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    is_sampled: bool
    """Spans of this trace are recorded."""
    state: str = ""
    """`tracestate`: other systems' entries, passed on as they are."""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return self._replace(span_id=new_span_id())

    def derived(self, number: int) -> TraceContext:
        """The `number`-th span below this one: always the same, so that who passes it on and who records it need not
        tell each other."""
        seed = f"{self.trace_id}{self.span_id}{number}".encode()
        return self._replace(span_id=hashlib.blake2b(seed, digest_size=8).hexdigest())


def parse(traceparent: object, tracestate: object = "") -> TraceContext | None:
    """None for anything but a valid traceparent; an invalid tracestate is left out."""
    found = _PARENT.fullmatch(traceparent) if isinstance(traceparent, str) and len(traceparent) <= 256 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    # Version 0 ends here; later ones may go on, and ff is forbidden.
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    is_state = isinstance(tracestate, str) and len(tracestate) <= MAX_STATE_CHARS and _STATE.fullmatch(tracestate)
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1), str(tracestate) if is_state else "")


def new_trace_id() -> str:
    return secrets.token_hex(16)


def new_span_id() -> str:
    return secrets.token_hex(8)


def request_name(given: object, request_id: bytes) -> str:
    """How logs name a request: as its caller does where that is harmless, else by its id."""
    return given if isinstance(given, str) and REQUEST_ID.fullmatch(given) else request_id.hex()
