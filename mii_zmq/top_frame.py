# SPDX-License-Identifier: Apache-2.0
"""A broker's STATUS body as lines of text, for `mii_zmq top` and `mii_zmq status`. Pure: no terminal, no clock.

Names in a status were chosen by whoever started a deployment or a worker, so control characters in them never reach
the terminal. Every line fits the width that is asked for; columns that do not fit are left out, from the right.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

RATE_WINDOW_S = 5.0
BAR_CELLS = 10
LATE_HEARTBEAT_MS = 1500
UNKNOWN = "-"
STYLES = {"title": "1", "head": "2", "good": "32", "warn": "33", "bad": "31", "plain": ""}
"""SGR parameters."""


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    style: str = "plain"

    def paint(self) -> str:
        """With terminal colours."""
        return f"\x1b[{STYLES[self.style]}m{self.text}\x1b[0m" if STYLES[self.style] else self.text


class _Sample(NamedTuple):
    at: float
    num_tokens: float


class Counters:
    """Speeds out of the counters of successive statuses."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str, str], deque[_Sample]] = {}

    def add(self, status: Mapping[str, Any], now: float) -> None:
        """`now`: monotonic seconds. Groups that are gone, or started anew, are forgotten."""
        seen: dict[tuple[str, str, str], deque[_Sample]] = {}
        for name, deployment in _deployments(status):
            for group in _groups(deployment):
                key = _key(name, group)
                samples = self._samples.get(key, deque())
                samples.append(_Sample(now, _number(_load(group).get("generated_tokens")) or 0.0))
                while samples[0].at < now - RATE_WINDOW_S:
                    samples.popleft()
                seen[key] = samples
        self._samples = seen

    def tokens_per_s(self, deployment: str, group: Mapping[str, Any]) -> float | None:
        """Output tokens per second over the last RATE_WINDOW_S; None before a second sample is there."""
        samples = self._samples.get(_key(deployment, group))
        if samples is None or len(samples) < 2:
            return None
        first, last = samples[0], samples[-1]
        return max(0.0, (last.num_tokens - first.num_tokens) / (last.at - first.at)) if last.at > first.at else None


def render(
    status: Mapping[str, Any], counters: Counters, *, source: str, width: int, height: int | None = None
) -> list[Line]:
    """The frame: at most `width` columns, and `height` lines if it is given (the last one says what was left out)."""
    lines = [Line(f"mii_zmq top - {source}", "title"), *describe_broker(status, counters, width)]
    if height is not None and len(lines) > height:
        num_hidden = len(lines) - height + 1
        lines = [*lines[: height - 1], Line(f"... {num_hidden} more lines; the window is too low", "head")]
    return [Line(clip(line.text, width), line.style) for line in lines]


def describe_broker(status: Mapping[str, Any], counters: Counters, width: int) -> list[Line]:
    """Its totals, and a table of groups for each deployment."""
    lines = [*_summary(status, counters, width), Line("")]
    deployments = _deployments(status)
    if not deployments:
        lines.append(Line("no worker group has registered with the broker yet", "warn"))
    for name, deployment in deployments:
        lines += _deployment(name, deployment, counters, width)
    return lines


def clip(text: str, width: int) -> str:
    """At most `width` terminal columns, without characters that would move the cursor."""
    kept, used = [], 0
    for character in text:
        character = character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
        used += 0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used > width:
            break
        kept.append(character)
    return "".join(kept)


def _summary(status: Mapping[str, Any], counters: Counters, width: int) -> Iterator[Line]:
    groups = [(name, group) for name, deployment in _deployments(status) for group in _groups(deployment)]
    loads = [_load(group) for _, group in groups]
    rates = [rate for name, group in groups if (rate := counters.tokens_per_s(name, group)) is not None]
    cached, computed = _sum(loads, "cached_tokens"), _sum(loads, "prompt_tokens")
    hits = f"{100 * cached / (cached + computed):.0f} %" if cached + computed else UNKNOWN
    if status.get("is_draining"):
        yield Line("the broker is shutting down", "warn")
    waiting = _sum([deployment for _, deployment in _deployments(status)], "num_waiting") + _sum(loads, "waiting")
    parts = (
        f"tokens/s {_decimal(sum(rates) if rates else None)}",
        f"running {_sum(loads, 'running'):.0f}",
        f"waiting {waiting:.0f}",
        f"prefix hits {hits}",
        f"clients {_whole(_number(status.get('num_clients')))}",
        f"up {_duration(_number(status.get('uptime_s')))}",
    )
    yield from map(Line, _wrap(parts, "   ", width))


