# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings, and what is made of embeddings: /score, and the /rerank of Jina and Cohere.

Handlers only; requests are understood in `embedding_schemas`. A score is the cosine of two texts' embeddings, as vLLM
has it for models that embed.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from mii_zmq.embeddings import MAX_VECTOR_BYTES, embed_all, values_of
from mii_zmq.errors import ServiceError
from mii_zmq.gateway.embedding_schemas import (
    EmbeddingRequest,
    EmbeddingTexts,
    RerankRequest,
    ScoreRequest,
    parse_embedding,
    parse_rerank,
    parse_score,
)
from mii_zmq.gateway.generations import check_model
from mii_zmq.gateway.http_errors import JSON
from mii_zmq.gateway.request_body import read_fields
from mii_zmq.gateway.sse import encode
from mii_zmq.gateway.state import GATEWAY
from mii_zmq.gateway.terms import Terms, terms_of

if TYPE_CHECKING:
    from mii_zmq.client import Completion, Generation

SMALL_BYTES = 2**15
"""Vectors that are made into an answer at once; more are in a thread, so that others' streams go on, and so are
comparisons, of which the first one imports numpy."""

Body = dict[str, Any]


async def embeddings(request: web.Request) -> web.Response:
    """Handler of POST /v1/embeddings."""
    terms = terms_of(request)
    asked = parse_embedding(await read_fields(request))
    return await _answer(request, terms, asked, lambda results: _embeddings(asked, results))


async def score(request: web.Request) -> web.Response:
    """Handler of POST /score and /v1/score."""
    terms = terms_of(request)
    asked = parse_score(await read_fields(request))
    return await _answer(request, terms, asked, lambda results: _scores(asked, results))


async def rerank(request: web.Request) -> web.Response:
    """Handler of POST /rerank, /v1/rerank and /v2/rerank."""
    terms = terms_of(request)
    asked = parse_rerank(await read_fields(request))
    return await _answer(request, terms, asked, lambda results: _ranking(asked, results))


async def _answer(
    request: web.Request, terms: Terms, asked: EmbeddingTexts, make: Callable[[Sequence[Completion]], Body]
) -> web.Response:
    gateway = request.app[GATEWAY]
    if asked.priority:
        terms = replace(terms, priority=asked.priority)
    generations: list[Generation] = []
    record = terms.record
    if record is not None:
        record.model, record.generations = asked.model, generations
    with gateway.running():
        check_model(asked.model)
        results = await embed_all(
            gateway.client, asked.model, asked.bodies,
            tenant=terms.tenant, priority=terms.priority, left_s=terms.left_s, rename=asked.rename,
            name="" if record is None else record.request_id, trace=None if record is None else record.trace,
            generations=generations, max_bytes=MAX_VECTOR_BYTES,
        )  # fmt: skip
        for result in results:
            gateway.metrics.count_tokens(asked.model, result.prompt_length, result.num_cached_tokens, 0)
        if isinstance(asked, EmbeddingRequest) and sum(len(result.embedding) for result in results) <= SMALL_BYTES:
            body = encode(make(results))
        else:
            body = await asyncio.to_thread(lambda: encode(make(results)))
    return web.Response(body=body, content_type=JSON, headers=asked.headers)


def _embeddings(asked: EmbeddingRequest, results: Sequence[Completion]) -> Body:
    show = _base64 if asked.is_base64 else values_of
    return {
        "id": f"embd-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": asked.model,
        # Each encoded apart: the lock of the interpreter is held for one vector at a time, not for all of the body.
        "data": [
            msgspec.Raw(encode({"object": "embedding", "index": index, "embedding": show(result.embedding)}))
            for index, result in enumerate(results)
        ],
        "usage": _usage(results),
    }


def _scores(asked: ScoreRequest, results: Sequence[Completion]) -> Body:
    vectors = [result.embedding for result in results]
    scores = similarities(vectors[: asked.num_left], vectors[asked.num_left :])
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": asked.model,
        "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)],
        "usage": _usage(results),
    }


def _ranking(asked: RerankRequest, results: Sequence[Completion]) -> Body:
    vectors = [result.embedding for result in results]
    scores = similarities(vectors[:1], vectors[1:])
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: asked.top_n]
    texts = asked.documents if asked.return_documents else None
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": asked.model,
        "usage": _usage(results),
        "results": [
            {
                "index": index,
                **({} if texts is None else {"document": {"text": texts[index]}}),
                "relevance_score": scores[index],
            }
            for index in order
        ],
    }


def similarities(left: Sequence[bytes], right: Sequence[bytes]) -> list[float]:
    """Cosines of one vector with each of the others, or of each with its counterpart.

    Vectors have length 1, or 0; float32, little endian. Raises ServiceError for vectors of different sizes.
    """
    import numpy as np

    if len({len(vector) for vector in (*left, *right)}) != 1:
        raise ServiceError("the groups of this model give vectors of different lengths; they serve different models")
    ours, theirs = (np.frombuffer(b"".join(side), "<f4").reshape(len(side), -1).astype("f8") for side in (left, right))
    cosines: list[float] = (ours * theirs).sum(1).clip(-1.0, 1.0).tolist()
    return cosines


def _usage(results: Sequence[Completion]) -> Body:
    num_tokens = sum(result.prompt_length for result in results)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
