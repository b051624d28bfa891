# SPDX-License-Identifier: Apache-2.0
"""`python -m mii_zmq top`: what a deployment does, redrawn every second. Fetches and draws; `top_frame` says what.

The status comes from GET /status of a gateway, or over ZeroMQ where a deployment of this host has none. On a terminal
the frame is drawn over the last one, on a screen of its own; elsewhere frames are printed one after the other, plain.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from mii_zmq.errors import ConfigError, ServiceError
from mii_zmq.registry import DeploymentNotFoundError, DeploymentRecord, Registry
from mii_zmq.top_frame import Counters, Line, render

FETCH_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 16 << 20
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"

Fetch = Callable[[], Mapping[str, Any]]
"""Returns the broker's STATUS body; raises ServiceError when there is none to be had now."""


def add_top(commands: Any) -> None:
    top = commands.add_parser(
        "top",
        help="watch deployments, groups and their load",
        description="Show load, KV use and speed of a deployment's groups, live. Ctrl-C ends.",
    )
    top.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="address of a gateway (http://HOST:PORT), or a deployment or model of this host (default: the only one)",
    )
    top.add_argument("--once", action="store_true", help="print one frame, an interval after the start, and end")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between frames (default: 1)")
    top.set_defaults(run=run_top)


def run_top(options: argparse.Namespace) -> int:
    """Raises ServiceError when the first status cannot be had; later failures are shown, and asked again."""
    if not 0.1 <= options.interval <= 3600:
        raise ConfigError(f"interval is {options.interval:g}; it must be 0.1 to 3600 seconds")
    with _source(options.target) as (name, fetch):
        watch(fetch, name, sys.stdout, interval_s=options.interval, once=options.once)
    return 0


def watch(
    fetch: Fetch,
    name: str,
    sink: TextIO,
    *,
    interval_s: float,
    once: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw frames until Ctrl-C; or take two statuses an interval apart, so that speeds are known, and draw one frame.

    Raises:
        ServiceError: from `fetch`, the first time.
    """
    is_terminal = sink.isatty()
    is_live = is_terminal and not once
    has_colours = is_terminal and not os.environ.get("NO_COLOR")
    counters = Counters()
    status = fetch()
    problem: str | None = None
    if once:
        counters.add(status, time.monotonic())
        sleep(interval_s)
        status = fetch()
    with _own_screen(sink) if is_live else contextlib.nullcontext(), contextlib.suppress(KeyboardInterrupt):
        while True:
            if problem is None:
                counters.add(status, time.monotonic())
            columns, rows = shutil.get_terminal_size((80, 24))
            height = max(3, rows - 1) if is_live else None
            lines = render(status, counters, source=name, width=columns, height=height)
            if problem is not None:
                lines[1] = Line(f"{problem}; trying again"[:columns], "bad")
            _draw(lines, sink, is_live=is_live, has_colours=has_colours)
            if once:
                return
            sleep(interval_s)
            try:
                status, problem = fetch(), None
            except ServiceError as error:
                problem = error.message


def status_of_gateway(url: str) -> Mapping[str, Any]:
    """The broker's part of GET /status of the gateway at `url`.

    Raises:
        ServiceError: nothing answers there, it is no gateway of ours, or no broker answers it.
    """
    address = url.rstrip("/") + "/status"
    if not url.startswith(("http://", "https://")):
        raise ServiceError(f"cannot read {address}: a gateway's address begins with http:// or https://")
    try:
        with urllib.request.urlopen(address, timeout=FETCH_TIMEOUT_S) as reply:
            body = json.loads(reply.read(MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            raise ServiceError(f"{address} answers {error.code}: {_message(error.read(MAX_ANSWER_BYTES))}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ServiceError(f"cannot read {address}: {getattr(error, 'reason', error)}") from None
    broker = body.get("broker") if isinstance(body, dict) else None
    if not isinstance(broker, dict):
        raise ServiceError(f"{address} does not answer as a gateway of mii_zmq does; is the address right?")
    return broker


@contextlib.contextmanager
def _source(target: str | None) -> Iterator[tuple[str, Fetch]]:
    """What the target is called, and how its status is read."""
    if target is not None and "://" in target:
        yield target, lambda: status_of_gateway(target)
        return
    from mii_zmq.mii_client import MIIClient

    record = _find(target)
    url = record.rest_url
    if url:
        yield f"{record.deployment} at {url}", lambda: status_of_gateway(url)
        return
    with MIIClient(record) as client:
        yield record.deployment, lambda: client.status()["broker"]


def _find(target: str | None) -> DeploymentRecord:
    from mii_zmq.api import find_deployment

    if target is not None:
        return find_deployment(target)
    records = [record for record in Registry().list_all() if record.ready]
    if len(records) == 1:
        return records[0]
    names = ", ".join(record.deployment for record in records)
    raise DeploymentNotFoundError(
        f"several deployments run here; name one of them: {names}"
        if names
        else "no deployment runs on this host; start one with `python -m mii_zmq serve`, or name a gateway's address"
    )


@contextlib.contextmanager
def _own_screen(sink: TextIO) -> Iterator[None]:
    sink.write(ENTER_SCREEN)
    try:
        yield
    finally:
        sink.write(LEAVE_SCREEN)
        sink.flush()


def _draw(lines: list[Line], sink: TextIO, *, is_live: bool, has_colours: bool) -> None:
    """In one write, so that no half of a frame is seen."""
    texts = [line.paint() if has_colours else line.text for line in lines]
    if is_live:
        sink.write(HOME + "".join(f"{text}{CLEAR_LINE}\r\n" for text in texts) + CLEAR_REST)
    else:
        sink.write("".join(f"{text}\n" for text in texts))
    sink.flush()


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
