# SPDX-License-Identifier: Apache-2.0
"""Random interleavings of clients, workers, losses and time against the state machine.

The workers are small models that run what they are told to and answer late; their messages wait in a queue per
connection and may arrive after the broker has given them up. Whatever happens: every request of a client that is still
there ends with exactly one terminal message and one span, streams have every token once and in order, over all groups
that worked on them, nothing is sent to a peer that is known to be gone, `max_requests` is kept, and in the end the
books are empty.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mii_zmq.broker.records import Action, Address, Note, ToClient, ToWorker
from mii_zmq.protocol import (
    FinalHeader,
    Load,
    Message,
    Ready,
    TokenDelta,
    TokenRows,
    Verb,
    WorkerHeartbeat,
    decode,
    encode,
    iterate_tokens,
)
from mii_zmq.spans import Span
from mii_zmq.trace_context import TraceContext
from mii_zmq.tracing import Tracing
from tests.broker.bench import Bench, packed, request_id

DEPLOYMENTS = ("m", "n")
GROUPS = ("g0", "g1", "g2")
CLIENTS = ("plain", "batch", "one-shot")
picks = st.integers(0, 2**16)


class ModelWorker:
    """One incarnation of a group, on one connection at a time."""

    def __init__(self, group: str, deployment: str, number: int, max_requests: int) -> None:
        self.group = group
        self.deployment = deployment
        self.incarnation = request_id(number)
        self.max_requests = max_requests
        self.address: Address = (b"w%d" % number,)
        self.moves = 0
        self.running: dict[bytes, list[int]] = {}
        """Request id to [client, next seq, stream, next token]."""
        self.outbox: deque[list[bytes]] = deque()
        self.is_draining = False

    def say_ready(self) -> None:
        ready = Ready(
            group=self.group,
            incarnation=self.incarnation,
            deployment=self.deployment,
            max_requests=self.max_requests,
            max_model_len=100,
            in_flight=list(self.running),
        )
        self.outbox.append(encode(Verb.READY, header=ready))

    def heartbeat(self) -> None:
        state = "draining" if self.is_draining else "ready"
        header = WorkerHeartbeat(incarnation=self.incarnation, state=state, load=Load(outstanding_tokens=5))
        self.outbox.append(encode(Verb.HEARTBEAT, header=header))

    def hear(self, message: Message) -> None:
        match message.verb:
            case Verb.GENERATE if self.is_draining:
                self.outbox.append(encode(Verb.ERROR, message.request_id, {"code": "draining", "message": ""}))
            case Verb.GENERATE:
                header = message.header
                resumed = list(memoryview(b"".join(message.raw)).cast("i"))
                assert resumed == list(range(len(resumed)))
                self.running[message.request_id] = [
                    header["client"], header["first_seq"], header.get("stream", False), len(resumed)
                ]  # fmt: skip
            case Verb.CANCEL:
                for cancelled in message.header.get("request_ids") or [message.request_id]:
                    if self.running.pop(cancelled, None):
                        self.outbox.append(encode(Verb.ERROR, cancelled, {"code": "cancelled", "message": ""}))
            case Verb.RESET_PREFIX_CACHE:
                self.outbox.append(encode(Verb.RESET_PREFIX_CACHE, message.request_id))
            case Verb.DISCONNECT if not any(frames[1][0] == Verb.READY for frames in self.outbox):
                self.say_ready()

    def step(self, ending: int | None) -> None:
        """A row for every stream; `ending` picks the request that finishes, if one does."""
        by_client: dict[int, TokenRows] = defaultdict(TokenRows)
        for running_id, state in self.running.items():
            if state[2]:
                ids = packed([state[3] + index for index in range(1 + state[1] % 2)])
                by_client[state[0]].add(TokenDelta(running_id, state[1], state[3], ids, b"x", None))
                state[1] += 1
                state[3] += len(ids) // 4
        self.outbox.extend(rows.to_frames(client) for client, rows in by_client.items())
        if self.running and ending is not None:
            ended = list(self.running)[ending % len(self.running)]
            del self.running[ended]
            self.outbox.append(encode(Verb.FINAL, ended, FinalHeader(finish_reason="stop")))


class Recorder:
    """An exporter that keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def decides(self, parent: TraceContext | None, trace_id: str, name: str) -> bool:
        return True

    def export(self, span: Span, end: float, offset_ns: int) -> None:
        assert end >= span.start
        self.spans.append(span)

    def close(self, timeout_s: float) -> None:
        pass


