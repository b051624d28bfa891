# SPDX-License-Identifier: Apache-2.0
"""A history of requests as their clients saw them, and the check that nothing was lost, doubled or made up.

In the manner of Jepsen: clients log what they do and see (`invoke`, `accepted`, `delta`, then one of `complete`, `fail`
and `broken`), whatever is done to the servers meanwhile; afterwards `check` judges the whole. A request may fail with
an error, or lose its HTTP connection, and these are counted by cause; what it may never do is end twice or not at all,
or deliver a token that an undisturbed run would not have delivered at that place. May be written to from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tests.faults.harness.expectation import Expectation

REFUSALS = frozenset({"overloaded", "no_workers", "unknown_deployment", "draining", "broker_unavailable"})
"""Codes that say that nothing ran, if nothing was accepted before."""


class Kind(Enum):
    INVOKE = "invoke"
    ACCEPTED = "accepted"
    DELTA = "delta"
    COMPLETE = "complete"
    FAIL = "fail"
    BROKEN = "broken"

    @property
    def is_terminal(self) -> bool:
        return self in (Kind.COMPLETE, Kind.FAIL, Kind.BROKEN)


@dataclass(frozen=True, slots=True)
class Event:
    at: float
    kind: Kind
    facts: dict[str, Any]


@dataclass(slots=True)
class Record:
    """One request."""

    key: str
    via: str
    """Which door and form: for the counts."""
    expected: Expectation | None
    note: Any = None
    """Whatever the client wants to find again."""
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """What `check` found."""

    num_requests: int = 0
    num_refused: int = 0
    num_accepted: int = 0
    """All that were not refused."""
    num_complete: int = 0
    """Ended well, with every token and the whole text as expected."""
    num_broken: int = 0
    """Lost their connection: the server at the other end was killed."""
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Requests that ended with an error, by cause; refusals and broken connections included."""
    messages: dict[str, Counter[str]] = field(default_factory=dict)
    """What the errors said, by cause."""
    by_via: Counter[str] = field(default_factory=Counter)
    """Accepted ones."""
    complete_by_via: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    """Broken promises; empty is good."""

    @property
    def complete_share(self) -> float:
        return self.num_complete / self.num_accepted if self.num_accepted else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.num_requests,
            "refused": self.num_refused,
            "accepted": self.num_accepted,
            "complete": self.num_complete,
            "complete_share": round(self.complete_share, 5),
            "broken_connections": self.num_broken,
            "tokens": self.num_tokens,
            "errors": dict(self.errors),
            "by_door": dict(self.by_via),
            "complete_by_door": dict(self.complete_by_via),
            "violations": len(self.violations),
        }


