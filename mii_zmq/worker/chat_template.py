# SPDX-License-Identifier: Apache-2.0
"""Chat messages to prompt text: renders the checkpoint's Jinja template in a sandbox.

Templates come with checkpoints and are not trusted: no attribute access to Python internals, no mutation of what they
are given, only plain strings, lists and dicts as input, a limit on the output. Requests cannot bring a template; their
variables are plain values (`chat_messages`). Rendered text already holds its special tokens, so it is encoded without
adding any. What a template says of the model's habits (how it writes tool calls, whether it opens its reasoning) is
found here too.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mii_zmq.config import MAX_BODY_BYTES
from mii_zmq.errors import InvalidRequest
from mii_zmq.sampling_params import check_text
from mii_zmq.tokenizer import TextTokenizer
from mii_zmq.worker.chat_messages import check_messages, check_tools, check_variables

MAX_RENDERED_CHARS = 2 * MAX_BODY_BYTES
_OPEN_REASONING = re.compile(r"<think>\s*\Z")
_TOOL_MARKS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm4"),
    ("<function=", "qwen3_coder"),
    ("<|tool_call|>", "granite"),
    ("<function_calls>", "olmo3"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|tool_call_start|>", "lfm2"),
    # Templates above hold this one as well.
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "llama4"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ("Environment: ipython", "llama3"),
)


def render_chat(
    tokenizer: TextTokenizer,
    messages: Any,
    add_generation_prompt: bool = True,
    *,
    tools: Any = None,
    variables: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> str:
    """The prompt text of a conversation.

    `variables`: more of them for the template, such as enable_thinking. `continue_final_message`: the prompt ends with
    the content of the last message, which the model goes on with.

    Raises:
        InvalidRequest: malformed messages (`param` names the place), no template, or a template that refuses them.
    """
    checked = check_messages(messages)
    found = check_tools(tools)
    own = check_variables(dict(variables or {}), tokenizer.special_tokens)
    source = tokenizer.tool_chat_template if found and tokenizer.tool_chat_template else tokenizer.chat_template
    if source is None:
        raise InvalidRequest("this model has no chat template; send a prompt instead of messages", param="messages")
    if found and "tools" not in source:
        raise InvalidRequest(
            "this model's chat template knows no tools; take a model that does, or send tool_choice 'none'",
            param="tools",
        )
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest("continue_final_message needs add_generation_prompt false", param="continue_final_message")
    # Special tokens that the checkpoint lacks stay undefined, as templates test for them.
    text = _render(
        source,
        messages=checked,
        tools=found,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **tokenizer.special_tokens,
        **own,
    )
    if continue_final_message:
        text = _cut_behind_last(text, checked[-1])
    return check_text(text, "messages")


def open_reasoning(prompt: str) -> str:
    """The opening tag with which the prompt ends, spaces behind it included; empty if it ends otherwise."""
    found = _OPEN_REASONING.search(prompt, max(0, len(prompt) - 64))
    return found.group() if found else ""


def tool_format_of(tokenizer: TextTokenizer) -> str | None:
    """How the model writes tool calls, by the marks in its templates; None: they hold none that is known."""
    source = f"{tokenizer.tool_chat_template or ''}{tokenizer.chat_template or ''}"
    return next((tool_format for mark, tool_format in _TOOL_MARKS if mark in source), None)


def reasons(tokenizer: TextTokenizer) -> bool:
    """Whether its answers may begin with <think>, by what its templates speak of."""
    return "<think>" in f"{tokenizer.tool_chat_template or ''}{tokenizer.chat_template or ''}"


def template_problem(tokenizer: TextTokenizer) -> str | None:
    """What is wrong with the checkpoint's templates, for the operator's log; chats are refused, prompts work."""
    for source in (tokenizer.chat_template, tokenizer.tool_chat_template):
        try:
            if source is not None:
                _compile(source)
        except jinja2.TemplateSyntaxError as error:
            return f"the model's chat template is malformed: {error.message}"
    return None


def _render(source: str, **variables: Any) -> str:
    pieces, num_chars = [], 0
    try:
        for piece in _compile(source).generate(**variables):
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                raise InvalidRequest(
                    f"the chat template makes more than {MAX_RENDERED_CHARS} characters of these messages",
                    param="messages",
                )
            pieces.append(piece)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequest(f"the model's chat template is malformed: {error.message}", param="messages") from None
    except (
        jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        raise InvalidRequest(f"the model's chat template refuses these messages: {error}", param="messages") from None
    return "".join(pieces)


def _cut_behind_last(text: str, message: Mapping[str, Any]) -> str:
    """The rendered text up to the end of the last message's content."""
    content = message["content"].strip()
    start = text.rfind(content) if content else -1
    if start < 0:
        raise InvalidRequest(
            "the last message cannot be continued: it is empty, or the chat template does not write it as it is",
            param="messages",
        )
    return text[: start + len(content)]


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for a prompt its content counts as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
