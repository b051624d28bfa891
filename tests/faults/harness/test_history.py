# SPDX-License-Identifier: Apache-2.0
"""The checker finds every kind of broken promise: histories with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mii_zmq.worker.fake_model import ALPHABETS, FakeModel
from tests.faults.harness.expectation import Expectation, expect
from tests.faults.harness.history import History, Verdict

ANSWER = Expectation(tuple(b"abcdefgh"), "abcdefgh", "length")


def judge(write: Callable[[History], None]) -> Verdict:
    history = History()
    history.invoke("r", ANSWER, "stream")
    write(history)
    return history.check()


def stream(history: History, pieces: list[tuple[int, str]]) -> None:
    for offset, text in pieces:
        history.delta("r", text, offset=offset, token_ids=tuple(text.encode()))


def test_a_good_stream() -> None:
    def write(history: History) -> None:
        history.accepted("r")
        stream(history, [(0, "abc"), (3, "def"), (6, "gh")])
        history.complete("r", "length", num_tokens=8)

    verdict = judge(write)
    assert verdict.violations == []
    assert (verdict.num_complete, verdict.num_accepted, verdict.num_tokens) == (1, 1, 8)
    assert verdict.complete_share == 1.0
    assert verdict.complete_by_via == verdict.by_via == {"stream": 1}


def test_good_answers_without_a_stream_and_without_ids() -> None:
    history = History()
    history.invoke("whole", ANSWER)
    history.complete("whole", "length", text="abcdefgh", token_ids=tuple(b"abcdefgh"))
    history.invoke("text only", ANSWER)
    history.delta("text only", "abcd")
    history.delta("text only", "efgh")
    history.complete("text only", "length")
    assert history.check().num_complete == 2
    assert len(history.latencies()) == 2


Steps = list[tuple[Any, ...]]

FAULTY: list[tuple[str, Steps]] = [
    ("no terminal", [("delta", "ab")]),
    ("2 terminals", [("fail", "worker_lost"), ("fail", "worker_lost")]),
    ("2 terminals", [("fail", "cancelled"), ("broken", "gateway killed")]),
    ("delta after the end", [("fail", "cancelled"), ("delta", "a")]),
    ("accepted 2 times", [("accepted",), ("accepted",), ("fail", "internal")]),
    ("accepted after", [("delta", "a"), ("accepted",), ("fail", "internal")]),
    ("duplicate: a delta at token 1", [("row", 0, "abc"), ("row", 1, "bcd")]),
    ("gap: a delta at token 4", [("row", 0, "abc"), ("row", 4, "efg")]),
    ("wrong token ids at 3", [("row", 0, "abc"), ("row", 3, "xef")]),
    ("duplicate text at character 3", [("delta", "abc"), ("delta", "abc")]),
    ("gap before character 3", [("delta", "abc"), ("delta", "efg")]),
    ("wrong text at character 3", [("delta", "abc"), ("delta", "zzz")]),
    ("incomplete: 3 of 8", [("delta", "abc"), ("end", "length", {})]),
    ("whole text", [("end", "length", {"text": "abcdefgX"})]),
    ("token ids are not", [("end", "length", {"text": "abcdefgh", "token_ids": (1, 2)})]),
    ("counted 7 tokens", [("end", "length", {"text": "abcdefgh", "num_tokens": 7})]),
    ("finish reason 'stop'", [("end", "stop", {"text": "abcdefgh"})]),
    ("nobody sent", [("stray",)]),
    ("invoked twice", [("invoke", ANSWER)]),
]


def play(history: History, steps: Steps) -> None:
    for name, *values in steps:
        if name == "row":
            stream(history, [(values[0], values[1])])
        elif name == "end":
            history.complete("r", values[0], **values[1])
        elif name == "stray":
            history.delta("other", "a")
        else:
            getattr(history, name)("r", *values)


@pytest.mark.parametrize(("words", "steps"), FAULTY, ids=[f"{i} {words}" for i, (words, _) in enumerate(FAULTY)])
def test_a_faulty_history_is_found(words: str, steps: Steps) -> None:
    verdict = judge(lambda history: play(history, steps))
    assert any(words in violation for violation in verdict.violations), verdict.violations
    assert verdict.num_complete == 0


def test_errors_are_counted_by_cause() -> None:
    history = History()
    for index in range(10):
        history.invoke(str(index), ANSWER)
    for index in range(4):
        history.complete(str(index), "length", text="abcdefgh")
    history.fail("4", "overloaded")
    history.fail("5", "overloaded")
    history.delta("6", "ab")
    history.fail("6", "overloaded")
    history.fail("7", "worker_lost")
    history.broken("8", "gateway killed")
    history.accepted("9")
    history.fail("9", "no_workers")
    verdict = history.check()
    assert verdict.violations == []
    assert (verdict.num_refused, verdict.num_accepted, verdict.num_complete, verdict.num_broken) == (2, 8, 4, 1)
    assert verdict.errors == {
        "refused: overloaded": 2,
        "error: overloaded": 1,
        "error: worker_lost": 1,
        "broken connection: gateway killed": 1,
        "error: no_workers": 1,
    }


def test_an_unfinished_request_is_named() -> None:
    history = History()
    history.invoke("r", ANSWER)
    assert history.unfinished() == ["r"]
    history.broken("r", "x")
    assert history.unfinished() == []


def test_expectations_follow_the_options() -> None:
    whole = expect("hello", max_new_tokens=40, ignore_eos=True)
    assert (len(whole.token_ids), len(whole.text), whole.finish_reason) == (40, 40, "length")
    stop = whole.text[9:12]
    stopped = expect("hello", max_new_tokens=40, stop=[stop])
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    ends = expect("hello", FakeModel(ALPHABETS["digits"], eos_after=5), max_new_tokens=40)
    assert (ends.finish_reason, ends.token_ids[-1], len(ends.token_ids)) == ("stop", 256, 6)
