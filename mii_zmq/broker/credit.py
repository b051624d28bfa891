# SPDX-License-Identifier: Apache-2.0
"""Output for readers that read more slowly than it comes. Pure: the clock is injected, actions come out.

A client that announced credit is sent that many rows of each request; what comes beyond is withheld and merged: ids,
text and log-probabilities are appended, so that one row waits, however long. The next grant sends it. A reader that
grants nothing for too long, or lets too much gather, is cut: the request ends with `slow_consumer`. When the output is
complete, the group is free at once, and the terminal message waits behind the row. A request that ends by an error does
not wait: withheld output is dropped, its reader not having been told of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mii_zmq.errors import SlowConsumer
from mii_zmq.protocol import TokenDelta, TokenRows

if TYPE_CHECKING:
    from mii_zmq.broker.records import Request
    from mii_zmq.broker.requests import Requests

UNLIMITED = 2**62
"""The credit of clients that announced none."""


class Withheld:
    """The rows of one request that wait for credit, as one row: it begins at the first one's offset, and has the last
    one's sequence number."""

    __slots__ = (
        "_logprobs",
        "_text",
        "_token_ids",
        "finish_reason",
        "prompt_length",
        "seq",
        "terminal",
        "token_offset",
    )

    def __init__(self, first: TokenDelta) -> None:
        self.token_offset = first.token_offset
        self._token_ids = bytearray()
        self._text = bytearray()
        self._logprobs = bytearray()
        self.seq = first.seq
        self.finish_reason: str | None = None
        self.prompt_length = 0
        self.terminal: Sequence[bytes] | None = None
        """The encoded FINAL, when it has come already."""
        self.add(first)

    @property
    def num_bytes(self) -> int:
        return len(self._token_ids) + len(self._text) + len(self._logprobs)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids) // 4

    def add(self, delta: TokenDelta) -> None:
        """Append the row that follows."""
        self._token_ids += delta.token_ids
        self._text += delta.text
        self._logprobs += delta.logprobs
        self.seq = delta.seq
        self.finish_reason = delta.finish_reason
        self.prompt_length = delta.prompt_length or self.prompt_length

    def merged(self, request_id: bytes) -> TokenDelta:
        ids, text, logprobs = bytes(self._token_ids), bytes(self._text), bytes(self._logprobs)
        reason, length = self.finish_reason, self.prompt_length
        return TokenDelta(request_id, self.seq, self.token_offset, ids, text, reason, logprobs, length)


def withhold(requests: Requests, request: Request, delta: TokenDelta, now: float) -> None:
    """Keep a row for which the reader has given no credit."""
    num_bytes = len(delta.token_ids) + len(delta.text) + len(delta.logprobs)
    requests.held_bytes += num_bytes
    if request.withheld is None:
        request.withheld = Withheld(delta)
        requests.starving[request] = now
    else:
        request.withheld.add(delta)
    if request.withheld.num_bytes > requests.limits.slow_reader_bytes:
        _cut(requests, request, f"{request.withheld.num_bytes} bytes of output wait for credit", now)


def grant(requests: Requests, request: Request, credit: int) -> None:
    """The reader takes `credit` more rows: send what waits for that."""
    withheld, request.withheld = request.withheld, None
    if withheld is None:
        request.credit_end = min(request.credit_end + credit, UNLIMITED)
        return
    del requests.starving[request]
    requests.held_bytes -= withheld.num_bytes
    # What was withheld counts as one row.
    request.credit_end = request.next_seq + credit - 1
    rows = TokenRows()
    rows.add(withheld.merged(request.request_id))
    requests.counters.merged_rows += 1
    requests.counters.forwarded_tokens += withheld.num_tokens
    requests.send(request.client, rows.to_frames())
    if withheld.terminal is not None:
        requests.complete(request, withheld.terminal)


def num_emitted(request: Request) -> int:
    """Output tokens that the client has: those that it came with, and those that it was sent."""
    num_withheld = 0 if request.withheld is None else request.withheld.num_tokens
    return request.delivered.num_tokens - num_withheld


def cut_slow_readers(requests: Requests, now: float) -> None:
    """End requests whose readers have granted nothing for too long; `starving` is ordered by time."""
    limit_s = requests.limits.slow_reader_s
    for request, since in list(requests.starving.items()):
        if now - since <= limit_s:
            break
        # The dispatch that follows the end of one may have ended others.
        if request.withheld is not None:
            _cut(requests, request, f"its output has waited for credit for {now - since:.0f} s", now)


def _cut(requests: Requests, request: Request, why: str, now: float) -> None:
    requests.counters.slow_consumers += 1
    requests.cancel([request], SlowConsumer(f"the reader of this request is too slow: {why}; read faster"), now)
