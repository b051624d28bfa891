# SPDX-License-Identifier: Apache-2.0
"""Tool calls of every format: what counts as one, what is text, and that the cut of the stream makes no difference."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.gateway.tool_calls import ToolCallParser
from mii_zmq.gateway.tool_formats import FORMATS, ToolCall

NAMES = {"f", "get-weather"}
A = json.dumps({"name": "f", "arguments": {"x": '}\\" <tool_call> [TOOL_CALLS] é\n'}})
B = json.dumps({"name": "get-weather", "parameters": {}})
CALL_A = ToolCall("f", json.dumps(json.loads(A)["arguments"], ensure_ascii=False))
CALL_B = ToolCall("get-weather", "{}")


def read(tool_format: str, *pieces: str) -> list[str | ToolCall]:
    """Adjacent texts are one."""
    parser = ToolCallParser(FORMATS[tool_format], NAMES)
    found = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    joined: list[str | ToolCall] = []
    for part in found:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


WHOLE = [
    ("hermes", f"<tool_call>\n{A}\n</tool_call>", [CALL_A]),
    ("hermes", f"See:\n\n<tool_call>{A}</tool_call>\n<tool_call>{B}</tool_call>\n", ["See:", CALL_A, CALL_B]),
    ("hermes", f"<tool_call>{A} done", [CALL_A, "done"]),
    ("hermes", f"<tool_call>{A}</tool_call> and so on", [CALL_A, "and so on"]),
    ("llama3", A, [CALL_A]),
    ("llama3", f" \n{B}", [CALL_B]),
    ("llama3", f"<|python_tag|>{A}; {B}", [CALL_A, CALL_B]),
    ("llama3", f"{A}\n{B},{B}", [CALL_A, CALL_B, CALL_B]),
    ("llama3", f"text <|python_tag|>{A}", ["text", CALL_A]),
    ("mistral", f"[TOOL_CALLS] [{A}, {B}]", [CALL_A, CALL_B]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]get-weather[ARGS]{}', [ToolCall("f", '{"x": 1}'), CALL_B]),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', [ToolCall("f", '{"x": 1}')]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"x": 1}', [ToolCall("f", '{"x": 1}')]),
    ("any", f"<tool_call>{A}</tool_call>[TOOL_CALLS][{B}]", [CALL_A, CALL_B]),
    ("any", A, [CALL_A]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [ToolCall("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a\nb"}}', [ToolCall("f", '{"x": "a\\nb"}')]),
]  # fmt: skip

TEXTS = [
    ("hermes", A), ("mistral", A), ("hermes", f"[TOOL_CALLS][{A}]"), ("mistral", f"<tool_call>{A}</tool_call>"),
    ("llama3", f"text {A}"), ("llama3", '{"answer": 42}'), ("llama3", "{"), ("llama3", '{"name": "f"}'),
    ("hermes", "<tool_call>"), ("hermes", "<tool_call>{"), ("hermes", "<tool_call>hello</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": tru}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'),
    ("hermes", f"<tool_call>{{\"name\": \"f\", \"arguments\": {{\"x\": {'9' * 5000}}}}}"),
    ("hermes", "<tool_call>{]}"), ("hermes", "<tool_call>}"), ("hermes", '<tool_call>{"a"]'), ("hermes", "a <tool_cal"),
    ("hermes", "<tool_call>" + '{"x":' * 5000 + "1" + "}" * 5000), ("hermes", "<tool_call>[]</tool_call>"),
    ("mistral", "[TOOL_CALLS]f[ARGS]"), ("mistral", '[TOOL_CALLS]g[ARGS]{"x": 1}'),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]"), ("mistral", "[TOOL_CALLS]" + "f" * 300 + "{}"),
    ("mistral", "[TOOL_CALLS]a b{}"), ("mistral", "[TOOL_CALLS]f[ARGS]x{}"),
    ("any", ""), ("any", " \n "), ("any", "plain \n text  "), ("hermes", "<tool_call>" + " " * 300 + A),
]  # fmt: skip


@pytest.mark.parametrize(("tool_format", "text", "parts"), WHOLE)
def test_calls(tool_format: str, text: str, parts: list[str | ToolCall]) -> None:
    assert read(tool_format, text) == parts
    assert read(tool_format, *text) == parts


@pytest.mark.parametrize(("tool_format", "text"), TEXTS)
def test_what_is_no_call_is_text(tool_format: str, text: str) -> None:
    assert "".join(part for part in read(tool_format, text) if isinstance(part, str)) == text
    assert read(tool_format, *text) == ([text] if text else [])


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    parser = ToolCallParser(FORMATS["hermes"], NAMES)
    given = [parser.push(piece) for piece in ("Hello", " ", "you <b", "> <tool", "_cake", f"<tool_call>{A}", "<")]
    assert given == [["Hello"], [], [" you <b"], [">"], [" <tool_cake"], [CALL_A], []]
    assert parser.finish() == ["<"]


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {]'
    assert read("hermes", f"{broken} <tool_call>{B}</tool_call>") == [broken, CALL_B]
    assert read("hermes", f"<tool_call>no<tool_call>{B}") == ["<tool_call>no", CALL_B]


FRAGMENTS = [
    A, B, f"[{A}]", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "f[ARGS]", "{}", '{"x": "', '"}',
    "\\", '"', "{", "}", "[", "]", ";", ",", " ", "\n", "word", "<tool", "_call>", "[TOOL", "é", "\u2028", " " * 300,
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    tool_format=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    seed=st.integers(0, 2**32),
)
def test_the_cut_makes_no_difference(tool_format: str, fragments: list[str], seed: int) -> None:
    text = "".join(fragments)
    whole = read(tool_format, text)
    assert read(tool_format, *text) == whole
    chance = random.Random(seed)
    cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(8)))
    assert read(tool_format, *(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))) == whole


@pytest.mark.parametrize(
    "fragment", ["<tool_call>{", "<tool_call>", "[TOOL_CALLS]f", "{", '<tool_call>{"', "<|python_tag|>{}"]
)
def test_a_long_run_of_broken_calls_is_text(fragment: str) -> None:
    text = fragment * (100_000 // len(fragment))
    assert read("any", text) == [text]
