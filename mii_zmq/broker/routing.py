# SPDX-License-Identifier: Apache-2.0
"""Which group takes a request, which request waits where, and when a refused one may come back. Pure functions.

A request goes to the group with the fewest outstanding tokens among those that are not draining and have room; equal
ones take turns. The order of waiting requests is priority, then admission, so that a retried request stands in front.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mii_zmq.broker.records import Group, Request

MAX_TOKENS = 2**31
"""No estimate counts for more, whatever a peer says."""
_BYTES_PER_TOKEN = 4
_DEFAULT_OUTPUT_TOKENS = 128
_MIN_RETRY_MS = 100
_MAX_RETRY_MS = 30_000


def choose_group(groups: Iterable[Group], request_id: bytes) -> Group | None:
    """The best group for the request, or None: all are full, draining, or still busy ending the same id."""
    best = None
    best_load = best_turn = sys.maxsize
    for group in groups:
        load = group.outstanding_tokens + group.unaccounted_tokens
        # The cheap comparison first: this runs for every request over all groups.
        if (
            load <= best_load
            and (load < best_load or group.last_picked < best_turn)
            and group.has_room
            and request_id not in group.barred
        ):
            best, best_load, best_turn = group, load, group.last_picked
    return best


def estimate_tokens(announced: int, num_body_bytes: int, num_resumed_tokens: int) -> int:
    """Tokens that a request will cost: what its sender announced, else a guess from the size of its body."""
    if announced > 0:
        return max(1, min(announced, MAX_TOKENS) - num_resumed_tokens)
    return num_body_bytes // _BYTES_PER_TOKEN + _DEFAULT_OUTPUT_TOKENS


def retry_after_ms(num_waiting: int, finished_per_s: float) -> int:
    """When a tenth of the queue will have been served, at the current rate."""
    if finished_per_s <= 0:
        return 1000
    return int(min(max(100 * num_waiting / finished_per_s, _MIN_RETRY_MS), _MAX_RETRY_MS))


class WaitingQueue:
    """Requests by (priority, order of admission). Leaving from the middle costs nothing: the entry stays behind,
    counted, and is dropped when it comes up or when more such entries than requests have gathered."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._waiting: set[Request] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._heap if request in self._waiting)

    def push(self, request: Request) -> None:
        self._waiting.add(request)
        heapq.heappush(self._heap, (request.priority, request.order, request))

    def pop(self) -> Request:
        """The first request; raises IndexError when none waits."""
        request = self.first()
        heapq.heappop(self._heap)
        self._waiting.remove(request)
        return request

    def first(self) -> Request:
        """The request that `pop` would return; raises IndexError when none waits."""
        while self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def discard(self, request: Request) -> None:
        """Take a request out, if it waits here."""
        self._waiting.discard(request)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)
