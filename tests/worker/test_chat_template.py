# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from mii_zmq.errors import InvalidRequest
from mii_zmq.tokenizer import FakeTokenizer
from mii_zmq.worker.chat_messages import check_messages
from mii_zmq.worker.chat_template import (
    MAX_RENDERED_CHARS,
    open_reasoning,
    reasons,
    render_chat,
    template_problem,
    tool_format_of,
)

HELLO = [{"role": "user", "content": "hello"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def with_template(template: str | None, **special_tokens: str) -> FakeTokenizer:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = template
    tokenizer.special_tokens = special_tokens
    return tokenizer


def render(template: str | None, messages: Any = HELLO, **special_tokens: str) -> str:
    return render_chat(with_template(template, **special_tokens), messages)


@pytest.mark.parametrize(
    ("template", "problem"), [("{% for x in %}", "malformed"), ("{{ messages }}", None), (None, None)]
)
def test_a_malformed_template_is_noticed_at_the_start(template: str | None, problem: str | None) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = template
    found = template_problem(tokenizer)
    assert (problem in found) if found is not None and problem is not None else found is problem


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    closed = render_chat(with_template(CHATML), HELLO, add_generation_prompt=False)
    assert closed == "<|im_start|>user\nhello<|im_end|>\n"


def test_special_tokens_and_the_usual_globals() -> None:
    assert render("{{ bos_token }}{{ eos_token is defined }}", bos_token="<s>") == "<s>False"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hello"}]'
    assert render("{{ {'b': '<é>', 'a': 1} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 1,\n "b": "<é>"\n}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% if tools %}tools{% endif %}{% if documents is none %}none{% endif %}") == "none"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hello"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "malformed"),
        ("{{ messages[7].content.x }}", "refuses"),
        ("{{ 1 / 0 }}", "refuses"),
        ("{{ 'a' + 1 }}", "refuses"),
        ("{{ range(10 ** 9) | list }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include 'x' %}", "refuses"),
    ],
)
def test_refusals_are_invalid_requests(template: str | None, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        render(template)
    assert caught.value.param == "messages"


def test_output_is_limited() -> None:
    size = MAX_RENDERED_CHARS // 99_000 + 2
    template = "{% for i in range(99000) %}" + "x" * size + "{% endfor %}"
    with pytest.raises(InvalidRequest, match="more than"):
        render(template)


def test_messages_are_normalised() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "ann"}, {"role": "assistant", "content": "", "name": None}]
    assert check_messages(messages) == [
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hello", "messages"),
        (None, "messages"),
        ({"role": "user"}, "messages"),
        ([], "messages"),
        ([{"role": "user", "content": "x"}] * 5000, "messages"),
        (["hello"], "messages[0]"),
        ([*HELLO, {"content": "x"}], "messages[1].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([*HELLO, *HELLO, {"role": "user"}], "messages[2].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": "a", "contnet": "b"}], "messages[0].contnet"),
        ([{"role": "user", "content": "a", "name": 1}], "messages[0].name"),
        ([{"role": "tool", "content": "a", "tool_call_id": 1}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "content": "", "tool_calls": []}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_name_the_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_messages(messages)
    assert caught.value.param == param
    assert len(caught.value.message) < 300


QWEN = (
    "{% if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls %}{{ '<tool_call>' + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\n' }}{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}


def test_tools_and_calls_reach_the_template() -> None:
    conversation = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "1", "name": "f"},
    ]
    text = render_chat(with_template(QWEN), conversation, tools=[TOOL], variables={"enable_thinking": False})
    assert text == (
        '<tools>{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}</tools>\n'
        "<|im_start|>user\nhello<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"x": "é"}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<tools>" not in render_chat(with_template(QWEN), HELLO, tools=[])
    with pytest.raises(InvalidRequest, match="knows no tools"):
        render_chat(with_template(CHATML), HELLO, tools=[TOOL])


def test_a_template_of_its_own_for_tools() -> None:
    tokenizer = with_template("plain")
    tokenizer.tool_chat_template = "{{ tools[0].function.name }}"
    assert render_chat(tokenizer, HELLO) == "plain"
    assert render_chat(tokenizer, HELLO, tools=[TOOL]) == "f"


def test_reasoning_that_the_prompt_opens() -> None:
    assert open_reasoning(render(QWEN)) == "<think>\n"
    assert open_reasoning(render_chat(with_template(QWEN), HELLO, variables={"enable_thinking": False})) == ""
    assert open_reasoning("<think>\n\n</think>\n\n") == ""


def test_the_last_message_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    text = render_chat(with_template(CHATML), messages, False, continue_final_message=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nSure,"
    for content, template in (("", CHATML), ("Sure", "{{ messages[0].content }}")):
        messages[-1]["content"] = content
        with pytest.raises(InvalidRequest, match="cannot be continued"):
            render_chat(with_template(template), messages, False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="add_generation_prompt false"):
        render_chat(with_template(CHATML), messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [(QWEN, "hermes"), ("x[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3"), ("Environment: ipython", "llama3"),
     ("{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key>", "glm4"), ("<tool_call>\n<function=f>", "qwen3_coder"),
     ("<｜tool▁calls▁begin｜>", "deepseek"), ("<|tool_calls_section_begin|>", "kimi_k2"), ("<|tool_call|>", "granite"),
     ("<minimax:tool_call>", "minimax_m2"), ("<function_calls>", "olmo3"), ("<|tool_list_start|>", "lfm2"),
     ("<|python_start|> Environment: ipython", "llama4"), ("use [func_name1(params_name1=params_value1)]", "pythonic"),
     (CHATML, None), (None, None)],
)  # fmt: skip
def test_how_a_model_writes_calls(template: str | None, tool_format: str | None) -> None:
    assert tool_format_of(with_template(template)) == tool_format


def test_templates_that_speak_of_reasoning() -> None:
    assert reasons(with_template("{% if enable_thinking %}<think>{% endif %}"))
    assert not reasons(with_template("{{ messages }}"))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * 1025}, "tools"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1]"),
        ({"variables": {"messages": 1}}, "chat_template_kwargs"),
        ({"variables": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"variables": {"_x": 1}}, "chat_template_kwargs"),
        ({"variables": {"x": [1]}}, "chat_template_kwargs.x"),
        ({"variables": {"x": "y" * 9000}}, "chat_template_kwargs.x"),
        ({"variables": {f"x{i}": 1 for i in range(40)}}, "chat_template_kwargs"),
    ],
)
def test_malformed_tools_and_variables_name_the_place(more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render_chat(with_template(CHATML, bos_token="<s>"), HELLO, **more)
    assert caught.value.param == param
    assert len(caught.value.message) < 300
