# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of the doors' request bodies, made from the tables by which the doors read them.

A field that is added to a table is described from then on. What the tables leave to code behind them (ranges, words
that a string may be) is repeated here and held to the code by tests.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mii_zmq.embeddings import MAX_PROMPTS
from mii_zmq.gateway import openai_messages
from mii_zmq.gateway.admin_api import ABORT_FIELDS, MAX_ID_CHARS, MAX_IDS, RESET_FIELDS
from mii_zmq.gateway.anthropic_fields import MESSAGES_FIELDS
from mii_zmq.gateway.core_request import MAX_PRIORITY
from mii_zmq.gateway.embedding_fields import EMBEDDING_FIELDS, RERANK_FIELDS, SCORE_FIELDS
from mii_zmq.gateway.embedding_schemas import MAX_DIMENSIONS
from mii_zmq.gateway.field_rules import IGNORED, Honoured, Ignored, Refused, Rule
from mii_zmq.gateway.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from mii_zmq.gateway.output_forms import TYPES
from mii_zmq.gateway.responses_fields import RESPONSES_FIELDS
from mii_zmq.gateway.rest import FIELD_KINDS
from mii_zmq.gateway.token_api import DETOKENIZE_FIELDS
from mii_zmq.gateway.tool_choice import MESSAGES_MODES
from mii_zmq.sampling_params import IGNORED_FIELDS, MAX_LIST_ITEMS, MAX_N, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_TOKENS

REF = "#/components/schemas/{name}"
Schema = dict[str, Any]

_TOKENS = {"minimum": 1, "maximum": MAX_TOKENS}
_STRING = {"minLength": 1, "maxLength": MAX_STOP_CHARS}
PARAM_LIMITS: dict[str, Schema] = {
    "max_length": _TOKENS,
    "max_new_tokens": _TOKENS,
    "min_new_tokens": {"minimum": 0, "maximum": MAX_TOKENS},
    "temperature": {"minimum": 0, "maximum": 100},
    "top_k": _TOKENS,
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": 0, "maximum": 2**63 - 1},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "presence_penalty": {"minimum": -100, "maximum": 100},
    "frequency_penalty": {"minimum": -100, "maximum": 100},
    "n": {"minimum": 1, "maximum": MAX_N},
    "stop": {**_STRING, "maxItems": MAX_STOP_STRINGS, "items": _STRING},
    "bad_words": {**_STRING, "maxItems": MAX_LIST_ITEMS, "items": _STRING},
    "stop_token_ids": {"maxItems": MAX_LIST_ITEMS, "items": {"minimum": 0, "maximum": MAX_TOKENS}},
}
"""By the names of SamplingParams: what its validator allows."""
_SOME = {"minItems": 1, "minLength": 1}
_IDS = {"minLength": 1, "maxLength": MAX_ID_CHARS, "maxItems": MAX_IDS,
        "items": {"minLength": 1, "maxLength": MAX_ID_CHARS}}  # fmt: skip
_TEXTS = {**_SOME, "maxItems": MAX_PROMPTS, "items": {"minLength": 1}}
FIELD_LIMITS: dict[str, Schema] = {
    "max_tokens": _TOKENS,
    "max_completion_tokens": _TOKENS,
    "max_output_tokens": _TOKENS,
    "top_k": {"minimum": -1, "maximum": MAX_TOKENS},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    "messages": _SOME,
    "input": _SOME,
    "prompt": _SOME,
    "prompts": {**_SOME, "items": {"minLength": 1}},
    "dimensions": {"minimum": 1, "maximum": MAX_DIMENSIONS},
    "text_1": _TEXTS,
    "text_2": _TEXTS,
    "query": _SOME,
    "documents": {"minItems": 1, "maxItems": MAX_PROMPTS - 1},
    "top_n": {"minimum": 0, "maximum": MAX_TOKENS},
    "request_id": _IDS,
    "rid": _IDS,
    "tokens": {"items": {"minimum": 0, "maximum": MAX_TOKENS}},
}
"""By a field's own name, where its value does not go to SamplingParams as it is."""
CHOICES: dict[tuple[str, str], tuple[str, ...]] = {
    ("ChatMessage", "role"): openai_messages.ROLES,
    ("ChatTool", "type"): ("function",),
    ("InputItem", "type"): ("message", "reasoning", "function_call", "function_call_output"),
    ("Message", "role"): ("user", "assistant", "system"),
    ("MessageToolCall", "type"): ("function",),
    ("Thinking", "type"): ("enabled", "adaptive", "disabled"),
    ("AllowedTools", "mode"): ("auto", "required"),
    ("ChatToolChoice", "type"): ("function", "allowed_tools"),
    ("ChosenTool", "type"): ("function",),
    ("JsonOutput", "type"): ("json_schema",),
    ("MessagesToolChoice", "type"): tuple(MESSAGES_MODES),
    ("ResponseFormat", "type"): TYPES,
    ("ResponsesTool", "type"): ("function",),
    ("ResponsesToolChoice", "type"): ("function", "allowed_tools"),
    ("TextConfig", "verbosity"): ("medium",),
    ("TextFormat", "type"): TYPES[:3],
}
"""Fields of the tables' types that take only these words."""


