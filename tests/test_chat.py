# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from mii_zmq.chat import run_chat
from mii_zmq.errors import Overloaded
from mii_zmq.mii_client import Chat


def chat(lines: str, seen: list[Chat], system: str | None = None) -> tuple[int, str]:
    def answer(messages: Chat) -> Iterator[str]:
        seen.append(list(messages))
        yield "to "
        if messages[-1]["content"] == "fail":
            raise Overloaded("too much")
        if messages[-1]["content"] == "interrupt":
            raise KeyboardInterrupt
        yield messages[-1]["content"]

    sink = io.StringIO()
    return run_chat(answer, system, io.StringIO(lines), sink), sink.getvalue()


def test_the_history_goes_along_until_a_reset() -> None:
    seen: list[Chat] = []
    assert chat("one\n\n  two  \n/reset\nthree\n/exit\nfour\n", seen, "be kind") == (0, "to one\nto two\nto three\n")
    system = {"role": "system", "content": "be kind"}
    assert seen[1] == [
        system,
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "to one"},
        {"role": "user", "content": "two"},
    ]
    assert seen[2] == [system, {"role": "user", "content": "three"}]


def test_a_failed_answer_is_reported_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Chat] = []
    assert chat("fail\nagain\n", seen) == (1, "to \nto again\n")
    assert "error: too much" in capsys.readouterr().err
    assert seen[1] == [{"role": "user", "content": "again"}]


def test_an_interrupt_ends_one_answer() -> None:
    seen: list[Chat] = []
    assert chat("interrupt\nnext", seen) == (0, "to \nto next\n")
    assert seen[1][1] == {"role": "assistant", "content": "to "}