def _wrap(parts: Sequence[str], gap: str, width: int) -> list[str]:
    """As many parts on a line as fit."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}{gap}{part}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"  {part}")
    return lines


def _deployment(name: str, deployment: Mapping[str, Any], counters: Counters, width: int) -> Iterator[Line]:
    groups = _groups(deployment)
    takes_requests = deployment.get("takes_requests", deployment.get("is_ready"))
    state, style = ("ready", "good") if takes_requests else ("takes no requests", "warn")
    if not groups:
        state, style = "no group", "bad"
    parts = (
        f"{name}: {state}",
        f"{_whole(_number(deployment.get('num_waiting')))} in the queue",
        f"(~{_whole(_number(deployment.get('waiting_tokens')))} tokens)",
        f"{_decimal(_number(deployment.get('finished_per_s')))} requests/s finished",
    )
    for text in _wrap(parts, "  ", width):
        yield Line(text, style)
    if not groups:
        return
    head = ("group", "state", "run", "wait", "KV blocks", "", "tokens/s", "beat", "step", "pid", "device")
    rows = [_cells(name, group, counters) for group in groups]
    columns = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    columns[0] = min(columns[0], max(8, width // 4))
    # A column takes its width and the gap of two before it.
    num_shown = sum(1 for end in itertools.accumulate(size + 2 for size in columns) if end <= width)
    columns = columns[: max(1, num_shown)]
    yield Line(_row(head, columns), "head")
    for group, row in zip(groups, rows, strict=True):
        yield Line(_row(row, columns), _group_style(group))
    yield Line("")


def _cells(deployment: str, group: Mapping[str, Any], counters: Counters) -> tuple[str, ...]:
    load, info = _load(group), group.get("info")
    facts: Mapping[str, Any] = info if isinstance(info, Mapping) else {}
    used, total = _number(load.get("used_blocks")), _number(load.get("total_blocks"))
    beat, step = _number(group.get("heartbeat_age_ms")), _number(load.get("step_ms"))
    return (
        clip(str(group.get("group", "")), 200),
        clip(str(group.get("state", "")), 12),
        _whole(_number(load.get("running"))),
        _whole(_number(load.get("waiting"))),
        f"{_whole(used)}/{_whole(total)}",
        _bar(used, total),
        _decimal(counters.tokens_per_s(deployment, group)),
        _duration(None if beat is None else beat / 1000),
        f"{step:.1f} ms" if step else UNKNOWN,
        clip(str(facts.get("pid", UNKNOWN)), 10),
        clip(str(facts.get("device", UNKNOWN)), 30),
    )


def _row(cells: Sequence[str], columns: Sequence[int]) -> str:
    """Indented; group, state, bar and device to the left, numbers to the right."""
    words = {0, 1, 5, len(cells) - 1}
    padded = [
        clip(cell, size).ljust(size) if i in words else cell.rjust(size)
        for i, (cell, size) in enumerate(zip(cells, columns, strict=False))
    ]
    return ("  " + "  ".join(padded)).rstrip()


def _group_style(group: Mapping[str, Any]) -> str:
    if (_number(group.get("heartbeat_age_ms")) or 0) > LATE_HEARTBEAT_MS:
        return "bad"
    return "plain" if group.get("state") == "ready" else "warn"


def _bar(used: float | None, total: float | None) -> str:
    if not total:
        return "[" + " " * BAR_CELLS + "]"
    filled = min(BAR_CELLS, -int(-BAR_CELLS * (used or 0.0) // total))
    return "[" + "#" * filled + "." * (BAR_CELLS - filled) + "]"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"


def _decimal(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _sum(maps: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(_number(values.get(name)) or 0.0 for values in maps)


def _deployments(status: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    found = status.get("deployments")
    if not isinstance(found, Mapping):
        return []
    return sorted((str(name), facts) for name, facts in found.items() if isinstance(facts, Mapping))


def _groups(deployment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = deployment.get("groups")
    return [group for group in found if isinstance(group, Mapping)] if isinstance(found, list) else []


def _load(group: Mapping[str, Any]) -> Mapping[str, Any]:
    load = group.get("load")
    return load if isinstance(load, Mapping) else {}


def _key(deployment: str, group: Mapping[str, Any]) -> tuple[str, str, str]:
    return deployment, str(group.get("group")), str(group.get("incarnation"))