@dataclass(frozen=True, slots=True)
class RequestTable:
    """The fields of one kind of body. `required` beyond those whose type excludes null."""

    fields: Mapping[str, Rule]
    required: tuple[str, ...] = ()

    def required_fields(self) -> list[str]:
        return [
            name
            for name, rule in self.fields.items()
            if name in self.required or (isinstance(rule, Honoured) and not _takes_null(rule.kind))
        ]


def _as_rules(kinds: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Rule]:
    """A table of plain types; `params` has the names that are fields of SamplingParams."""
    return {
        name: IGNORED if name in IGNORED_FIELDS else Honoured(kind, name if name in params else None)
        for name, kind in kinds.items()
    }


@dataclass(frozen=True, slots=True)
class MiiTable(RequestTable):
    """SamplingParams has a default for every field."""

    def required_fields(self) -> list[str]:
        return list(self.required)


_NO_STRINGS = {"return_token_strs": Refused("send single tokens to /detokenize", (b"false",))}
REQUESTS: dict[str, RequestTable] = {
    "MiiRequest": MiiTable(_as_rules(FIELD_KINDS, PARAM_LIMITS), ("prompts",)),
    "ChatCompletionRequest": RequestTable(CHAT_FIELDS),
    "CompletionRequest": RequestTable(COMPLETION_FIELDS),
    "ResponsesRequest": RequestTable(RESPONSES_FIELDS),
    "MessagesRequest": RequestTable(MESSAGES_FIELDS, ("max_tokens",)),
    "CountTokensRequest": RequestTable(
        {name: rule for name, rule in MESSAGES_FIELDS.items() if name not in ("max_tokens", "stream")}
    ),
    "TokenizeChatRequest": RequestTable({**CHAT_FIELDS, **_NO_STRINGS}),
    "TokenizePromptRequest": RequestTable({**COMPLETION_FIELDS, **_NO_STRINGS}),
    "EmbeddingRequest": RequestTable(EMBEDDING_FIELDS),
    "ScoreRequest": RequestTable(SCORE_FIELDS),
    "RerankRequest": RequestTable(RERANK_FIELDS),
    "AbortRequest": RequestTable(ABORT_FIELDS),
    "ResetPrefixCacheRequest": RequestTable(RESET_FIELDS),
    "DetokenizeRequest": RequestTable(_as_rules(DETOKENIZE_FIELDS, {})),
}
"""By the name of their schema."""


def ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}


def component_schemas(answers: Mapping[str, Any]) -> dict[str, Schema]:
    """The schemas of all bodies and of what they consist of; `answers` are types by name."""
    kinds = [rule.kind for table in REQUESTS.values() for rule in table.fields.values() if isinstance(rule, Honoured)]
    schemas, parts = msgspec.json.schema_components([*kinds, *answers.values()], ref_template=REF)
    of_kinds = iter(schemas)
    found = {}
    for name, table in REQUESTS.items():
        properties = {field: _field_schema(field, rule, of_kinds) for field, rule in table.fields.items()}
        for field in table.required:
            properties[field]["not"] = {"type": "null"}
        found[name] = {
            "type": "object",
            "properties": properties,
            "required": table.required_fields(),
            "additionalProperties": False,
        }
    for (part, field), words in CHOICES.items():
        property_ = parts.get(part, {}).get("properties", {}).get(field)
        if property_ is not None:
            property_["enum"] = [*words, None] if "anyOf" in property_ else list(words)
    return {**parts, **found}


def _field_schema(name: str, rule: Rule, of_kinds: typing.Iterator[Schema]) -> Schema:
    match rule:
        case Honoured(_, param):
            limits = FIELD_LIMITS.get(name, {}) if param is None else PARAM_LIMITS.get(param, {})
            return {**next(of_kinds), **limits}
        case Ignored():
            return {"description": "Accepted and ignored."}
        case Refused(why, harmless):
            allowed = [None, *map(msgspec.json.decode, harmless)]
            return {"enum": allowed, "description": f"Not supported: {why}."}


def _takes_null(kind: Any) -> bool:
    return kind is Any or type(None) in typing.get_args(kind)
