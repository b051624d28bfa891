# SPDX-License-Identifier: Apache-2.0
"""The actor's event loop side: requests from the brokers in, rows from the engine through the text streams and out.

Every request that was taken ends with exactly one terminal message and leaves no state behind; what goes wrong with
one never touches another. Requests wait for nothing here but the tokenizer threads: queueing is the broker's and the
scheduler's. Messages that a broker does not take end the request's generation; the link then registers again, and the
broker, not finding the request among those in flight, continues it elsewhere from what it has delivered.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mii_zmq import transport
from mii_zmq.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    MiiError,
    RequestTooLarge,
    WorkerLost,
)
from mii_zmq.protocol import (
    MAX_BODY_BYTES,
    MAX_RAW_BYTES,
    Cancel,
    FinalHeader,
    GenerateHeader,
    Load,
    Message,
    Ready,
    TokenRows,
    Verb,
    WorkerHeartbeat,
    encode,
    parse_header,
)
from mii_zmq.trace_context import request_name
from mii_zmq.worker.active_request import ActiveRequest, RequestTimes
from mii_zmq.worker.broker_link import BrokerLink
from mii_zmq.worker.engine_channel import LOAD_FIELDS, OutputRow, StepReport, load_from_values, load_values
from mii_zmq.worker.engine_handle import EngineHandle
from mii_zmq.worker.intake import Intake, Prepared
from mii_zmq.worker.request_accounts import LOST, RequestAccounts, about
from mii_zmq.worker.text_tasks import TextAnswer
from mii_zmq.worker.watchdog import Watchdog

ORDINARY_ENDS = (None, "stop", "length")
WATCH_S = 0.25
MAX_LOGPROB_BYTES = 4 * 2**20
"""In one message, beyond which the step's other rows travel in another one."""
RUNNING, WAITING = LOAD_FIELDS.index("running"), LOAD_FIELDS.index("waiting")

log = logging.getLogger(__name__)

Key = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Outbox:
    """The rows of one step for one client connection."""

    rows: TokenRows
    requests: list[ActiveRequest]


