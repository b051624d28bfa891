# SPDX-License-Identifier: Apache-2.0
"""How our processes log: lines for people, or one JSON object per line for machines, on standard error either way.

A text line has time, level, process and message. A JSON line has also who wrote it (`role`, `pid`, `group`), and what
it is about, as far as that is known: `request_id`, `trace_id` and whatever else the caller names. Facts come from the
block of `about` that the line is written in (it follows asyncio's tasks), or with the line itself: `extra=facts(...)`.
They are ids, names and numbers, never texts of requests and never keys.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from mii_zmq.process import environment
from mii_zmq.telemetry_config import log_format, log_level

MAX_FACT_CHARS = 200
MAX_EXCEPTION_CHARS = 16_384
"""The end of a traceback says most."""
FORMAT_VARIABLE = "MII_ZMQ_LOG_FORMAT"
GROUP_VARIABLE = "MII_ZMQ_LOG_GROUP"
"""Set by a worker group for its own processes."""
_NOISY = ("httpx", "httpcore", "urllib3", "filelock", "aiohttp.access")

_about: ContextVar[Mapping[str, Any]] = ContextVar("about", default={})  # noqa: B039 - never changed in place


class JsonFormatter(logging.Formatter):
    """One JSON object per line, in ASCII."""

    def __init__(self, role: str, group: str | None) -> None:
        super().__init__()
        self._role = role
        self.group = group

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "role": self._role,
            "pid": os.getpid(),
            "logger": record.name,
            "message": _message(record),
        }
        if self.group is not None:
            line["group"] = self.group
        for found in (_about.get(), getattr(record, "facts", None) or {}):
            for name, value in found.items():
                line[name] = value[:MAX_FACT_CHARS] if isinstance(value, str) else value
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)[-MAX_EXCEPTION_CHARS:]
        if record.stack_info:
            line["stack"] = record.stack_info[-MAX_EXCEPTION_CHARS:]
        return json.dumps(line, default=str)


def setup_logging(role: str, chosen_format: str | None = None) -> logging.Logger:
    """Configure the root logger of this process and return the package's logger.

    `chosen_format` is 'text', 'json' or None (as the environment says); processes started from here on log likewise.

    Raises:
        ConfigError: the environment names a level or a format that does not exist.
    """
    name = chosen_format or log_format()
    os.environ[FORMAT_VARIABLE] = name
    handler = logging.StreamHandler(sys.stderr)
    if name == "json":
        handler.setFormatter(JsonFormatter(role, os.environ.get(GROUP_VARIABLE)))
        _log_what_python_prints()
    else:
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname).1s [{role}] %(message)s", "%H:%M:%S")
        )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level())
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logging.getLogger("mii_zmq")


def is_json() -> bool:
    """Whether this process logs JSON, so that lines for people should go there as well."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


@contextlib.contextmanager
def of_group(name: str) -> Iterator[None]:
    """This process, and those that it starts meanwhile, log as parts of a worker group."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.group = name
    with environment(GROUP_VARIABLE, name):
        yield


@contextlib.contextmanager
def about(**found: Any) -> Iterator[None]:
    """Every line that is written in this block (and by what it awaits) has these facts; empty ones are left out."""
    token = _about.set({**_about.get(), **_known(found)})
    try:
        yield
    finally:
        _about.reset(token)


def facts(**found: Any) -> dict[str, Any]:
    """For the argument `extra` of a logging call; empty facts are left out."""
    return {"facts": _known(found)}


def place_of(error: BaseException) -> str:
    """Kind and place of an error without its message, for where that may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames)]
    return " < ".join([type(error).__name__, *places])


def _known(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None and value != ""}


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - a line whose values do not fit is still worth a line
        return f"{record.msg} {record.args}"


def _log_what_python_prints() -> None:
    """Warnings and the tracebacks of a process or thread that ends by them, which would be lines that are no JSON."""
    logging.captureWarnings(True)

    def on_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            logging.getLogger("mii_zmq").critical("the process ends by an error", exc_info=(kind, error, trace))

    def on_thread_exception(found: threading.ExceptHookArgs) -> None:
        if found.exc_value is not None and not issubclass(found.exc_type, SystemExit):
            info = (found.exc_type, found.exc_value, found.exc_traceback)
            name = found.thread.name if found.thread else "?"
            logging.getLogger("mii_zmq").error("thread %s ended by an error", name, exc_info=info)

    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception
