# SPDX-License-Identifier: Apache-2.0
"""What requests say of the form of their answer, in the spellings of OpenAI, vLLM and Anthropic, as one grammar. Pure.

    response_format, text.format               OpenAI: text, json_object, json_schema; vLLM adds structural_tag
    structured_outputs                         vLLM: exactly one of its kinds
    guided_json, guided_regex, ...             vLLM before 0.12
    output_config.format, output_format        Anthropic: json_schema

A request makes one demand at most. Sizes are checked by the one validator (`mii_zmq.structured_output`), meaning by the
worker's compiler; `constraints` fits the grammar to tools and reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.core_request import check_plain
from mii_zmq.structured_output import GrammarKind, StructuredOutput


@dataclass(frozen=True, slots=True)
class Demand:
    field: str
    """Of the request, e.g. `structured_outputs.regex`."""
    grammar: StructuredOutput


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`json_schema` of OpenAI's response_format. The schema holds whether or not it is called strict."""

    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TagStructure(msgspec.Struct, forbid_unknown_fields=True):
    """One tag of vLLM's older structural tags."""

    begin: str
    end: str
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Of chats and completions: the type, and what belongs to it."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`text.format` of OpenAI's Responses: the schema lies beside its type."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class JsonOutput(msgspec.Struct, forbid_unknown_fields=True):
    """A format as Anthropic's Messages take it."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: JsonOutput | None = None
    effort: str | None = None
    task_budget: Any = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's: exactly one kind, and options of its compilers."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf", "structural_tag": "structural_tag",
}  # fmt: skip
"""vLLM's names of kinds."""
_GUIDED: dict[str, GrammarKind] = {
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "ebnf",
    "structural_tag": "structural_tag",
}  # fmt: skip
"""Its former fields."""
_OWNERS = {"json_schema": "json_schema", "format": "structural_tag", "structures": "structural_tag"}
"""Fields of a response_format and the type to which they belong."""
TYPES = ("text", "json_object", "json_schema", "structural_tag")


def openai_demand(values: Mapping[str, Any]) -> Demand | None:
    """Of a chat or completion, from its decoded fields. Raises InvalidRequest; `param` names the place."""
    demands = _guided(values)
    if (asked := values.get("response_format")) is not None:
        demands += _response_format(asked)
    return _only(demands)


def responses_demand(values: Mapping[str, Any]) -> Demand | None:
    """Of a request for a response. Raises as `openai_demand`."""
    demands = _guided(values)
    text: TextConfig = values.get("text", TextConfig())
    if text.verbosity not in (None, "medium"):
        raise _refused("text.verbosity", f"is {text.verbosity[:40]!r}; verbosity cannot be set")
    asked, where = text.format, "text.format"
    if asked is not None:
        _check_type(asked.type, TYPES[:3], where)
        if asked.type == "json_schema":
            demands.append(_json_schema(asked.schema, where))
        elif asked.schema is not None:
            raise _refused(f"{where}.schema", f"is for the type json_schema, not {asked.type}")
        elif asked.type == "json_object":
            demands.append(Demand(where, StructuredOutput("json_object")))
    return _only(demands)


def messages_demand(values: Mapping[str, Any]) -> Demand | None:
    """Of Anthropic's Messages. Raises as `openai_demand`."""
    config: OutputConfig = values.get("output_config", OutputConfig())
    for name in ("effort", "task_budget"):
        if getattr(config, name) is not None:
            raise _refused(f"output_config.{name}", "is not supported: the effort of an answer cannot be set")
    demands = []
    for where, asked in (("output_config.format", config.format), ("output_format", values.get("output_format"))):
        if asked is not None:
            _check_type(asked.type, ("json_schema",), where)
            demands.append(_json_schema(asked.schema, where))
    return _only(demands)


def _response_format(asked: ResponseFormat) -> list[Demand]:
    where = "response_format"
    _check_type(asked.type, TYPES, where)
    for name, owner in _OWNERS.items():
        if getattr(asked, name) is not None and asked.type != owner:
            raise _refused(f"{where}.{name}", f"is for the type {owner}, not {asked.type}")
    match asked.type:
        case "text":
            return []
        case "json_object":
            return [Demand(where, StructuredOutput("json_object"))]
        case "json_schema":
            if asked.json_schema is None:
                raise _refused(f"{where}.json_schema", "is missing; it holds the name and the schema")
            schema = asked.json_schema.schema
            return [Demand(where, _json_schema(schema, f"{where}.json_schema").grammar)]
        case _:
            return [Demand(where, StructuredOutput("structural_tag", _structural_tag(asked, where)))]


def _structural_tag(asked: ResponseFormat, where: str) -> str:
    if asked.format is not None and asked.structures is None and asked.triggers is None:
        return _encode({"type": "structural_tag", "format": asked.format}, where)
    if asked.format is not None or not asked.structures or not asked.triggers:
        raise _refused(where, "of the type structural_tag has to have a format, or structures and triggers")
    tags = [
        {
            "type": "tag",
            "begin": tag.begin,
            "content": {"type": "json_schema", "json_schema": True if tag.schema is None else tag.schema},
            "end": tag.end,
        }
        for tag in asked.structures
    ]
    return _encode(
        {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": asked.triggers, "tags": tags},
        },
        where,
    )


def _json_schema(schema: dict[str, Any] | None, where: str) -> Demand:
    if schema is None:
        raise _refused(f"{where}.schema", "is missing; send a JSON schema, or the type json_object for any object")
    return Demand(where, StructuredOutput("json_schema", _encode(schema, f"{where}.schema")))


def _guided(values: Mapping[str, Any]) -> list[Demand]:
    """vLLM's demands, in either spelling."""
    demands = [
        Demand(name, StructuredOutput(kind, _text(values[name], kind, name)))
        for name, kind in _GUIDED.items()
        if values.get(name) is not None
    ]
    asked: StructuredOutputs | None = values.get("structured_outputs")
    if asked is None:
        return demands
    if asked.whitespace_pattern is not None or asked.disable_any_whitespace:
        name = "whitespace_pattern" if asked.whitespace_pattern is not None else "disable_any_whitespace"
        raise _refused(f"structured_outputs.{name}", "is not supported: spaces in JSON are the model's to choose")
    for name, kind in _KINDS.items():
        value = getattr(asked, name)
        if value is not None:
            where = f"structured_outputs.{name}"
            demands.append(Demand(where, StructuredOutput(kind, _text(value, kind, where))))
    if asked.json_object:
        demands.append(Demand("structured_outputs.json_object", StructuredOutput("json_object")))
    return demands


def _only(demands: Sequence[Demand]) -> Demand | None:
    if len(demands) > 1:
        first, second = demands[0].field, demands[1].field
        raise _refused(second, f"and {first} both say which form the answer shall have; send one of them")
    return demands[0] if demands else None


def _check_type(kind: str, allowed: Sequence[str], where: str) -> None:
    if kind not in allowed:
        raise _refused(f"{where}.type", f"is {kind[:40]!r}, allowed: {', '.join(allowed)}")


def _text(value: Any, kind: GrammarKind, where: str) -> str:
    """A grammar's text, of a value that may be JSON or JSON as text."""
    if kind == "structural_tag":
        try:
            text = value if isinstance(value, str) else _encode(value, where)
            asked = msgspec.json.decode(text, type=ResponseFormat)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise _refused(where, f"is no structural tag: {str(error)[:200]}") from None
        _check_type(asked.type, ("structural_tag",), where)
        return _structural_tag(asked, where)
    return value if isinstance(value, str) else _encode(value, where)


def _encode(value: Any, where: str) -> str:
    return msgspec.json.encode(check_plain(value, where)).decode()


def _refused(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}", param=where)
