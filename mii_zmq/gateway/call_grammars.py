# SPDX-License-Identifier: Apache-2.0
"""Structural tags that make a model write tool calls as the reader of its format (`tool_calls`) reads them. Pure.

Formats here are those of xgrammar's structural tags: JSON objects with a `type`. `forced_calls` allow calls and nothing
else; `guarded_calls` allow any answer, but calls in it only as their functions' schemas say. The text around arguments
is spelled as the families' chat templates spell it, which is what the models have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mii_zmq.gateway.answers import ToolUse
from mii_zmq.gateway.reasoning import CLOSING, OPENING

Format = dict[str, Any]

MAX_SPACES = 12
"""Between two marks of JSON: a line's end and an indentation, not pages of nothing."""
_OBJECT: Format = {"type": "object"}
_APPLICATORS = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords that say of a schema, somehow, what values it takes."""
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


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def schema_format(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_SPACES}


Schemas = Mapping[str, Any]


def _arguments(schema: Mapping[str, Any] | None) -> Format:
    """Arguments are an object, also where the schema does not say so."""
    if schema is None:
        return schema_format({"type": "object", "properties": {}})
    return schema_format(schema if any(name in schema for name in _APPLICATORS) else {"type": "object", **schema})


def _tags(schemas: Schemas, begin: str, end: str) -> list[Format]:
    """One tag per tool; `begin` has its name in place of NAME."""
    return [
        {"type": "tag", "begin": begin.replace("NAME", name), "content": _arguments(schema), "end": end}
        for name, schema in schemas.items()
    ]


def _list(tags: Sequence[Format], separator: str, is_parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }


def _text_with(rules: Mapping[str, Format], is_parallel: bool) -> Format:
    """Any text; what follows one of the keys is in the form beside it."""
    return {"type": "dispatch", "rules": [list(rule) for rule in rules.items()], "loop": is_parallel}


def _hermes(schemas: Schemas, is_parallel: bool) -> Format:
    tags = _tags(schemas, '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
    return _list(tags, "\n", is_parallel)


def _hermes_guarded(schemas: Schemas, is_parallel: bool) -> Format:
    tags = _tags(schemas, '\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
    return _text_with({"<tool_call>": either(tags)}, is_parallel)


def _llama3(schemas: Schemas, is_parallel: bool) -> Format:
    return _list(_tags(schemas, '{"name": "NAME", "parameters": ', "}"), "; ", is_parallel)


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
                   _list(_mistral_named(schemas, "[TOOL_CALLS]NAME"), "", is_parallel)])  # fmt: skip


def _mistral_guarded(schemas: Schemas, is_parallel: bool) -> Format:
    forms = [_mistral_list(schemas, is_parallel), *_mistral_named(schemas, "NAME")]
    return _text_with({"[TOOL_CALLS]": either(forms)}, is_parallel)


def _mistral_list(schemas: Schemas, is_parallel: bool) -> Format:
    calls = _list(_tags(schemas, '{"name": "NAME", "arguments": ', "}"), ", ", is_parallel)
    return {"type": "tag", "begin": "[", "content": calls, "end": "]"}


def _mistral_named(schemas: Schemas, begin: str) -> list[Format]:
    return [
        {
            "type": "tag",
            "begin": begin.replace("NAME", name),
            "content": sequence(_CALL_ID, const("[ARGS]"), _arguments(schema)),
            "end": "",
        }
        for name, schema in schemas.items()
    ]


_Maker = Callable[[Schemas, bool], Format]
_FORCED: dict[str, _Maker] = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral, "any": _llama3}
"""Where nobody says how the model writes calls, it writes plain objects, which its reader knows as well."""
_GUARDED: dict[str, _Maker] = {"hermes": _hermes_guarded, "llama3": _llama3_guarded, "mistral": _mistral_guarded}
