# SPDX-License-Identifier: Apache-2.0
"""The tables of every field of embeddings, scores and reranking that OpenAI, vLLM, Jina or Cohere publishes;
`field_rules` says what the rules mean."""

from __future__ import annotations

from typing import Literal

import msgspec

from mii_zmq.gateway.field_rules import IGNORED, Honoured, Refused, Rule

Pooling = Literal["last", "mean", "first", "cls"]


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document to rank, as an object."""

    text: str


_WHOLE = "inputs are never truncated; shorten it"
_NO_MEDIA = "this server handles text only"

_COMMON_FIELDS: dict[str, Rule] = {
    "model": Honoured(str),
    "pooling": Honoured(Pooling | None),
    "add_special_tokens": Honoured(bool | None),
    "priority": Honoured(int | None),
    **dict.fromkeys(("user", "request_id", "mm_processor_kwargs", "truncation_side"), IGNORED),
    "stream": Refused("there is one answer", (b"false",)),
    "truncate_prompt_tokens": Refused(_WHOLE, (b"-1",)),
    "cache_salt": Refused("salts for the prefix cache are not available at this door"),
    "additional_data": Refused("there is nothing that would read additional data"),
}

EMBEDDING_FIELDS: dict[str, Rule] = {
    **_COMMON_FIELDS,
    "input": Honoured(str | list[str | int | list[int]]),
    "encoding_format": Honoured(Literal["float", "base64"] | None),
    "dimensions": Honoured(int | None),
    "normalize": Honoured(bool | None),
    "use_activation": Refused("send normalize", (b"true",)),
    "embed_dtype": Refused("vectors are float32", (b'"float32"',)),
    "endianness": Refused("vectors are little endian", (b'"native"', b'"little"')),
    "messages": Refused("conversations are not embedded; send their text as input"),
}

_PAIR_FIELDS: dict[str, Rule] = {
    **_COMMON_FIELDS,
    "use_activation": Refused("scores are cosine similarities", (b"true", b"false")),
    "activation": Refused("scores are cosine similarities", (b"true", b"false")),
    "softmax": Refused("scores are cosine similarities", (b"false",)),
    "instruction": Refused("this model takes no instruction; write it into the query"),
}

SCORE_FIELDS: dict[str, Rule] = {
    **_PAIR_FIELDS,
    "text_1": Honoured(str | list[str]),
    "text_2": Honoured(str | list[str]),
    **dict.fromkeys(("data_1", "data_2", "queries", "items", "documents"), Refused("send text_1 and text_2")),
}

RERANK_FIELDS: dict[str, Rule] = {
    **_PAIR_FIELDS,
    "query": Honoured(str),
    "documents": Honoured(list[str | Document]),
    "top_n": Honoured(int | None),
    "return_documents": Honoured(bool | None),
    "max_chunks_per_doc": Refused("documents are ranked whole, never in chunks"),
    "max_tokens_per_doc": Refused(_WHOLE),
    "truncation": Refused(_WHOLE, (b"false",)),
    "rank_fields": Refused("documents have one field, text", (b"[]", b'["text"]')),
    "return_embeddings": Refused("embeddings are had at /v1/embeddings", (b"false",)),
    "image": Refused(_NO_MEDIA),
}
