# SPDX-License-Identifier: Apache-2.0
"""The path of every generated token through the broker. Pure: actions come out.

A message whose rows are all current and belong to one client that takes batches goes out as it came, its frames
untouched. Otherwise the rows that count are sent on, one message each for a plain client. Rows beyond the client's
credit are withheld. All rows are checked before the first one has any effect. A request with a hole in its rows goes on
elsewhere, from what was forwarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mii_zmq.broker.credit import withhold
from mii_zmq.broker.records import Client, Group, Request
from mii_zmq.broker.requests import Requests
from mii_zmq.protocol import Message, TokenDelta, TokenRows, iterate_tokens
from mii_zmq.resume import HOLE, NEXT


def forward_tokens(requests: Requests, group: Group, message: Message, frames: Sequence[bytes], now: float) -> None:
    """Account the rows of a TOKENS message and pass them on; raises ProtocolError when they do not add up."""
    deltas = list(iterate_tokens(message))
    running = group.requests
    counters = requests.counters
    current: list[tuple[Request, TokenDelta]] = []
    beyond_credit: list[tuple[Request, TokenDelta]] = []
    gaps: dict[bytes, Request] = {}
    for delta in deltas:
        request = running.get(delta.request_id)
        if request is None or not request.stream or delta.seq < request.next_seq or delta.request_id in gaps:
            continue
        place = HOLE
        if delta.seq == request.next_seq:
            place = request.delivered.take(delta.token_offset, delta.token_ids, delta.finish_reason)
        if place is NEXT:
            request.next_seq += 1
            num_tokens = min(len(delta.token_ids) // 4, request.remaining_tokens)
            request.remaining_tokens -= num_tokens
            group.outstanding_tokens -= num_tokens
            if request.credit > 0:
                request.credit -= 1
                current.append((request, delta))
            else:
                beyond_credit.append((request, delta))
        elif place is HOLE:
            gaps[delta.request_id] = request
    counters.dropped_rows += len(deltas) - len(current) - len(beyond_credit)
    requests.held_bytes += sum(len(delta.token_ids) for _, delta in beyond_credit)
    if current:
        num_bytes = sum(len(delta.token_ids) for _, delta in current)
        counters.forwarded_tokens += num_bytes // 4
        requests.held_bytes += num_bytes
        client = current[0][0].client
        if client.batch and len(current) == len(deltas) and all(request.client is client for request, _ in current):
            requests.send(client, frames)
        else:
            _split(requests, current)
    for request, delta in beyond_credit:
        # Those before it may have been too much already.
        if request.group is group:
            withhold(requests, request, delta, now)
    if gaps:
        _retry(requests, group, gaps.values(), now)


def _retry(requests: Requests, group: Group, gaps: Iterable[Request], now: float) -> None:
    for request in gaps:
        if request.group is group:
            requests.cancel_at(group, [request.request_id], now)
            requests.retry(request, "a part of its output was lost between worker and broker")
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
