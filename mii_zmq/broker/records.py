# SPDX-License-Identifier: Apache-2.0
"""What the broker remembers: clients, worker groups, deployments and requests. Data only, no decisions.

An address is the tuple of routing frames in front of every message to a peer. It is a key and never shown: not in
logs, not in STATUS, not to other peers.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mii_zmq.broker.admission import DrainRate, Tenants
from mii_zmq.broker.credit import UNLIMITED, Withheld
from mii_zmq.broker.waiting import WaitingQueue
from mii_zmq.protocol import HistogramValues, Load
from mii_zmq.resume import Delivered
from mii_zmq.telemetry import REQUEST_S, Histogram
from mii_zmq.trace_context import TraceContext

Address = tuple[bytes, ...]


class ToClient(NamedTuple):
    """Action: send this message to a client."""

    address: Address
    frames: Sequence[bytes]


class ToWorker(NamedTuple):
    """Action: send this message to a worker."""

    address: Address
    frames: Sequence[bytes]


class Note(NamedTuple):
    """Action: remember this for the trace of a request; only of requests that are traced."""

    trace: str
    """The request's span, as a traceparent."""
    event: str
    """'assigned', 'retried', 'finished' or 'failed', and at last 'ended'."""
    facts: Mapping[str, str | int]


Action = ToClient | ToWorker | Note


class RequestState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DELIVERING = "delivering"
    """Complete; the end of it waits for credit."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Client:
    """One connection, from its first message until it is gone."""

    number: int
    address: Address
    last_seen: float
    said_hello: bool = False
    """Only then it sends heartbeats, and its silence means something."""
    name: str = ""
    batch: bool = False
    credit: int = UNLIMITED
    """Rows of each new request that it takes before it grants more."""
    requests: dict[bytes, Request] = field(default_factory=dict)
    last_asked: float = 0.0

    @property
    def is_one_shot(self) -> bool:
        """A REQ socket (its messages carry an empty delimiter): exactly one reply per message."""
        return len(self.address) > 1


@dataclass(slots=True, eq=False)
class Group:
    """One registered incarnation of a worker group."""

    name: str
    incarnation: bytes
    address: Address
    deployment: Deployment
    max_requests: int
    max_model_len: int
    info: dict[str, Any]
    registered_at: float
    last_seen: float
    is_draining: bool = False
    load: Load = field(default_factory=Load)
    histograms: dict[str, HistogramValues] = field(default_factory=dict)
    """As its last heartbeat had them."""
    requests: dict[bytes, Request] = field(default_factory=dict)
    barred: dict[bytes, float] = field(default_factory=dict)
    """Request ids that may not be sent here, and since when: cancelled, and the last word on them not yet heard."""
    outstanding_tokens: int = 0
    """Estimated tokens of the requests here that were not forwarded yet."""
    unaccounted_tokens: int = 0
    """What the last heartbeat reported beyond that: another broker's requests, or estimates that were too low."""
    last_picked: int = 0
    last_asked: float = 0.0
    suspects: set[Request] = field(default_factory=set)
    """Requests here that were part of a crash and have not got beyond it yet."""
    held_for: Request | None = None
    """Nobody but this suspect may be sent here; it waits for the rest to finish, or runs."""

    @property
    def has_room(self) -> bool:
        return not self.is_draining and self.held_for is None and len(self.requests) < self.max_requests


@dataclass(slots=True, eq=False)
class Deployment:
    """A name under which groups serve; remembered after its last group is gone."""

    name: str
    last_ready: float
    """When a group last stood ready; kept up to date by every tick and every loss."""
    groups: dict[str, Group] = field(default_factory=dict)
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    was_served: bool = True
    """False: no group has registered yet; the broker has just started and waits for one."""
    num_finished: int = 0
    """Since the last tick."""
    finished_per_s: float = 0.0
    drain_rate: DrainRate = field(default_factory=DrainRate)
    tenants: Tenants = field(default_factory=Tenants)
    queue_time: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    """Seconds from acceptance to the first group."""

    @property
    def is_ready(self) -> bool:
        return any(not group.is_draining for group in self.groups.values())


@dataclass(slots=True, eq=False)
class Request:
    """An accepted request; it ends with exactly one terminal message, unless its client is gone."""

    request_id: bytes
    client: Client
    deployment: Deployment
    header: dict[str, Any]
    """As the client sent it, unknown keys included."""
    body: bytes
    raw: Sequence[bytes]
    stream: bool
    priority: int
    order: int
    """Number of admission: a retried request stands in front of everything that came later."""
    accepted_at: float
    num_tokens: int
    """Estimate at admission."""
    num_bytes: int
    tenant: str = ""
    deadline: float | None = None
    credit_end: int = UNLIMITED
    """Rows with a `seq` below this may be sent: the client has granted so many."""
    withheld: Withheld | None = None
    """What waits for credit; the credit is used up then."""
    state: RequestState = RequestState.WAITING
    group: Group | None = None
    assigned_at: float = 0.0
    attempt: int = 0
    """How many groups had it before."""
    next_seq: int = 0
    delivered: Delivered = field(default_factory=Delivered)
    assigned_tokens: int = 0
    """Output tokens that the client had when the request was given to its group."""
    crashes: int = 0
    """Groups that died with it in turn, without its having got on in between."""
    is_apart: bool = False
    """It may be what the groups died of: no other suspect is sent where it runs."""
    suspected_at: float = 0.0
    trace: TraceContext | None = None
    """Its span, if it is traced."""
    longest_run_s: float = 0.0
    """Of the times that it ran on groups until they died."""
    estimated_end: int = field(init=False)
    """Output tokens at which the estimate is used up."""

    def __post_init__(self) -> None:
        self.estimated_end = self.delivered.num_tokens + self.num_tokens

    @property
    def remaining_tokens(self) -> int:
        """The estimate, minus what was forwarded."""
        return max(0, self.estimated_end - self.delivered.num_tokens)


@dataclass(slots=True)
class Counters:
    """Since the start of the broker; STATUS shows them all."""

    accepted: int = 0
    refused: int = 0
    retries: int = 0
    cancelled: int = 0
    cancellations: Counter[str] = field(default_factory=Counter)
    """The same by what the request was doing."""
    forwarded_tokens: int = 0
    forwarded_messages: int = 0
    resumes: int = 0
    """Requests given to another group with output that their clients have."""
    resumed_tokens: int = 0
    """Output tokens that these groups were given to replay."""
    quarantined: int = 0
    """Requests ended and barred because groups died of them."""
    poison_refusals: int = 0
    """Requests refused because they are barred."""
    merged_rows: int = 0
    """Rows that were sent in place of several, for want of credit."""
    slow_consumers: int = 0
    """Requests ended because nobody read their output."""
    dropped_rows: int = 0
    """Rows and terminal messages for requests that ended, or that run elsewhere by now."""
    fenced: int = 0
    """Messages of workers that were not registered."""
    malformed: int = 0
    groups_lost: int = 0
    clients_lost: int = 0
    router_full: int = 0
    router_unroutable: int = 0
    slow_peers: int = 0
    rejections: Counter[str] = field(default_factory=Counter)
    """Refused requests by reason: which bound, or the error's code."""
    finished: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
