# SPDX-License-Identifier: Apache-2.0
"""The frame of `mii_zmq top`, made of bodies alone, and the loop that draws it on a terminal and elsewhere."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from mii_zmq import cli
from mii_zmq.errors import ServiceError
from mii_zmq.top import ENTER_SCREEN, LEAVE_SCREEN, watch
from mii_zmq.top_frame import Counters, clip, render


def body(*, generated: int = 0, incarnation: str = "a1", **of_group: Any) -> dict[str, Any]:
    """A status with one deployment of one group."""
    load = {
        "running": 3, "waiting": 1, "used_blocks": 16, "total_blocks": 64, "step_ms": 12.25,
        "generated_tokens": generated, "prompt_tokens": 30, "cached_tokens": 10,
    }  # fmt: skip
    group = {
        "group": "g1", "incarnation": incarnation, "state": "ready", "heartbeat_age_ms": 120, "load": load,
        "info": {"pid": 4711, "device": "cuda:0 NVIDIA H200"}, **of_group,
    }  # fmt: skip
    deployment = {"takes_requests": True, "num_waiting": 2, "waiting_tokens": 500, "finished_per_s": 1.5}
    return {"num_clients": 4, "uptime_s": 3725, "deployments": {"my-model": {**deployment, "groups": [group]}}}


def frame(status: dict[str, Any], width: int = 120, height: int | None = None) -> list[str]:
    return [line.text for line in render(status, Counters(), source="here", width=width, height=height)]


def test_a_frame_shows_queue_groups_and_speed() -> None:
    counters = Counters()
    for second, generated in ((0, 100), (1, 150), (2, 300)):
        counters.add(body(generated=generated), float(second))
    lines = [line.text for line in render(body(generated=300), counters, source="here", width=120)]
    assert lines[0] == "mii_zmq top - here"
    assert lines[1] == "tokens/s 100.0   running 3   waiting 3   prefix hits 25 %   clients 4   up 1 h 2 min"
    assert lines[3] == "my-model: ready  2 in the queue  (~500 tokens)  1.5 requests/s finished"
    assert " ".join(lines[4].split()) == "group state run wait KV blocks tokens/s beat step pid device"
    row = "g1 ready 3 1 16/64 [###.......] 100.0 120 ms 12.2 ms 4711 cuda:0 NVIDIA H200"
    assert " ".join(lines[5].split()) == row


def test_speed_is_of_the_last_seconds_and_of_one_incarnation() -> None:
    counters = Counters()
    for second in range(20):
        counters.add(body(generated=10 * second if second < 10 else 100), float(second))
    (group,) = body()["deployments"]["my-model"]["groups"]
    assert counters.tokens_per_s("my-model", group) == 0.0
    counters.add(body(generated=5, incarnation="b2"), 20.0)
    assert counters.tokens_per_s("my-model", group) is None
    assert counters.tokens_per_s("my-model", {**group, "incarnation": "b2"}) is None


@pytest.mark.parametrize("width", [1, 8, 20, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = frame(body(), width)
    assert all(len(line) <= width for line in lines)
    if width >= 40:
        header = next(line for line in lines if line.startswith("  group"))
        assert header.split()[-1] in {"blocks", "tokens/s", "beat", "step", "pid", "device"}  # no column is cut
        assert any("1.5 requests/s finished" in line for line in lines)


def test_a_low_window_says_what_it_hides() -> None:
    lines = frame(body(), 80, 4)
    assert len(lines) == 4
    assert lines[-1].startswith("... ")
    assert len(frame(body(), 80, 50)) < 50


@pytest.mark.parametrize(
    ("changes", "style"), [({}, "plain"), ({"state": "draining"}, "warn"), ({"heartbeat_age_ms": 2000}, "bad")]
)
def test_what_is_out_of_the_ordinary_is_coloured(changes: dict[str, Any], style: str) -> None:
    lines = render(body(**changes), Counters(), source="here", width=120)
    (row,) = [line for line in lines if line.text.startswith("  g1")]
    assert row.style == style


def test_names_cannot_move_the_cursor() -> None:
    status = body(group="\x1b[2J\x07evil\n", state="\x9b31m")
    status["deployments"]["\x1b]0;title\x07"] = status["deployments"].pop("my-model")
    text = "".join(frame(status))
    assert "evil" in text
    assert text.isprintable()
    assert clip("日本語", 5) == "日本"


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"deployments": None},
        {"deployments": {"m": None, "n": {"groups": None}, "o": {"groups": ["odd", {"load": 1, "info": 2}]}}},
        {"deployments": {"m": {"groups": [{"load": {"used_blocks": 5, "total_blocks": 0}}]}}, "num_clients": "x"},
        {"deployments": {"m": {"groups": [{"load": {"used_blocks": 99, "total_blocks": 3}}]}}, "is_draining": True},
    ],
)
def test_odd_statuses_are_drawn(status: dict[str, Any]) -> None:
    assert frame(status)[0] == "mii_zmq top - here"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def interrupted_after(num_frames: int) -> Iterator[None]:
    yield from [None] * (num_frames - 1)
    raise KeyboardInterrupt


def test_a_terminal_is_redrawn_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    sink, pauses = Terminal(), interrupted_after(3)
    watch(body, "here", sink, interval_s=1.0, sleep=lambda seconds: next(pauses))
    text = sink.getvalue()
    assert text.startswith(ENTER_SCREEN)
    assert text.endswith(LEAVE_SCREEN)
    assert text.count("\x1b[H") == 3
    assert "\x1b[1mmii_zmq top - here\x1b[0m" in text


def test_elsewhere_frames_are_plain_text() -> None:
    sink, pauses = io.StringIO(), interrupted_after(2)
    watch(body, "here", sink, interval_s=1.0, sleep=lambda seconds: next(pauses))
    assert "\x1b" not in sink.getvalue()
    assert sink.getvalue().count("mii_zmq top") == 2


def test_once_waits_for_a_second_status_so_that_speeds_are_known() -> None:
    sink, pauses, counts = io.StringIO(), [], iter((0, 1000))
    watch(lambda: body(generated=next(counts)), "here", sink, interval_s=0.5, once=True, sleep=pauses.append)
    assert pauses == [0.5]
    assert sink.getvalue().count("mii_zmq top") == 1
    assert "tokens/s -" not in sink.getvalue()


def test_a_failure_is_shown_over_the_last_frame_until_it_is_over() -> None:
    answers: list[Any] = [body(), ServiceError("no broker answers"), body()]

    def fetch() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, ServiceError):
            raise answer
        status: dict[str, Any] = answer
        return status

    sink, pauses = io.StringIO(), interrupted_after(3)
    watch(fetch, "here", sink, interval_s=1.0, sleep=lambda seconds: next(pauses))
    frames = sink.getvalue().split("mii_zmq top")[1:]
    assert ["no broker answers; trying again" in shown for shown in frames] == [False, True, False]
    assert all("my-model" in shown for shown in frames)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["http://127.0.0.1:1"], "cannot read http://127.0.0.1:1/status"),
        (["http://nowhere.invalid:port"], "cannot read http://nowhere.invalid:port/status"),
        (["file:///etc/passwd"], "begins with http://"),
        (["nobody"], "no deployment 'nobody'"),
        ([], "no deployment runs on this host"),
        (["--interval", "0"], "interval is 0"),
    ],
)
def test_errors_are_one_line_and_a_code(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", *arguments]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert cli.main(["top", "--once", *arguments]) == 1
    assert error in capsys.readouterr().err