class History:
    """Clients write, `check` reads at the end."""

    def __init__(self, *, keeps_ended: bool = True) -> None:
        """Without `keeps_ended` a request is judged when the next ones begin, and only its verdict is kept."""
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        self._strays: list[str] = []
        self._keeps_ended = keeps_ended
        self._judged = Verdict()
        self._num_invoked = 0

    def __len__(self) -> int:
        """Requests that were sent."""
        return self._num_invoked

    def invoke(self, key: str, expected: Expectation | None, via: str = "", note: Any = None) -> None:
        """A request leaves. `expected` is None where only the number of terminals counts."""
        with self._lock:
            if key in self._records:
                self._strays.append(f"{key}: invoked twice")
                return
            self._num_invoked += 1
            if not self._keeps_ended and len(self._records) > 1000:
                self._judge_ended()
            self._records[key] = Record(key, via, expected, note)
        self._log(key, Kind.INVOKE)

    def accepted(self, key: str) -> None:
        self._log(key, Kind.ACCEPTED)

    def delta(self, key: str, text: str, *, offset: int | None = None, token_ids: Sequence[int] = ()) -> None:
        """Part of a stream. Doors that show tokens give `offset` (output tokens before) and the ids."""
        self._log(key, Kind.DELTA, text=text, offset=offset, token_ids=tuple(token_ids))

    def complete(
        self,
        key: str,
        finish_reason: str,
        *,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """The end. `text` and `token_ids` are given by requests that were not streamed."""
        ids = None if token_ids is None else tuple(token_ids)
        self._log(key, Kind.COMPLETE, finish_reason=finish_reason, text=text, token_ids=ids, num_tokens=num_tokens)

    def fail(self, key: str, code: str, message: str = "") -> None:
        self._log(key, Kind.FAIL, code=code, message=message)

    def broken(self, key: str, why: str) -> None:
        """The connection ended without a word."""
        self._log(key, Kind.BROKEN, code=why)

    def has_ended(self, key: str) -> bool:
        with self._lock:
            record = self._records.get(key)
            return record is None or any(event.kind.is_terminal for event in record.events)

    def unfinished(self) -> list[str]:
        with self._lock:
            return [r.key for r in self._records.values() if not any(e.kind.is_terminal for e in r.events)]

    def records(self) -> list[Record]:
        with self._lock:
            return list(self._records.values())

    def latencies(self) -> list[float]:
        """Seconds from invocation to the end, of requests that ended well."""
        with self._lock:
            ended = [r.events for r in self._records.values() if r.events and r.events[-1].kind is Kind.COMPLETE]
        return [events[-1].at - events[0].at for events in ended]

    def check(self) -> Verdict:
        """Judge everything logged so far; call it once, when all clients have ended."""
        with self._lock:
            verdict, records = self._judged, list(self._records.values())
            verdict.num_requests = self._num_invoked
            verdict.violations += self._strays
            for record in records:
                _check_record(record, verdict)
        return verdict

    def _judge_ended(self) -> None:
        for key, record in list(self._records.items()):
            if any(event.kind.is_terminal for event in record.events):
                _check_record(self._records.pop(key), self._judged)

    def _log(self, key: str, kind: Kind, **facts: Any) -> None:
        event = Event(time.monotonic(), kind, facts)
        with self._lock:
            record = self._records.get(key)
            if record is None:
                self._strays.append(f"{key}: {kind.value} of a request that nobody sent")
            else:
                record.events.append(event)


def _check_record(record: Record, verdict: Verdict) -> None:
    problems = list(_order_problems(record.events))
    terminals = [event for event in record.events if event.kind.is_terminal]
    terminal = terminals[0] if len(terminals) == 1 else None
    if terminal is None:
        problems.append("no terminal" if not terminals else f"{len(terminals)} terminals")
    delivered, text_problems = _check_tokens(record, terminal)
    problems += text_problems
    verdict.num_tokens += delivered
    is_refused = terminal is not None and terminal.facts.get("code") in REFUSALS and not _has_begun(record)
    if is_refused:
        verdict.num_refused += 1
    else:
        verdict.num_accepted += 1
        verdict.by_via[record.via] += 1
    if terminal is not None and terminal.kind is Kind.COMPLETE:
        verdict.num_complete += not problems
        verdict.complete_by_via[record.via] += not problems
    elif terminal is not None:
        code = str(terminal.facts["code"])
        verdict.num_broken += terminal.kind is Kind.BROKEN
        where = "broken connection" if terminal.kind is Kind.BROKEN else "refused" if is_refused else "error"
        cause = f"{where}: {code}"
        verdict.errors[cause] += 1
        message = str(terminal.facts.get("message", ""))
        verdict.messages.setdefault(cause, Counter())[message] += 1
    verdict.violations += [f"{record.key} ({record.via}): {problem}" for problem in problems]


def _has_begun(record: Record) -> bool:
    return any(event.kind in (Kind.ACCEPTED, Kind.DELTA) for event in record.events)


def _order_problems(events: Iterable[Event]) -> Iterable[str]:
    num_accepted = 0
    has_delta = has_ended = False
    for event in events:
        if has_ended and not event.kind.is_terminal:
            yield f"{event.kind.value} after the end"
        if event.kind is Kind.ACCEPTED:
            num_accepted += 1
            if has_delta:
                yield "accepted after the first delta"
        has_delta |= event.kind is Kind.DELTA
        has_ended |= event.kind.is_terminal
    if num_accepted > 1:
        yield f"accepted {num_accepted} times"


def _check_tokens(record: Record, terminal: Event | None) -> tuple[int, list[str]]:
    """Number of tokens (or characters, at doors that show none) delivered, and what is wrong with them."""
    text, token_ids, problems = "", list[int](), list[str]()
    for event in record.events:
        if event.kind is not Kind.DELTA:
            continue
        offset, ids, piece = event.facts["offset"], event.facts["token_ids"], event.facts["text"]
        if offset is not None and offset != len(token_ids):
            what = "duplicate" if offset < len(token_ids) else "gap"
            problems.append(f"{what}: a delta at token {offset} while {len(token_ids)} are there")
        if record.expected is not None:
            problems += _compare_piece(record.expected, text, piece, token_ids, ids)
        text += piece
        token_ids += ids
    if terminal is not None and terminal.kind is Kind.COMPLETE and record.expected is not None:
        problems += _check_end(record.expected, terminal.facts, text, token_ids)
    whole = terminal.facts.get("text") if terminal is not None else None
    return max(len(token_ids), len(text), len(whole or "")), problems[:3]


def _compare_piece(
    expected: Expectation, text: str, piece: str, token_ids: Sequence[int], ids: Sequence[int]
) -> Iterable[str]:
    if ids and tuple(ids) != expected.token_ids[len(token_ids) : len(token_ids) + len(ids)]:
        yield f"wrong token ids at {len(token_ids)}"
    if piece and not expected.text.startswith(piece, len(text)):
        at = len(text)
        if expected.text.startswith(piece, max(0, at - len(piece))) or (len(piece) > 2 and piece in expected.text[:at]):
            yield f"duplicate text at character {at}: {piece[:20]!r}"
        elif len(piece) > 2 and piece in expected.text[at:]:
            yield f"gap before character {at}: {piece[:20]!r}"
        else:
            yield f"wrong text at character {at}: {piece[:20]!r} instead of {expected.text[at : at + 20]!r}"


def _check_end(expected: Expectation, facts: dict[str, Any], text: str, token_ids: Sequence[int]) -> Iterable[str]:
    whole = text if facts["text"] is None else facts["text"]
    ids = token_ids if facts["token_ids"] is None else facts["token_ids"]
    if facts["text"] is not None and text and facts["text"] != text:
        yield "the text of the end is not that of the stream"
    if whole != expected.text and expected.text.startswith(whole):
        yield f"incomplete: {len(whole)} of {len(expected.text)} characters"
    elif whole != expected.text:
        yield "the whole text is not the expected one"
    if ids and tuple(ids) != expected.token_ids:
        yield f"the token ids are not the expected ones ({len(ids)} instead of {len(expected.token_ids)})"
    if facts["num_tokens"] is not None and facts["num_tokens"] != len(expected.token_ids):
        yield f"counted {facts['num_tokens']} tokens instead of {len(expected.token_ids)}"
    if facts["finish_reason"] != expected.finish_reason:
        yield f"finish reason {facts['finish_reason']!r} instead of {expected.finish_reason!r}"