class Actor:
    """Requests of one worker group. Belongs to its event loop; only `_prepare` runs in the tokenizer threads."""

    def __init__(
        self,
        engine: EngineHandle,
        intake: Intake,
        registration: Ready,
        tokenizer_threads: int,
        watchdog: Watchdog,
        accounts: RequestAccounts,
    ) -> None:
        self.is_draining = False
        self.drain_requested = asyncio.Event()
        """Set when a broker asks the group to drain."""
        self.links: list[BrokerLink] = []
        self._engine = engine
        self._intake = intake
        self._registration = registration
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(tokenizer_threads, thread_name_prefix="tokenizer")
        self._seq_ids = itertools.count(1)
        self._by_id: dict[Key, ActiveRequest] = {}
        self._by_seq: dict[int, ActiveRequest] = {}
        self._resets: dict[int, tuple[BrokerLink, bytes]] = {}
        """Of the prefix cache, that the engine has yet to answer."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_report = time.monotonic()
        self._report = StepReport(0, (), load_values(Load()))
        self._accounts = accounts
        self._watchdog = watchdog
        self._is_engine_stalled = False
        self._watch_timer = self._loop.call_soon(self._watch)

    @property
    def num_requests(self) -> int:
        return len(self._by_id)

    async def wait_idle(self) -> None:
        """Return when no request is left."""
        await self._idle.wait()

    def start_draining(self) -> None:
        """Take no new requests, and tell the brokers."""
        self.is_draining = True
        for link in self.links:
            if link.registered.is_set():
                link.send(encode(Verb.DRAIN))

    def close(self, reason: str) -> None:
        """Leave the brokers; they retry what is still in flight."""
        self._watch_timer.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for link in self.links:
            link.close(reason)

    def ready(self, link: int) -> Ready | None:
        """The registration for a broker, with the requests of its own that still run."""
        if self.is_draining:
            return None
        self._registration.in_flight = [request_id for index, request_id in self._by_id if index == link]
        return self._registration

    def heartbeat(self) -> WorkerHeartbeat | None:
        """The group's state with the engine's last load; None while the engine does not get on."""
        if self._is_engine_stalled:
            return None
        return WorkerHeartbeat(
            incarnation=self._registration.incarnation,
            state="draining" if self.is_draining else "ready",
            load=load_from_values(self._report.load),
            report_age_ms=int(1000 * (time.monotonic() - self._last_report)),
            histograms=self._accounts.histograms(),
        )

    def _watch(self) -> None:
        watchdog = self._watchdog
        watchdog.tick(time.monotonic(), bool(self._by_seq))
        was_stalled, self._is_engine_stalled = self._is_engine_stalled, watchdog.is_stalled
        if watchdog.is_hung:
            self._engine.declare_lost(
                InternalError(
                    f"the engine has not got on for {watchdog.stuck_s:.1f} s since step {self._report.step}, so it "
                    "counts as hung (see --step-timeout-s)"
                )
            )
            return
        if self._is_engine_stalled and not was_stalled:
            log.warning(
                "the engine has not got on for %.1f s since step %d; no heartbeats until it does, and after %.1f s it "
                "is killed", watchdog.stuck_s, self._report.step, watchdog.limit_s,
            )  # fmt: skip
        self._watch_timer = self._loop.call_later(WATCH_S, self._watch)

    def on_broker_message(self, link: BrokerLink, message: Message) -> None:
        if message.verb is Verb.GENERATE:
            try:
                self._generate(link, message)
            except MiiError as error:
                link.send(encode(Verb.ERROR, message.request_id, error.to_wire()))
        elif message.verb is Verb.CANCEL:
            self._cancel(link, parse_header(message, Cancel).request_ids or [message.request_id])
        elif message.verb is Verb.DRAIN:
            self.drain_requested.set()
        elif message.verb is Verb.RESET_PREFIX_CACHE:
            self._reset_prefix_cache(link, message.request_id)
        else:
            log.warning("dropped an unexpected %s from the broker at %s", message.verb.name, link.endpoint)

    def on_step(self, report: StepReport) -> None:
        """Deliver one step's rows: at most one TOKENS message per client connection, then what ends requests."""
        self._last_report = time.monotonic()
        self._report = report
        if report.times is not None:
            self._accounts.take_step_times(report.times)
        is_busy = not report.awaits_masks and (report.load[RUNNING] > 0 or report.load[WAITING] > 0)
        self._watchdog.on_report(report.step, is_busy, bool(report.rows), self._last_report)
        if self._is_engine_stalled:
            self._is_engine_stalled = self._watchdog.is_stalled
        outboxes: dict[tuple[int, int], list[Outbox]] = {}
        ended: list[tuple[ActiveRequest, str | MiiError]] = []
        to_cancel: list[int] = []
        for row in report.rows:
            request = self._by_seq.get(row[0])
            if request is None:
                continue
            end: str | MiiError | None
            try:
                end = self._take(request, OutputRow(*row), outboxes)
            except MiiError as error:
                end = request.with_progress(error)
            except Exception as error:
                log.exception("failed on output of request %s", request.name, extra=about(request))
                end = request.with_progress(InternalError(f"the worker failed on this request's output: {error}"))
            if end is not None:
                self._forget(request, end)
                ended.append((request, end))
                if row[2] is None:
                    to_cancel.append(request.seq_id)
        lost = self._flush(outboxes)
        for request, end in ended:
            if request not in lost:
                self._send_end(request, end)
        to_cancel += [request.seq_id for request in lost if self._forget(request, LOST)]
        if to_cancel:
            self._engine.cancel(to_cancel)

    def on_prefix_cache_reset(self, number: int) -> None:
        """The engine has done it: tell the broker that asked."""
        link, request_id = self._resets.pop(number)
        link.send(encode(Verb.RESET_PREFIX_CACHE, request_id))

    def _reset_prefix_cache(self, link: BrokerLink, request_id: bytes) -> None:
        number = next(self._seq_ids)
        try:
            self._engine.reset_prefix_cache(number)
        except (transport.PeerFull, transport.PeerGone):
            error = WorkerLost("the engine of this worker group takes no messages")
            link.send(encode(Verb.ERROR, request_id, error.to_wire()))
        else:
            self._resets[number] = (link, request_id)

    def _take(
        self, request: ActiveRequest, row: OutputRow, outboxes: dict[tuple[int, int], list[Outbox]]
    ) -> str | MiiError | None:
        """Consume a row; returns the finish reason or the error that ends the request, None while it goes on."""
        if request.is_cancelled:
            return None if row.finish_reason is None else request.failure(row._replace(finish_reason="cancelled"))
        if row.timing is not None:
            has_output = bool(row.token_ids or row.pooled)
            self._accounts.note_timing(request, row.timing, self._last_report, has_output=has_output)
        if row.num_cached_tokens:
            request.num_cached_tokens = row.num_cached_tokens
        is_ordinary = row.finish_reason in ORDINARY_ENDS
        delta, reason = request.take(row, row.finish_reason if is_ordinary else None)
        if delta is not None:
            key = (request.link, request.client)
            of_client = outboxes.get(key)
            if of_client is None:
                of_client = outboxes[key] = [Outbox(TokenRows(), [])]
            elif of_client[-1].rows.logprob_bytes > MAX_LOGPROB_BYTES:
                of_client.append(Outbox(TokenRows(), []))
            of_client[-1].rows.add(delta)
            of_client[-1].requests.append(request)
        return reason if is_ordinary or reason is not None else request.failure(row)

    def _flush(self, outboxes: dict[tuple[int, int], list[Outbox]]) -> set[ActiveRequest]:
        """Send the rows; returns the requests whose rows were not taken."""
        lost: set[ActiveRequest] = set()
        for (link, client), of_client in outboxes.items():
            for outbox in of_client:
                if not self.links[link].send(outbox.rows.to_frames(client)):
                    lost.update(outbox.requests)
        return lost

    def _send_end(self, request: ActiveRequest, end: str | MiiError) -> None:
        self.links[request.link].send(_end_frames(request, end))

    def _generate(self, link: BrokerLink, message: Message) -> None:
        header = parse_header(message, GenerateHeader)
        if self.is_draining:
            raise Draining("this worker group is shutting down; send the request again", retry_after_ms=0)
        key = (link.index, message.request_id)
        earlier = self._by_id.get(key)
        if earlier is not None:
            # The broker forgot the earlier attempt (it was restarted); nobody waits for that one's end.
            self._drop(earlier)
        request = ActiveRequest(
            request_id=message.request_id,
            link=link.index,
            client=header.client,
            stream=header.stream,
            seq_id=next(self._seq_ids),
            times=RequestTimes(time.monotonic()),
            name=request_name(header.x_request_id, message.request_id),
            trace=self._accounts.enter(header),
            next_seq=header.first_seq,
        )
        self._by_id[key] = request
        self._idle.clear()
        try:
            self._threads.submit(self._prepare, request, message, header)
        except RuntimeError as error:
            failure = InternalError(f"the worker cannot start on this request: {error}")
            self._forget(request, failure)
            raise failure from None

    def _prepare(self, request: ActiveRequest, message: Message, header: GenerateHeader) -> None:
        """In a tokenizer thread."""
        if self._by_id.get((request.link, request.request_id)) is not request:
            return  # cancelled while it waited for this thread
        reason: str | None = None
        outcome: Prepared | MiiError
        request.times.tokenize_start = time.monotonic()
        try:
            outcome = self._intake.prepare(message, header, request.seq_id)
            reason = request.prepared(outcome)
        except MiiError as error:
            outcome = error
        except Exception as error:
            log.exception("failed to prepare request %s", request.name, extra=about(request))
            outcome = InternalError(f"the worker failed to prepare this request: {type(error).__name__}")
        request.times.tokenize_end = time.monotonic()
        self._loop.call_soon_threadsafe(self._submit, request, outcome, reason, header.deadline_ms)

    def _submit(
        self,
        request: ActiveRequest,
        outcome: Prepared | MiiError,
        reason: str | None,
        deadline_ms: int | None,
    ) -> None:
        if self._by_id.get((request.link, request.request_id)) is not request:
            return
        times = request.times
        self._accounts.note_prepared(request)
        try:
            if isinstance(outcome, MiiError):
                raise outcome
            if isinstance(outcome, TextAnswer) or reason is not None:
                self._end_resumed(request, reason or "stop")
                return
            if deadline_ms is not None:
                left_s = times.arrived + deadline_ms / 1000 - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded("the request's deadline passed before it reached the engine")
                outcome.sequence.deadline_s = left_s
            times.added = time.monotonic()
            self._engine.add(outcome.sequence)
            self._by_seq[request.seq_id] = request
        except (transport.PeerFull, transport.PeerGone):
            # The engine is dead or hangs. The broker tries the request on another group.
            error = WorkerLost("the engine of this worker group takes no requests")
            self._end(request, request.with_progress(error))
        except MiiError as error:
            self._end(request, request.with_progress(error))

    def _end_resumed(self, request: ActiveRequest, reason: str) -> None:
        delta = request.end_of_resumed(reason)
        if delta is not None:
            rows = TokenRows()
            rows.add(delta)
            self.links[request.link].send(rows.to_frames(request.client))
        self._end(request, reason)

    def _cancel(self, link: BrokerLink, request_ids: Iterable[bytes]) -> None:
        seq_ids = []
        for request_id in request_ids:
            request = self._by_id.get((link.index, request_id))
            if request is None:
                continue
            if request.seq_id in self._by_seq:
                request.is_cancelled = True
                seq_ids.append(request.seq_id)
            else:
                self._end(request, request.with_progress(Cancelled("the request was cancelled")))
        if seq_ids:
            self._engine.cancel(seq_ids)

    def _end(self, request: ActiveRequest, end: str | MiiError) -> None:
        self._forget(request, end)
        self._send_end(request, end)

    def _drop(self, request: ActiveRequest) -> None:
        """End a request without a message."""
        if self._forget(request, LOST):
            self._engine.cancel([request.seq_id])

    def _forget(self, request: ActiveRequest, end: str | MiiError) -> bool:
        """Remove a request, which has come to its end, from the tables; True if the engine was working on it."""
        if self._by_id.pop((request.link, request.request_id), None) is not None:
            self._accounts.note_end(request, end, time.monotonic())
        if not self._by_id:
            self._idle.set()
        return self._by_seq.pop(request.seq_id, None) is not None


def _end_frames(request: ActiveRequest, end: str | MiiError) -> list[bytes]:
    """The terminal message; a FINAL that is larger than the protocol allows would cost the group its registration."""
    if not isinstance(end, MiiError):
        body, raw = request.final(end)
        frames = encode(Verb.FINAL, request.request_id, FinalHeader(finish_reason=end), body, raw)
        if len(frames[4]) <= MAX_BODY_BYTES and sum(map(len, raw)) <= MAX_RAW_BYTES:
            return frames
        text = "the answer is larger than a message may be; ask for less of it, or have it streamed"
        end = request.with_progress(RequestTooLarge(text))
    return encode(Verb.ERROR, request.request_id, end.to_wire())
