# SPDX-License-Identifier: Apache-2.0
"""Chat messages to prompt text: checks the messages, then renders the checkpoint's Jinja template in a sandbox.

Templates come with checkpoints and are not trusted: no attribute access to Python internals, no mutation of what they
are given, only plain strings, lists and dicts as input, a limit on the output. Requests cannot bring a template or
variables of their own. Rendered text already holds its special tokens, so it is encoded without adding any.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mii_zmq.config import MAX_BODY_BYTES
from mii_zmq.errors import InvalidRequest
from mii_zmq.sampling_params import check_text, unknown_field
from mii_zmq.tokenizer import TextTokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = ("role", "content", "name")
MAX_MESSAGES = 4096
MAX_RENDERED_CHARS = 2 * MAX_BODY_BYTES


def render_chat(tokenizer: TextTokenizer, messages: Any, add_generation_prompt: bool = True) -> str:
    """The prompt text of a conversation.

    Raises:
        InvalidRequest: malformed messages (`param` names the place), no template, or a template that refuses them.
    """
    checked = check_messages(messages)
    if tokenizer.chat_template is None:
        raise InvalidRequest("this model has no chat template; send a prompt instead of messages", param="messages")
    pieces, num_chars = [], 0
    try:
        template = _compile(tokenizer.chat_template)
        # Special tokens that the checkpoint lacks stay undefined, as templates test for them.
        for piece in template.generate(
            messages=checked,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens,
        ):
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
    return check_text("".join(pieces), "messages")


def check_messages(messages: Any) -> list[dict[str, str]]:
    """Validate messages; content given as a list of text parts becomes one string, a part per line.

    Raises:
        InvalidRequest: `param` names the place, e.g. `messages[2].content`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise _refused("messages", f"must be a list of messages, got {_kind(messages)}")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise _refused("messages", f"holds {len(messages)} messages, allowed: 1 to {MAX_MESSAGES}")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _refused(where, f"must be an object with role and content, got {_kind(message)}")
    present = {name: value for name, value in message.items() if value is not None}
    for name in present:
        if name not in MESSAGE_FIELDS:
            raise InvalidRequest(f"{where}: {unknown_field(str(name), MESSAGE_FIELDS)}", param=f"{where}.{name}")
    role = present.get("role")
    if role not in ROLES:
        shown = repr(role)[:60] if isinstance(role, str) else "missing" if role is None else _kind(role)
        raise _refused(f"{where}.role", f"is {shown}, allowed: {', '.join(ROLES)}")
    checked = {"role": role, "content": _check_content(present.get("content"), f"{where}.content")}
    if "name" in present:
        if not isinstance(present["name"], str):
            raise _refused(f"{where}.name", f"must be a string, got {_kind(present['name'])}")
        checked["name"] = check_text(present["name"], f"{where}.name")
    return checked


def _check_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return check_text(content, where)
    if content is None:
        raise _refused(where, "is missing")
    if not isinstance(content, (list, tuple)):
        raise _refused(where, f"must be a string or a list of text parts, got {_kind(content)}")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise _refused(place, f"must be an object with type and text, got {_kind(part)}")
        if part.get("type") != "text":
            raise _refused(f"{place}.type", f"is {str(part.get('type'))[:60]!r}; this model takes only text parts")
        if not isinstance(part.get("text"), str):
            raise _refused(f"{place}.text", f"must be a string, got {_kind(part.get('text'))}")
        texts.append(check_text(part["text"], f"{place}.text"))
    return "\n".join(texts)


def _refused(where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {reason}", param=where)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


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
