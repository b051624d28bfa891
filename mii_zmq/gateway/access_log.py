# SPDX-License-Identifier: Apache-2.0
"""One line per HTTP request: what was asked for, how it ended, and how long it took.

At level INFO, those of probes and metrics readers at DEBUG; `--no-access-log` leaves them out. Holds no query string,
no header but the request's id, and no text of prompts or answers.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from mii_zmq.gateway.request_record import RequestRecord
from mii_zmq.logs import facts

MAX_PATH_CHARS = 200
PROBES = ("/health", "/metrics")
"""Beginnings of paths that are read again and again."""

log = logging.getLogger("mii_zmq.access")


def is_probe(request: web.Request) -> bool:
    return request.path.startswith(PROBES)


def shown_path(request: web.Request) -> str:
    """As the client wrote it: percent signs kept, so that it is one word without control characters."""
    return request.rel_url.raw_path[:MAX_PATH_CHARS]


def write_line(request: web.Request, record: RequestRecord, status: int, total_s: float) -> None:
    """`status` is what the client was sent, or 499 when it had left."""
    level = logging.DEBUG if is_probe(request) else logging.INFO
    if not log.isEnabledFor(level):
        return
    found = line_facts(request, record, status, total_s)
    log.log(level, "%s", _text(found), extra=facts(**found))


def line_facts(request: web.Request, record: RequestRecord, status: int, total_s: float) -> dict[str, Any]:
    """What stands in the line, under the names that it has in JSON; None where it is not known."""
    first_s = record.first_token_s
    reasons = record.finish_reasons
    return {
        "method": request.method,
        "path": shown_path(request),
        "status": status,
        "request_id": record.request_id,
        "model": record.model,
        "stream": record.stream if record.generations else None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "first_token_ms": None if first_s is None else round(1000 * first_s, 1),
        "total_ms": round(1000 * total_s, 1),
        "finish_reason": ",".join(dict.fromkeys(reasons)) or None,
        "error": record.error_code or None,
        "disconnected": record.is_gone or None,
    }


def _text(found: dict[str, Any]) -> str:
    parts = [
        f"{found['method']} {found['path']} {found['status']} {found['total_ms']} ms request {found['request_id']}"
    ]
    if found["model"]:
        parts.append(f"model {found['model'][:MAX_PATH_CHARS]!r}")
    if found["output_tokens"] is not None:
        prompt = "?" if found["prompt_tokens"] is None else found["prompt_tokens"]
        parts.append(f"tokens {prompt}+{found['output_tokens']}")
    if found["first_token_ms"] is not None:
        parts.append(f"first {found['first_token_ms']} ms")
    parts += [str(found[name]) for name in ("finish_reason", "error") if found[name]]
    if found["disconnected"]:
        parts.append("the client left")
    return ", ".join(parts)
