# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: JSON with what is known, text as ever."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from mii_zmq.errors import ConfigError, StartupError
from mii_zmq.logs import MAX_FACT_CHARS, JsonFormatter, about, facts, of_group, place_of, setup_logging
from mii_zmq.process import spawn


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def written() -> Any:
    handler = Lines(JsonFormatter("gateway", None))
    log = logging.getLogger("mii_zmq.test_logs")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield lambda: [json.loads(line) for line in handler.lines]
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


log = logging.getLogger("mii_zmq.test_logs")


def test_line_has_who_when_and_what(written: Any) -> None:
    log.warning("found %d of %s", 3, "four\nlines", extra=facts(group="g", request_id="", trace_id=None))
    (line,) = written()
    assert line["message"] == "found 3 of four\nlines"
    assert (line["level"], line["role"], line["logger"], line["group"]) == (
        "WARNING", "gateway", "mii_zmq.test_logs", "g",
    )  # fmt: skip
    assert line["time"].endswith("Z")
    assert len(line["time"]) == len("2026-01-01T00:00:00.000Z")
    assert not {"request_id", "trace_id", "exception"} & line.keys()


def test_traceback_and_wrong_arguments_stay_one_line(written: Any) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    (line,) = written()
    assert line["exception"].endswith("ValueError: no")
    # Not through the logger: pytest's own handler refuses what a line of ours survives.
    for message, arguments, shown in (("%d and %d", ("one",), "%d and %d ('one',)"), ("\udcff", (), "\udcff")):
        record = logging.makeLogRecord({"msg": message, "args": arguments})
        assert json.loads(JsonFormatter("x", None).format(record))["message"] == shown


async def test_facts_follow_the_task_and_long_ones_are_cut(written: Any) -> None:
    async def serve(name: str) -> None:
        with about(request_id=name, trace_id=None):
            await asyncio.sleep(0)
            log.info("serving", extra=facts(model="m" * 1000))

    await asyncio.gather(serve("a"), serve("b"))
    log.info("idle")
    lines = written()
    assert [line.get("request_id") for line in lines] == ["a", "b", None]
    assert len(lines[0]["model"]) == MAX_FACT_CHARS
    assert "trace_id" not in lines[0]


@pytest.mark.slow
def test_format_is_inherited_and_checked(monkeypatch: pytest.MonkeyPatch, run_directory: Any) -> None:
    monkeypatch.setenv("MII_ZMQ_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="MII_ZMQ_LOG_FORMAT is 'xml'; it must be text or json"):
        setup_logging("broker")
    code = (
        "from mii_zmq.logs import *; from mii_zmq import logs; import os, subprocess, sys, logging\n"
        "setup_logging('worker', 'json')\n"
        "with logs.of_group('g1'):\n"
        "    subprocess.run([sys.executable, '-c', 'from mii_zmq.logs import *; import warnings; "
        'setup_logging("engine").info("hello"); warnings.warn("odd"); 1 / 0\'])\n'
        "logging.getLogger('mii_zmq').info('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["role"], line["group"], line["level"]) for line in lines] == [
        ("engine", "g1", "INFO"),
        ("engine", "g1", "WARNING"),
        ("engine", "g1", "CRITICAL"),
        ("worker", "g1", "INFO"),
    ]
    assert "odd" in lines[1]["message"]
    assert "ZeroDivisionError" in lines[2]["exception"]


PROGRAMS = (
    "mii_zmq serve fake:",
    "mii_zmq chat",
    "mii_zmq.launcher --model=fake: --deployment=d",
    "mii_zmq.broker",
    "mii_zmq.gateway",
    "mii_zmq.worker --model=fake: --deployment=d",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "program"),
    [*(("MII_ZMQ_LOG_LEVEL", program) for program in PROGRAMS), ("MII_ZMQ_LOG_FORMAT", "mii_zmq.broker")],
)
def test_every_program_refuses_a_level_that_does_not_exist_in_one_line(
    variable: str, program: str, monkeypatch: pytest.MonkeyPatch, run_directory: Any
) -> None:
    monkeypatch.setenv(variable, "loud")
    command = [sys.executable, "-m", *program.split()]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"{variable} is 'loud'; it must be" in line


@pytest.mark.slow
def test_processes_that_are_started_by_a_program_of_others_refuse_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pipeline()` leaves the logging of the program that calls it alone, so its children are the first to look."""
    monkeypatch.setenv("MII_ZMQ_LOG_LEVEL", "loud")
    rank = spawn(
        "mii_zmq.worker.rank_process", ["--endpoint=ipc://none", "--rank=1", "--memory-fd=0", "--model=fake:"], "rank 1"
    )
    try:
        with pytest.raises(StartupError, match="rank 1: MII_ZMQ_LOG_LEVEL is 'loud'; it must be"):
            rank.wait_ready(60)
    finally:
        rank.kill()


@pytest.mark.slow
def test_the_grammar_process_refuses_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgrammar")
    monkeypatch.setenv("MII_ZMQ_LOG_LEVEL", "loud")
    options = [
        f"--{name}=1" for name in ("channel-fd", "memory-fd", "vocab-size", "timeout-s", "memory-mb", "cache-mb")
    ]
    command = [sys.executable, "-m", "mii_zmq.worker.grammar_process", "--tokenizer=fake:", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "MII_ZMQ_LOG_LEVEL is 'loud'; it must be" in done.stderr


def test_text_lines_look_as_ever() -> None:
    code = "from mii_zmq.logs import *; setup_logging('broker').warning('gone', extra=facts(request_id='r'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    clock, _, rest = done.stderr.partition(" ")
    assert rest == "W [broker] gone\n"
    assert len(clock) == len("12:00:00.000")


def test_group_of_a_process_that_logs_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with of_group("g"):
        assert subprocess.run(["printenv", "MII_ZMQ_LOG_GROUP"], capture_output=True, check=True).stdout == b"g\n"


def test_where_an_error_comes_from_can_be_said_without_its_text() -> None:
    with pytest.raises(ValueError, match="a client's words") as caught:
        raise ValueError("a client's words")
    kind, place = place_of(caught.value).split(" < ")
    assert kind == "ValueError"
    assert place.startswith("test_logs.py:")