class ModelBench(Bench):
    """Keeps what the properties need: terminals and rows per connection and request, GENERATEs to workers."""

    def __init__(self) -> None:
        self.recorded = Recorder()
        super().__init__(Tracing(self.recorded), max_queued_requests=4, max_attempts=2, max_client_requests=6)
        self.attempts: list[str] = []
        """Spans that workers were told to be parts of."""
        self.workers: dict[Address, ModelWorker] = {}
        self.terminals: Counter[tuple[Address, bytes]] = Counter()
        self.next_seq: Counter[tuple[Address, bytes]] = Counter()
        self.num_tokens: Counter[tuple[Address, bytes]] = Counter()
        self.known_dead: set[Address] = set()
        self.given_up: set[Address] = set()
        """Clients that missed their heartbeats: what they had asked ended without a word."""

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Note):
                assert self.spans is not None
                self.spans.on_note(action, self.now)
                continue
            if isinstance(action, ToWorker) and (message := decode(action.frames)).verb is Verb.GENERATE:
                self.attempts.append(message.header["traceparent"])
            if action.address in self.dead:
                gone = self.state.client_gone if isinstance(action, ToClient) else self.state.worker_gone
                self.known_dead.add(action.address)
                self.perform(gone(action.address, self.now))
            elif isinstance(action, ToWorker):
                self.workers[action.address].hear(decode(action.frames))
            else:
                self.hear_as_client(action.address, decode(action.frames))

    def hear_as_client(self, where: Address, message: Message) -> None:
        if message.verb is Verb.TOKENS:
            for delta in iterate_tokens(message):
                key = (where, delta.request_id)
                assert self.terminals[key] == 0
                assert delta.seq == self.next_seq[key]
                assert delta.token_offset == self.num_tokens[key]
                ids = list(memoryview(delta.token_ids).cast("i"))
                assert ids == list(range(delta.token_offset, delta.token_offset + len(ids)))
                self.next_seq[key] += 1
                self.num_tokens[key] += len(ids)
        elif message.verb is Verb.DISCONNECT:
            self.given_up.add(where)
        elif message.verb in (Verb.FINAL, Verb.ERROR, Verb.RESET_PREFIX_CACHE) and (
            message.header.get("param") != "request_id"
        ):
            self.terminals[where, message.request_id] += 1


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = ModelBench()
        self.numbers = 0
        self.asked: list[tuple[Address, int]] = []
        self.asked_resets: list[tuple[Address, int]] = []
        self.clients: dict[str, Address] = {}
        for name in CLIENTS:
            self.connect_client(name)
        for group, deployment in (("g0", "m"), ("g1", "n"), ("g2", "m")):
            self.start_worker(group, deployment, 2)

    def connect_client(self, name: str) -> None:
        self.numbers += 1
        where = (b"%s%d" % (name.encode(), self.numbers), b"")
        self.clients[name] = where if name == "one-shot" else where[:1]
        if name == "batch":
            self.bench.client(self.clients[name], Verb.HELLO, None, {"batch": True})

    def pick_worker(self, pick: int) -> ModelWorker | None:
        workers = list(self.bench.workers.values())
        return workers[pick % len(workers)] if workers else None

    def deliver(self, worker: ModelWorker, count: int) -> None:
        for _ in range(min(count, len(worker.outbox))):
            frames = worker.outbox.popleft()
            self.bench.perform(self.bench.state.worker_message(worker.address, decode(frames), frames, self.bench.now))

    @rule(
        name=st.sampled_from(CLIENTS),
        deployment=st.sampled_from(DEPLOYMENTS),
        urgent=st.booleans(),
        stream=st.booleans(),
    )
    def generate(self, name: str, deployment: str, urgent: bool, stream: bool) -> None:
        self.numbers += 1
        where = self.clients[name]
        self.asked.append((where, self.numbers))
        self.bench.generate(
            where,
            self.numbers,
            deployment=deployment,
            stream=stream and name != "one-shot",
            priority=-urgent,
            deadline_ms=1500 if urgent else None,
        )

    @rule(pick=picks)
    def generate_again(self, pick: int) -> None:
        running = list(self.bench.state.requests.by_id.values())
        if running:
            request = running[pick % len(running)]
            self.bench.perform(
                self.bench.state.client_message(
                    request.client.address,
                    Message(Verb.GENERATE, request.request_id, {"deployment": "m"}),
                    self.bench.now,
                )
            )

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        if self.asked:
            where, number = self.asked[pick % len(self.asked)]
            if where in self.clients.values() and len(where) == 1:
                self.bench.client(where, Verb.CANCEL, number)

    @rule(name=st.sampled_from(CLIENTS), pick=picks, tenant=st.sampled_from(("", "", "t")))
    def abort(self, name: str, pick: int, tenant: str) -> None:
        """By anybody, of anybody's."""
        if self.asked:
            _, number = self.asked[pick % len(self.asked)]
            header = {"request_ids": [request_id(number)], "tenant": tenant}
            self.numbers += 1
            self.bench.client(self.clients[name], Verb.ABORT, self.numbers, header)
            assert tenant or request_id(number) not in self.bench.state.requests.by_id

    @rule(name=st.sampled_from(CLIENTS), deployment=st.sampled_from(DEPLOYMENTS))
    def reset_prefix_cache(self, name: str, deployment: str) -> None:
        self.numbers += 1
        self.asked_resets.append((self.clients[name], self.numbers))
        self.bench.client(self.clients[name], Verb.RESET_PREFIX_CACHE, self.numbers, {"deployment": deployment})

    @rule(name=st.sampled_from(CLIENTS), politely=st.booleans())
    def client_leaves(self, name: str, politely: bool) -> None:
        if politely:
            self.bench.client(self.clients[name], Verb.DISCONNECT)
        self.bench.dead.add(self.clients[name])
        self.connect_client(name)

    @rule(group=st.sampled_from(GROUPS), deployment=st.sampled_from(DEPLOYMENTS), room=st.integers(1, 3))
    def worker_starts(self, group: str, deployment: str, room: int) -> None:
        self.start_worker(group, deployment, room)

    def start_worker(self, group: str, deployment: str, room: int) -> None:
        self.numbers += 1
        worker = ModelWorker(group, deployment, self.numbers, room)
        self.bench.workers[worker.address] = worker
        worker.say_ready()
        self.deliver(worker, 1)

    @rule(pick=picks, ending=st.none() | picks, count=st.integers(0, 9), steps=st.integers(1, 3))
    def worker_steps(self, pick: int, ending: int | None, count: int, steps: int) -> None:
        worker = self.pick_worker(pick)
        if worker is not None:
            for _ in range(steps):
                worker.step(ending)
            self.deliver(worker, count)

    @rule(pick=picks, count=st.integers(1, 9))
    def messages_arrive(self, pick: int, count: int) -> None:
        worker = self.pick_worker(pick)
        if worker is not None:
            self.deliver(worker, count)

    @rule(pick=picks)
    def worker_dies(self, pick: int) -> None:
        worker = self.pick_worker(pick)
        if worker is not None and len(self.bench.workers) > 1:
            self.bench.dead.add(worker.address)
            del self.bench.workers[worker.address]

    @rule(pick=picks)
    def worker_reconnects(self, pick: int) -> None:
        worker = self.pick_worker(pick)
        if worker is not None:
            self.bench.dead.add(worker.address)
            del self.bench.workers[worker.address]
            worker.moves += 1
            worker.address = (worker.address[0] + b"'",)
            worker.outbox.clear()
            self.bench.workers[worker.address] = worker
            worker.say_ready()
            self.deliver(worker, 1)

    @rule(pick=picks)
    def worker_drains(self, pick: int) -> None:
        worker = self.pick_worker(pick)
        if worker is not None and not worker.is_draining:
            worker.is_draining = True
            worker.outbox.append(encode(Verb.DRAIN))

    @rule(
        seconds=st.sampled_from((0.1, 0.4, 0.9)),
        with_heartbeats=st.sampled_from((True, True, False)),
        times=st.integers(1, 5),
    )
    def time_passes(self, seconds: float, with_heartbeats: bool, times: int) -> None:
        for _ in range(times):
            self.bench.now += seconds
            if with_heartbeats:
                self.bench.client(self.clients["batch"], Verb.HEARTBEAT)
                for worker in list(self.bench.workers.values()):
                    worker.heartbeat()
                    self.deliver(worker, len(worker.outbox))
            self.bench.perform(self.bench.state.tick(self.bench.now))

    @invariant()
    def books_balance(self) -> None:
        state = self.bench.state
        state.check()
        for group in state.workers.by_address.values():
            assert len(group.requests) <= group.max_requests
        assert not {*state.clients.by_address, *state.workers.by_address} & self.bench.known_dead
        assert all(count <= 1 for count in self.bench.terminals.values())

    def teardown(self) -> None:
        for _ in range(40):
            self.time_passes(0.4, True, 1)
            for worker in list(self.bench.workers.values()):
                worker.step(0)
                self.deliver(worker, len(worker.outbox))
        for address in list(self.bench.workers):
            self.bench.dead.add(address)
            del self.bench.workers[address]
        self.time_passes(0.9, False, 30)
        state = self.bench.state
        self.books_balance()
        assert state.num_unfinished == 0
        assert state.requests.held_bytes == 0
        assert len(state.resets) == 0
        self.spans_are_complete()
        alive = set(self.clients.values()) - self.bench.given_up
        for where, number in self.asked + self.asked_resets:
            if where in alive:
                assert self.bench.terminals[where, request_id(number)] == 1, (where, number)

    def spans_are_complete(self) -> None:
        spans = self.bench.recorded.spans
        assert self.bench.spans is not None
        assert len(self.bench.spans) == 0
        requests = Counter(span.attributes["mii.wire_id"] for span in spans if span.parent is None)
        assert requests == Counter(request_id(number).hex() for _, number in self.asked)
        attempts = [span.context.traceparent for span in spans if span.name == "mii.broker.attempt"]
        assert sorted(attempts) == sorted(self.bench.attempts)
        whole = {span.context: span for span in spans}
        assert len(whole) == len(spans)
        for span in spans:
            assert span.parent is None or whole[span.parent].name == "mii.broker.request"


TestInterleavings = pytest.mark.slow(Interleavings.TestCase)
TestInterleavings.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)
