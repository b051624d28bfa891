# SPDX-License-Identifier: Apache-2.0
"""Requests for embeddings, scores and reranking, understood: the texts to embed, and what to make of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mii_zmq.embeddings import MAX_PROMPTS
from mii_zmq.errors import InvalidRequest, MiiError, UnknownDeployment
from mii_zmq.gateway.core_request import check_priority, renamed
from mii_zmq.gateway.embedding_fields import EMBEDDING_FIELDS, RERANK_FIELDS, SCORE_FIELDS, Document
from mii_zmq.gateway.field_rules import ParsedFields, Rule, apply_rules
from mii_zmq.gateway.prompt_lists import Prompt, prompt_body, read_prompts
from mii_zmq.gateway.request_body import Fields
from mii_zmq.protocol import GenerateBody

MAX_DIMENSIONS = 2**20
"""More than any model has; how many this one has its workers know."""
_NAMES = ("prompt_token_ids", "prompt")
"""What the workers call a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTexts:
    """Texts of one request that are embedded together."""

    model: str
    bodies: list[GenerateBody]
    places: list[str]
    """Where in the request each text stands, for errors."""
    priority: int
    ignored: list[str]

    @property
    def headers(self) -> dict[str, str]:
        return {"x-ignored-fields": ", ".join(self.ignored)} if self.ignored else {}

    def rename(self, index: int, error: MiiError) -> MiiError:
        """The error with which a text's embedding ended, in the names of the request."""
        if isinstance(error, UnknownDeployment):
            return UnknownDeployment(error.message, param="model")
        return renamed(error, dict.fromkeys(_NAMES, self.places[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(EmbeddingTexts):
    """For /v1/embeddings."""

    is_base64: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(EmbeddingTexts):
    """The first `num_left` texts are compared with the others: one with each, or each with its counterpart."""

    num_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest(EmbeddingTexts):
    """The first text is the query, the others are the documents."""

    documents: list[str]
    top_n: int
    return_documents: bool


def parse_embedding(fields: Fields) -> EmbeddingRequest:
    """Raises InvalidRequest; `param` names the field."""
    parsed = apply_rules(fields, EMBEDDING_FIELDS)
    values = parsed.values
    _require(values, EMBEDDING_FIELDS, "input")
    dimensions = values.get("dimensions")
    if dimensions is not None and not 1 <= dimensions <= MAX_DIMENSIONS:
        raise InvalidRequest(
            f"dimensions is {dimensions}, allowed: 1 to the size of the model's vectors", param="dimensions"
        )
    given = values["input"]
    prompts = read_prompts(given, "input", MAX_PROMPTS)
    is_one = isinstance(given, str) or isinstance(given[0], int)
    places = ["input"] if is_one else [f"input[{index}]" for index in range(len(prompts))]
    more = {"dimensions": dimensions, "normalize": values.get("normalize", True)}
    return EmbeddingRequest(
        **_common(parsed, prompts, places, **more), is_base64=values.get("encoding_format") == "base64"
    )


def parse_score(fields: Fields) -> ScoreRequest:
    """Raises InvalidRequest; `param` names the field."""
    parsed = apply_rules(fields, SCORE_FIELDS)
    values = parsed.values
    _require(values, SCORE_FIELDS, "text_1", "text_2")
    left, right = (_texts(values[name], name) for name in ("text_1", "text_2"))
    if len(left) not in (1, len(right)):
        raise InvalidRequest(
            f"text_1 holds {len(left)} texts and text_2 {len(right)}; send one text_1, or as many as text_2 has",
            param="text_1",
        )
    _check_count(len(left) + len(right), "text_2")
    places = [*_places(values["text_1"], "text_1"), *_places(values["text_2"], "text_2")]
    return ScoreRequest(**_common(parsed, [*left, *right], places), num_left=len(left))


def parse_rerank(fields: Fields) -> RerankRequest:
    """Raises InvalidRequest; `param` names the field."""
    parsed = apply_rules(fields, RERANK_FIELDS)
    values = parsed.values
    _require(values, RERANK_FIELDS, "query", "documents")
    _check_count(1 + len(values["documents"]), "documents")
    given = [item.text if isinstance(item, Document) else item for item in values["documents"]]
    (query,), documents = _texts(values["query"], "query"), _texts(given, "documents")
    top_n = values.get("top_n", 0)
    if not 0 <= top_n < 2**31:
        raise InvalidRequest(f"top_n is {top_n}, allowed: 1 and more, or 0 for all documents", param="top_n")
    return RerankRequest(
        **_common(parsed, [query, *documents], ["query", *_places(documents, "documents")]),
        documents=documents,
        top_n=top_n or len(documents),
        return_documents=values.get("return_documents", True),
    )


def _common(parsed: ParsedFields, prompts: list[Any], places: list[str], **fields: Any) -> dict[str, Any]:
    values = parsed.values
    fields |= {"task": "embed", "pooling": values.get("pooling")}
    add_special_tokens = values.get("add_special_tokens", True)
    return {
        "model": values["model"],
        "bodies": [_body(prompt, add_special_tokens, fields) for prompt in prompts],
        "places": places,
        "priority": check_priority(values.get("priority", 0)),
        "ignored": parsed.ignored,
    }


def _body(prompt: Prompt, add_special_tokens: bool, fields: dict[str, Any]) -> GenerateBody:
    return prompt_body(prompt, add_special_tokens, **fields)


def _require(values: Mapping[str, Any], rules: Mapping[str, Rule], *names: str) -> None:
    for name in names:
        if name not in values:
            raise InvalidRequest(f"{name} is missing; the fields of this path are {', '.join(rules)}", param=name)
    if "model" not in values:
        raise InvalidRequest("model is missing; /v1/models lists what is served", param="model")


def _texts(value: str | list[str], param: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise InvalidRequest(f"{param} is an empty list; send at least one text", param=param)
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"{param} is empty at index {index}; send some text", param=param)
    return texts


def _places(value: str | list[str], param: str) -> list[str]:
    return [param] if isinstance(value, str) else [f"{param}[{index}]" for index in range(len(value))]


def _check_count(num_texts: int, param: str) -> None:
    if num_texts > MAX_PROMPTS:
        raise InvalidRequest(
            f"{param} makes {num_texts} texts in all; the limit is {MAX_PROMPTS}, send fewer at a time", param=param
        )
