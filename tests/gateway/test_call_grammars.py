# SPDX-License-Identifier: Apache-2.0
"""What the grammars of tool calls let through, by the workers' compiler, against what the reader makes of it."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from typing import Any

import pytest

from mii_zmq.gateway.answers import AnswerReader, Call, ToolUse, read_answer
from mii_zmq.gateway.call_formats import Format, either, schema_format
from mii_zmq.gateway.call_grammars import behind_reasoning, forced_calls, guarded_calls
from mii_zmq.gateway.tool_formats import FORMATS

xgrammar = pytest.importorskip("xgrammar")

pytestmark = [pytest.mark.slow]

F = {"type": "object", "properties": {"x": {"enum": ["é", "</tool_call>", 5, None]}}, "required": ["x"]}
G = {"$ref": "#/$defs/g", "$defs": {"g": {"type": "object", "properties": {"b": {"type": "boolean"}}}}}
PARAMETERS: dict[str, dict[str, Any] | None] = {"f": F, "get.it": G, "nothing": None}
MARKS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
    "<minimax:tool_call>",
    "<｜tool▁calls▁begin｜>", "<|tool_calls_section_begin|>", "<|tool_call|>", "<|tool_call_start|>",
]  # fmt: skip
VOCABULARY = [bytes([value]) for value in range(256)] + [mark.encode() for mark in MARKS]
EOS = len(VOCABULARY)


def use(*, is_parallel: bool = True, strict: tuple[str, ...] = ()) -> ToolUse:
    return ToolUse(PARAMETERS, is_parallel, strict=frozenset(strict))


@lru_cache(maxsize=1)
def compiler() -> Any:
    info = xgrammar.TokenizerInfo(
        [*VOCABULARY, b"<eos>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[EOS], add_prefix_space=False
    )
    return xgrammar.GrammarCompiler(info, max_threads=1)


def matcher(form: Format | None) -> Any:
    assert form is not None
    tag = json.dumps({"type": "structural_tag", "format": form})
    return xgrammar.GrammarMatcher(compiler().compile_structural_tag(tag))


def takes(form: Format | None, text: str) -> bool:
    """As a whole answer."""
    walk = matcher(form)
    return bool(walk.accept_string(text) and walk.is_completed())


def random_answer(form: Format | None, seed: int) -> str:
    """Some answer of the form: what is rare in random text, such as marks and ends, is drawn often."""
    walk, draw = matcher(form), random.Random(seed)
    mask = xgrammar.allocate_token_bitmask(1, EOS + 1)
    taken = b""
    while True:
        walk.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [token for token in range(EOS + 1) if words[token // 32] >> (token % 32) & 1]
        plain = [token for token in allowed if 32 < token < 127]
        special = [token for token in allowed if token >= 256]
        pool = draw.choice([kind for kind in (plain, special, special, allowed) if kind])
        token = EOS if EOS in allowed and len(taken) > 400 else draw.choice(pool)
        if token == EOS:
            return taken.decode("utf-8", "replace")
        assert walk.accept_token(token)
        taken += VOCABULARY[token]


def read(tool_format: str, text: str) -> tuple[str, list[Call]]:
    answer = read_answer(AnswerReader(use(), FORMATS[tool_format]), text, "stop")
    return answer.text, answer.calls


def is_good(call: Call) -> bool:
    """By the schemas above."""
    arguments = json.loads(call.arguments)
    if call.name == "f":
        value = arguments["x"]
        # Values between tags may have spaces around them.
        value = value.strip() if isinstance(value, str) else value
        return list(arguments) == ["x"] and value in F["properties"]["x"]["enum"]  # type: ignore[index]
    if call.name == "nothing":
        return arguments == {}
    return set(arguments) <= {"b"} and all(isinstance(value, bool) for value in arguments.values())


CALLS = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>',
    ],
    "llama3": [
        '{"name": "f", "parameters": {"x": "é"}}',
        '{"name": "get.it", "parameters": {"b": true}}; {"name": "f", "parameters": {"x": 5}}',
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 5}}]',
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 5}',
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 5}}, {"name": "get.it", "arguments": {}}]',
        '[TOOL_CALLS]f[ARGS]{"x": 5}[TOOL_CALLS]nothing[ARGS]{}',
    ],
    "any": [
        '{"name": "f", "parameters": {"x": "é"}}',
        '{"name": "f", "parameters": {"x": 5}}; {"name": "f", "parameters": {"x": 5}}',
    ],
}


CALLS |= {
    "llama4": CALLS["llama3"],
    "qwen3_coder": [
        "<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=get.it>\n<parameter=b>\ntrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=nothing>\n</function>\n</tool_call>",
    ],
    "glm4": [
        "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
        "<tool_call>nothing\n</tool_call>\n<tool_call>f\n<arg_key>x</arg_key><arg_value>é</arg_value></tool_call>",
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">5</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="nothing">\n</invoke>\n<invoke name="f">\n'
        '<parameter name="x">é</parameter>\n</invoke>\n</minimax:tool_call>',
    ],
    "deepseek": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 5}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"x": 5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ],
    "kimi_k2": [
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 5}'
        "<|tool_call_end|><|tool_calls_section_end|>",
    ],
    "granite": ['<|tool_call|>[{"name": "f", "arguments": {"x": 5}}, {"name": "nothing", "arguments": {}}]'],
    "lfm2": ['<|tool_call_start|>[{"name": "f", "arguments": {"x": 5}}]<|tool_call_end|>'],
}
GUARDED = sorted(CALLS.keys() - {"any", "llama4"})


@pytest.mark.parametrize("tool_format", sorted(CALLS))
def test_forced_calls_are_spelled_as_the_families_spell_them(tool_format: str) -> None:
    every, one = (forced_calls(tool_format, use(is_parallel=is_parallel)) for is_parallel in (True, False))
    for text in CALLS[tool_format]:
        content, calls = read(tool_format, text)
        assert content == ""
        assert takes(every, text), text
        assert takes(one, text) == (len(calls) == 1), text
        assert not takes(every, text + " and")
        assert not takes(every, "So: " + text)
        assert not takes(every, text.replace("5", "6").replace("true", "1").replace("é", "e").replace("</t", "<t"))
    other = re.sub(r"\bf\b", "g", CALLS[tool_format][0])
    assert other != CALLS[tool_format][0]
    for text in ("", "hello", other):
        assert not takes(every, text)


@pytest.mark.parametrize("tool_format", sorted(CALLS))
@pytest.mark.parametrize("is_parallel", [True, False])
def test_whatever_a_forced_model_writes_is_calls_and_nothing_else(tool_format: str, is_parallel: bool) -> None:
    form = behind_reasoning(forced_calls(tool_format, use(is_parallel=is_parallel)) or {})
    for seed in range(15):
        text = random_answer(form, seed)
        content, calls = read(tool_format, text)
        assert content == "", text
        assert 1 <= len(calls) <= (99 if is_parallel else 1), text
        assert all(is_good(call) for call in calls), text


@pytest.mark.parametrize("tool_format", GUARDED)
def test_guarded_calls_leave_text_alone_and_hold_arguments_to_the_schema(tool_format: str) -> None:
    form, once = (guarded_calls(tool_format, use(is_parallel=p, strict=("f",))) for p in (True, False))
    for text in ("", "hello", "é {} <", "<b>{</b>", "a\n\nb [TOOL", "5 < 6", "[1]"):
        assert takes(form, text), text
    for text in CALLS[tool_format]:
        assert takes(form, text), text
        assert takes(once, text) == (len(read(tool_format, text)[1]) == 1)
        assert not takes(form, text.replace("5", "6").replace("true", "1,").replace("é", "e").replace("</t", "<t"))
    # Those that are not strict take any object.
    loose = re.sub(r"\bf\b", "get.it", CALLS[tool_format][0])
    assert takes(form, loose)


@pytest.mark.parametrize("tool_format", GUARDED)
def test_whatever_a_guarded_model_writes_holds_no_broken_call(tool_format: str) -> None:
    form = guarded_calls(tool_format, use(strict=tuple(PARAMETERS)))
    num_calls = 0
    for seed in range(15):
        text = random_answer(form, seed)
        content, calls = read(tool_format, text)
        assert not any(opening.marker and opening.marker in content for opening in FORMATS[tool_format].openings)
        assert tool_format != "llama3" or not content.lstrip().startswith("{"), text
        assert all(is_good(call) for call in calls), text
        num_calls += len(calls)
    assert num_calls


def test_calls_behind_a_mark_within_text() -> None:
    form = guarded_calls("llama3", use(strict=("f",)))
    call = CALLS["llama3"][0]
    for text in (f"<|python_tag|>{call}", f"See <|python_tag|>{call}; {call}"):
        assert takes(form, text)
        assert not takes(form, text.replace("é", "e"))
        assert not takes(form, text + "{")
    # What Python strips, but the compiler's \\s does not have, and the other way round.
    assert not takes(form, "\x1c{")
    assert not takes(behind_reasoning(forced_calls("llama3", use()) or {}), f"<think></think>\ufeff{call}")


def test_reasoning_is_free_and_ends_once() -> None:
    form = behind_reasoning(schema_format(F))
    answer = '{"x": 5}'
    for lead in ("", "<think></think>", "<think>\nWell, <tool_call> { \n</think>\n\n"):
        assert takes(form, lead + answer)
    for text in (
        "<think>" + answer,
        "so " + answer,
        f"<think>a</think>b</think>{answer}",
        f"<think>a</think> b {answer}",
    ):
        assert not takes(form, text)


def test_tools_beside_a_form_of_the_answer() -> None:
    calls = forced_calls("llama3", use())
    assert calls is not None
    form = either([calls, schema_format({"type": "object", "properties": {"answer": {"type": "integer"}}})])
    assert takes(form, '{"answer": 42}')
    assert takes(form, CALLS["llama3"][0])
    assert not takes(form, CALLS["llama3"][0] + '{"answer": 42}')


def test_formats_that_cannot_be_prescribed() -> None:
    assert forced_calls("from the future", use()) is None
    assert guarded_calls("any", use()) is None
