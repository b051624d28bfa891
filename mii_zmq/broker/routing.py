# SPDX-License-Identifier: Apache-2.0
"""Which group takes a request, what a request will cost, and when a refused one may come back. Pure functions.

A request goes to the group with the fewest outstanding tokens among those that are not draining and have room; equal
ones take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mii_zmq.broker.records import Group

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
    """When a tenth of the queue (in requests, or in tokens) will have been served, at this rate."""
    if finished_per_s <= 0:
        return 1000
    return int(min(max(100 * num_waiting / finished_per_s, _MIN_RETRY_MS), _MAX_RETRY_MS))
