# SPDX-License-Identifier: Apache-2.0
"""Answers taken apart: reasoning, text, calls; streamed as not streamed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.gateway.answers import Answer, AnswerReader, ToolUse, read_answer
from mii_zmq.gateway.tool_formats import FORMATS

TOOLS = ToolUse({"f": None})
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def reader(tools: ToolUse | None = TOOLS, tool_format: str = "hermes") -> AnswerReader:
    return AnswerReader(tools, FORMATS[tool_format], b"request")


def streamed(pieces: list[str], tools: ToolUse | None = TOOLS) -> Answer:
    answer, parts = Answer(), reader(tools)
    for piece in pieces:
        answer.add(parts.push(piece))
    answer.add(parts.finish())
    answer.finish_reason = parts.finish_reason("stop")
    return answer


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("plain", "", "plain"),
        (" \n plain ", "", " \n plain "),
        ("", "", ""),
        ("<think>\nhm, so\n</think>\n\nyes", "hm, so", "yes"),
        ("\n<think>hm</think>yes <think>not this</think>", "hm", "yes <think>not this</think>"),
        ("<think>\n\n</think>\n\nyes", "", "yes"),
        ("<think>never closed \n", "never closed", ""),
        ("<think>a </thin b", "a </thin b", ""),
        ("<think> a </thin", "a </thin", ""),
        ("<thin", "", "<thin"),
        ("<think>", "", ""),
        ("yes </think> no", "", "yes </think> no"),
    ],
)
def test_reasoning(text: str, reasoning: str, content: str) -> None:
    for answer in (read_answer(reader(None), text, "stop"), streamed(list(text), None)):
        assert (answer.reasoning, answer.text, answer.calls) == (reasoning, content, [])


def test_calls_have_numbers_and_ids() -> None:
    answer = read_answer(reader(), f"<think>hm</think>\n{CALL}\n{CALL}", "stop")
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("hm", "", "tool_calls")
    assert [(call.index, call.name, call.arguments) for call in answer.calls] == [(i, "f", '{"x": 1}') for i in (0, 1)]
    first, second = (call.call_id for call in answer.calls)
    assert first != second
    assert first.startswith("call_")
    assert streamed([f"<think>hm</think>\n{CALL}\n{CALL}"]) == answer
    mistral = read_answer(reader(tool_format="mistral"), "[TOOL_CALLS]f{}", "stop")
    assert len(mistral.calls[0].call_id) == 9
    assert mistral.calls[0].call_id.isalnum()


def test_a_call_in_reasoning_is_reasoning() -> None:
    answer = read_answer(reader(), f"<think>{CALL}</think>no", "stop")
    assert (answer.reasoning, answer.text, answer.finish_reason) == (CALL, "no", "stop")


def test_calls_behind_the_first_can_be_dropped() -> None:
    answer = read_answer(reader(ToolUse({"f": None}, is_parallel=False)), CALL + CALL, "stop")
    assert len(answer.calls) == 1


def test_an_answer_that_was_cut_says_so() -> None:
    assert read_answer(reader(), CALL, "length").finish_reason == "length"


def test_plain_text_is_known_as_such() -> None:
    parts = reader(None)
    assert not parts.is_plain
    assert parts.push(" <") == []
    assert parts.push("b>") == [" <b>"]
    assert parts.is_plain


FRAGMENTS = ["<think>", "</think>", "</thi", "<", "think>", CALL, " ", "\n", "word", "é", "<tool_call>", "{"]


@settings(max_examples=200, deadline=None)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=10), has_tools=st.booleans(), seed=st.integers(0, 2**32))
def test_the_cut_makes_no_difference(fragments: list[str], has_tools: bool, seed: int) -> None:
    text, tools = "".join(fragments), TOOLS if has_tools else None
    whole = read_answer(reader(tools), text, "stop")
    assert streamed(list(text), tools) == whole
    chance = random.Random(seed)
    cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(6)))
    assert streamed([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], tools) == whole
