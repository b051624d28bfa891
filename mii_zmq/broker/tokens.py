# SPDX-License-Identifier: Apache-2.0
"""The path of every generated token through the broker. Pure: actions come out.

A message whose rows are all current and belong to one client that takes batches goes out as it came, its frames
untouched: nothing is cut out of it but the ids that have to be remembered. Otherwise the rows that count are sent on,
one message each for a plain client. Rows beyond the client's credit are withheld. All rows are checked before the first
one has any effect. A request with a hole in its rows goes on elsewhere, from what was forwarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mii_zmq.broker.credit import withhold
from mii_zmq.broker.losses import retry
from mii_zmq.broker.records import Client, Group, Request
from mii_zmq.broker.requests import Requests
from mii_zmq.protocol import Message, TokenDelta, TokenRows, iterate_tokens, token_rows
from mii_zmq.resume import PAST


def forward_tokens(requests: Requests, group: Group, message: Message, frames: Sequence[bytes], now: float) -> None:
    """Account the rows of a TOKENS message and pass them on; raises ProtocolError when they do not add up."""
    rows = token_rows(message)
    ids = message.raw[0]
    running = group.requests
    keeps = requests.limits.resume
    taken: list[Request | None] = []
    """By row; None: it does not count."""
    sole: Client | None = None
    is_whole = True
    id_end = num_taken = num_estimated = 0
    for request_id, seq, token_offset, num_tokens, _, finish_reason in rows:
        id_begin = id_end
        id_end += 4 * num_tokens
        request = running.get(request_id)
        if request is None or seq != request.next_seq or not request.stream:
            taken.append(None)
            continue
        delivered = request.delivered
        if keeps:
            # As `Delivered.take` does; the call would be a tenth of what a token costs here.
            if token_offset != delivered.num_tokens or delivered.finish_reason is not None:
                taken.append(None)
                continue
            delivered.token_ids += ids[id_begin:id_end]
            delivered.finish_reason = finish_reason
        delivered.num_tokens = token_offset + num_tokens
        taken.append(request)
        request.next_seq = seq + 1
        num_taken += num_tokens
        num_left = request.estimated_end - token_offset
        if num_left > 0:
            num_estimated += min(num_tokens, num_left)
        if request.client is not sole:
            is_whole = is_whole and sole is None
            sole = request.client
        if seq >= request.credit_end:
            is_whole = False
    group.outstanding_tokens -= num_estimated
    requests.held_bytes += 4 * num_taken * keeps
    if sole is not None and is_whole and sole.batch and None not in taken:
        requests.counters.forwarded_tokens += num_taken
        requests.send(sole, frames)
    else:
        deltas = iterate_tokens(message)
        gaps = [
            delta for request, delta in zip(taken, deltas, strict=True) if request is None and _is_gap(group, delta)
        ]
        _forward_apart(requests, group, zip(taken, deltas, strict=True), now)
        _retry_behind_gaps(requests, group, gaps, now)


def _is_gap(group: Group, delta: TokenDelta) -> bool:
    """Whether a row does not count because one before it is missing."""
    request = group.requests.get(delta.request_id)
    if request is None or not request.stream or delta.seq < request.next_seq:
        return False
    return delta.seq > request.next_seq or request.delivered.place_of(delta.token_offset) is not PAST


def _forward_apart(
    requests: Requests, group: Group, rows: Iterable[tuple[Request | None, TokenDelta]], now: float
) -> None:
    """Send, withhold or drop each row for itself."""
    current: list[tuple[Request, TokenDelta]] = []
    beyond_credit: list[tuple[Request, TokenDelta]] = []
    for request, delta in rows:
        if request is None:
            requests.counters.dropped_rows += 1
        elif delta.seq < request.credit_end:
            requests.counters.forwarded_tokens += len(delta.token_ids) // 4
            current.append((request, delta))
        else:
            beyond_credit.append((request, delta))
    _split(requests, current)
    for request, delta in beyond_credit:
        # Those before it may have been too much already.
        if request.group is group:
            withhold(requests, request, delta, now)


def _retry_behind_gaps(requests: Requests, group: Group, gaps: Iterable[TokenDelta], now: float) -> None:
    """Let requests go on elsewhere of which a row is missing."""
    has_lost = False
    for delta in gaps:
        request = group.requests.get(delta.request_id)
        if request is not None:
            has_lost = True
            requests.cancel_at(group, [request.request_id], now)
            retry(requests, request, "a part of its output was lost between worker and broker")
    if has_lost:
        requests.dispatch(group.deployment, now)


def _split(requests: Requests, current: list[tuple[Request, TokenDelta]]) -> None:
    """One message per batching client, one per row for the others."""
    batches: dict[Client, TokenRows] = {}
    for request, delta in current:
        rows = batches.setdefault(request.client, TokenRows()) if request.client.batch else TokenRows()
        rows.add(delta)
        if not request.client.batch:
            requests.send(request.client, rows.to_frames())
    for client, rows in batches.items():
        requests.send(client, rows.to_frames())
