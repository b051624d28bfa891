# SPDX-License-Identifier: Apache-2.0
"""Structural tags that make a model write tool calls as the reader of its format (`tool_calls`) reads them. Pure.

Formats here are those of xgrammar's structural tags: JSON objects with a `type`. `forced_calls` allow calls and nothing
else; `guarded_calls` allow any answer, but calls in it only as their functions' schemas say. The text around arguments
is spelled as the families' chat templates spell it, which is what the models have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mii_zmq.gateway.answers import ToolUse
from mii_zmq.gateway.call_formats import Format, Schemas, arguments, call_list, const, either, sequence
from mii_zmq.gateway.reasoning import CLOSING, OPENING
from mii_zmq.gateway.section_grammars import SECTIONS, forced_section, guarded_section

_OBJECT: Format = {"type": "object"}
SPACES = r"[ \n\r\t]"
"""Not \\s, which the compiler and Python read differently."""
_CALL_ID: Format = {"type": "optional", "content": {"type": "regex", "pattern": r"\[CALL_ID\][a-zA-Z0-9]{9}"}}


def forced_calls(tool_format: str, use: ToolUse) -> Format | None:
    """One call, or several where `use` allows it; None: how such models write calls cannot be prescribed here."""
    make = _FORCED.get(tool_format)
    return None if make is None else make(use.tools, use.is_parallel)


def guarded_calls(tool_format: str, use: ToolUse) -> Format | None:
    """Any text, in which what begins a call goes on as a call; None as in `forced_calls`.

    Arguments of functions that are not strict are any object.
    """
    make = _GUARDED.get(tool_format)
    if make is None:
        return None
    schemas = {name: schema if name in use.strict else _OBJECT for name, schema in use.tools.items()}
    return make(schemas, use.is_parallel)


def behind_reasoning(content: Format) -> Format:
    """The format, with or without a block of reasoning in front of it."""
    block = {"type": "tag", "begin": OPENING, "content": {"type": "any_text"}, "end": CLOSING}
    spaces = {"type": "regex", "pattern": f"{SPACES}*"}
    return sequence({"type": "optional", "content": sequence(block, spaces)}, content)


def _tags(schemas: Schemas, begin: str, end: str) -> list[Format]:
    """One tag per tool; `begin` has its name in place of NAME."""
    return [
        {"type": "tag", "begin": begin.replace("NAME", name), "content": arguments(schema), "end": end}
        for name, schema in schemas.items()
    ]


def _text_with(rules: Mapping[str, Format], is_parallel: bool) -> Format:
    """Any text; what follows one of the keys is in the form beside it."""
    return {"type": "dispatch", "rules": [list(rule) for rule in rules.items()], "loop": is_parallel}


def _hermes(schemas: Schemas, is_parallel: bool) -> Format:
    tags = _tags(schemas, '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
    return call_list(tags, "\n", is_parallel)


def _hermes_guarded(schemas: Schemas, is_parallel: bool) -> Format:
    tags = _tags(schemas, '\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
    return _text_with({"<tool_call>": either(tags)}, is_parallel)


def _llama3(schemas: Schemas, is_parallel: bool) -> Format:
    return call_list(_tags(schemas, '{"name": "NAME", "parameters": ', "}"), "; ", is_parallel)


def _llama3_guarded(schemas: Schemas, is_parallel: bool) -> Format:
    """An answer that begins with an object is calls, as the reader takes it; other text may hold some behind marks."""
    calls = _llama3(schemas, is_parallel)
    # Calls end the answer: a bracket behind them would begin another one for the reader.
    marked = _text_with({"<|python_tag|>": calls}, is_parallel=False)
    # The mark's first character would be lost to `marked`, so that no other text begins with it and a bar.
    text = sequence({"type": "regex", "pattern": rf"{SPACES}*([^\s\x00-\x1f\x85{{<]|<[^|])"}, marked)
    tagged = sequence(const("<|python_tag|>"), calls)
    return {"type": "optional", "content": either([calls, text, tagged])}


def _mistral(schemas: Schemas, is_parallel: bool) -> Format:
    """Which of its two spellings a model has learned, it shows by itself."""
    return either([sequence(const("[TOOL_CALLS]"), _mistral_list(schemas, is_parallel)),
                   call_list(_mistral_named(schemas, "[TOOL_CALLS]NAME"), "", is_parallel)])  # fmt: skip


def _mistral_guarded(schemas: Schemas, is_parallel: bool) -> Format:
    forms = [_mistral_list(schemas, is_parallel), *_mistral_named(schemas, "NAME")]
    return _text_with({"[TOOL_CALLS]": either(forms)}, is_parallel)


def _mistral_list(schemas: Schemas, is_parallel: bool) -> Format:
    calls = call_list(_tags(schemas, '{"name": "NAME", "arguments": ', "}"), ", ", is_parallel)
    return {"type": "tag", "begin": "[", "content": calls, "end": "]"}


def _mistral_named(schemas: Schemas, begin: str) -> list[Format]:
    return [
        {
            "type": "tag",
            "begin": begin.replace("NAME", name),
            "content": sequence(_CALL_ID, const("[ARGS]"), arguments(schema)),
            "end": "",
        }
        for name, schema in schemas.items()
    ]


_Maker = Callable[[Schemas, bool], Format]
_FORCED: dict[str, _Maker] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "llama4": _llama3,
    "mistral": _mistral,
    "any": _llama3,
    **{name: forced_section(name) for name in SECTIONS},
}
"""Where nobody says how the model writes calls, it writes plain objects, which its reader knows as well. Calls in
Python are no format of the compiler's."""
_GUARDED: dict[str, _Maker] = {
    "hermes": _hermes_guarded,
    "llama3": _llama3_guarded,
    "mistral": _mistral_guarded,
    **{name: guarded_section(name) for name in SECTIONS},
}
