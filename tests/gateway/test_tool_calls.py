# SPDX-License-Identifier: Apache-2.0
"""Tool calls of every format: what counts as one, what is text, and that the cut of the stream makes no difference."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.gateway.tool_calls import ToolCallParser
from mii_zmq.gateway.tool_formats import FORMATS
from mii_zmq.gateway.tool_values import ToolCall

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
}
NAMES = {"f": SCHEMA, "get-weather": None}
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

X = ToolCall("f", '{"x": "1"}')
BOTH = ToolCall("f", '{"x": "a\\n</function>", "n": 2}')
QWEN = "<function=f>\n<parameter=x>\na\n</function>\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>"
GLM = "<arg_key>x</arg_key>\n<arg_value>1</arg_value>"
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
BEGIN, CALL, END, ALL_END = DEEPSEEK
V3 = f'{CALL}function<｜tool▁sep｜>f\n```json\n{{"x": "1"}}\n```{END}'
V31 = f"{CALL}get-weather<｜tool▁sep｜>{{}}{END}"
KIMI = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": "1"}<|tool_call_end|>'
INVOKE = '<invoke name="f">\n<parameter name="x">1</parameter>\n</invoke>\n'
WHOLE += [
    ("qwen3_coder", f"<tool_call>\n{QWEN}\n</tool_call>", [BOTH]),
    ("qwen3_coder", f"I see. {QWEN}\n</tool_call>\n<tool_call>{QWEN}</tool_call> So.", ["I see.", BOTH, BOTH, "So."]),
    ("qwen3_coder", "<function=get-weather></function>", [CALL_B]),
    ("qwen3_coder", "<function=f><parameter=x></parameter></function>", [ToolCall("f", '{"x": ""}')]),
    ("qwen3_coder", "<function=f><parameter=x>\n\n a \n\n</parameter></function>",
     [ToolCall("f", '{"x": "\\n a \\n"}')]),
    ("qwen3_coder", f"<tool_call>{A}</tool_call>", [CALL_A]),
    ("glm4", f"\n<tool_call>f\n{GLM}\n</tool_call>", [X]),
    ("glm4", f"<tool_call>f{GLM}<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>",
     [ToolCall("f", '{"x": "1", "n": 2}')]),
    ("glm4", "<tool_call>get-weather\n</tool_call><tool_call>get-weather</tool_call>", [CALL_B, CALL_B]),
    ("glm4", "<tool_call>f\n<arg_key>o</arg_key>\n<arg_value>{'a': [1, None]}</arg_value>\n</tool_call>",
     [ToolCall("f", '{"o": {"a": [1, null]}}')]),
    ("deepseek", f"Hm.{BEGIN}{V3}\n{V3}{ALL_END}", ["Hm.", X, X]),
    ("deepseek", f"{BEGIN}{V31}{V31}{ALL_END}", [CALL_B, CALL_B]),
    ("deepseek", f"{V31} done", [CALL_B, "done"]),
    ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI}{KIMI}<|tool_calls_section_end|>", [X, X]),
    ("minimax_m2", f"So:\n<minimax:tool_call>\n{INVOKE}{INVOKE}</minimax:tool_call>", ["So:", X, X]),
    ("granite", f"<|tool_call|>[{A}, {B}]", [CALL_A, CALL_B]),
    ("granite", f"<|tool_call|><tool_call>[{B}]", [CALL_B]),
    ("pythonic", """[f(x='1'), get-weather()]""", [X, CALL_B]),
    ("pythonic", '\n[ f ( x = "1" , ) ] ', [X]),
    ("llama4", '<|python_start|>[f(x="1")]<|python_end|>', [X]),
    ("llama4", f"I look. <|python_start|><|python_end|>{B}", ["I look. <|python_start|>", CALL_B]),
    ("llama4", f"<|python_start|>{B}<|python_end|>", [CALL_B]),
    ("llama4", B, [CALL_B]),
    ("olmo3", '<function_calls>\nf(x="1")\nget-weather()\n</function_calls>', [X, CALL_B]),
    ("olmo3", '<function_calls>f(x="1")</function_calls>\nget-weather()', [X, "get-weather()"]),
    ("lfm2", 'Well <|tool_call_start|>[f(x="1")]<|tool_call_end|> there', ["Well", X, "there"]),
    ("lfm2", f"<|tool_call_start|>[{B}]<|tool_call_end|>", [CALL_B]),
]  # fmt: skip
WHOLE += [("any", text, parts) for name, text, parts in WHOLE if name != "any"]
TEXTS += [
    ("qwen3_coder", "<tool_call><function=g><parameter=x>1</parameter></function></tool_call>"),
    ("qwen3_coder", "<function=f><parameter=x>1</function>"), ("qwen3_coder", "<function=f>text</function>"),
    ("qwen3_coder", "<function=f><parameter=>1</parameter></function>"), ("qwen3_coder", "<function=f><param"),
    ("qwen3_coder", f"<function=f><parameter={'k' * 300}>1</parameter></function>"),
    ("glm4", "<tool_call>f\n<arg_key>x</arg_key>\n1</tool_call>"), ("glm4", "<tool_call>f<arg_key>x</arg_key>"),
    ("glm4", "<tool_call>f"), ("glm4", "<tool_call>what I mean is</tool_call>"),
    ("glm4", f"<tool_call>{A}</tool_call>"),
    ("deepseek", f"{BEGIN}{CALL}function<｜tool▁sep｜>g\n```json\n{{}}\n```{END}{ALL_END}"),
    ("deepseek", f"{BEGIN}{CALL}f"),
    ("deepseek", f"{BEGIN}{CALL}f<｜tool▁sep｜>[]{END}"), ("kimi_k2", KIMI.replace(":0", "")),
    ("pythonic", "[1] a footnote"), ("pythonic", "[f](https://example.com)"), ("pythonic", "text [f()]"),
    ("pythonic", "[f(1)]"), ("pythonic", "[f(x=open('a'))]"), ("pythonic", "[f(x=1), g()]"), ("pythonic", "[f(x='1']"),
    ("pythonic", "[f(x=" + "[" * 5000 + "]" * 5000 + ")]"), ("pythonic", "[f(x=1e999)]"), ("pythonic", "[f(x='"),
    ("olmo3", "<function_calls>\nf(x=1\n</function_calls>"), ("granite", "<|tool_call|>none"),
    ("minimax_m2", "<minimax:tool_call><invoke name=f></invoke></minimax:tool_call>"),
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
    *DEEPSEEK, QWEN, GLM, V3, V31, KIMI, INVOKE, "<function=f>", "<parameter=x>", "</parameter>", "</function>", "f",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", "```",
    "<|tool_call|>", "[f(", "x='1'", ")", "(", "<|python_start|>", "<|python_end|>", "<function_calls>", "'", "=",
    "</function_calls>", "<|tool_call_start|>", "<|tool_call_end|>", "get-weather", "get-weather()", "<｜tool▁sep｜>",
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


BROKEN = [
    "<tool_call>{", "<tool_call>", "[TOOL_CALLS]f", "{", '<tool_call>{"', "<|python_tag|>{}",
    "<function=f><parameter=x>", "<function=f>", "<tool_call>f<arg_key>", "<tool_call>f<arg_key>x</arg_key>", GLM, CALL,
    f"{CALL}f<｜tool▁sep｜>", "[f(x=",
    "[f(x='\\", "<function_calls>f(", KIMI[:-60], '<minimax:tool_call><invoke name="f">', "<｜tool▁call▁en", "<",
]  # fmt: skip


@pytest.mark.parametrize("fragment", BROKEN)
def test_a_long_run_of_broken_calls_is_text(fragment: str) -> None:
    text = fragment * (60_000 // len(fragment))
    assert read("any", text) == [text]
    assert read("any", *(text[at : at + 40] for at in range(0, len(text), 40))) == [text]


def test_a_long_run_of_spaces_costs_each_of_them_once() -> None:
    spaces = [" " * 20] * 3_000
    assert read("any", "a", *spaces, "b") == [f"a{' ' * 60_000}b"]
    assert read("any", "a", *spaces, f"<tool_call>{B}", *spaces, "b") == ["a", CALL_B, "b"]
