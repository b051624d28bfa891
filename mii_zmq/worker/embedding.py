# SPDX-License-Identifier: Apache-2.0
"""The embedding of a prompt: from a request to a sequence that is pooled, and from the pooled vector to the answer.

Pure. The engine gives the vector whole and unscaled; what a request wants of it (its first numbers only, length 1) is
done here, so that every kind of engine needs to know pooling alone. Scaling takes numpy, since the actor's loop waits
for it; an actor that embeds nothing never loads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mii_zmq.errors import InvalidRequest
from mii_zmq.protocol import GenerateBody
from mii_zmq.tokenizer import TextTokenizer
from mii_zmq.worker.plan import POOLINGS, EngineLimits, SamplingSpec, SequenceRequest
from mii_zmq.worker.prompt_text import PromptInput, encode_prompt

ALIASES = {"cls": "first"}
"""Other names of poolings."""


@dataclass(slots=True)
class PreparedEmbedding:
    """A request ready for the engine."""

    sequence: SequenceRequest
    dimensions: int | None
    normalize: bool

    @property
    def prompt_length(self) -> int:
        return len(self.sequence.prompt_token_ids)


def build_embedding(
    tokenizer: TextTokenizer,
    limits: EngineLimits,
    body: GenerateBody,
    prompt: PromptInput,
    pooling: str,
    *,
    seq_id: int,
    priority: int,
    cache_salt: str,
) -> PreparedEmbedding:
    """Tokenize and check one request; `pooling` is the deployment's, for a request that names none.

    Raises:
        InvalidRequest: the prompt is empty or malformed, or an option is impossible for this model.
        PromptTooLong: the prompt exceeds the model's context or the whole KV pool.
    """
    if not limits.hidden_size:
        raise InvalidRequest("this model does not give its hidden states, so it cannot embed", param="task")
    if body.params:
        raise InvalidRequest(
            f"params holds {next(iter(body.params))[:40]!r}, but nothing is sampled for an embedding; leave params out",
            param="params",
        )
    wanted = pooling if body.pooling is None else body.pooling
    wanted = ALIASES.get(wanted, wanted)
    if wanted not in POOLINGS:
        raise InvalidRequest(f"pooling is {wanted[:40]!r}, allowed: {', '.join(POOLINGS)}", param="pooling")
    if body.dimensions is not None and not 1 <= body.dimensions <= limits.hidden_size:
        raise InvalidRequest(
            f"dimensions is {body.dimensions}, allowed: 1 to {limits.hidden_size}, the size of this model's vectors",
            param="dimensions",
        )
    if body.normalize:
        # Here, in a thread that tokenizes, and not when the first vector comes: it takes a tenth of a second.
        import numpy  # noqa: F401
    token_ids, _ = encode_prompt(tokenizer, limits, prompt, has_output=False)
    sequence = SequenceRequest(
        seq_id=seq_id,
        prompt_token_ids=token_ids,
        max_new_tokens=0,
        sampling=SamplingSpec(pooling=wanted),
        priority=priority,
        cache_salt=cache_salt,
    )
    return PreparedEmbedding(sequence, body.dimensions, body.normalize)


def shape_vector(pooled: bytes, dimensions: int | None, normalize: bool) -> bytes:
    """The first `dimensions` numbers (None: all), scaled to length 1 where asked for; a vector of zeros stays one.

    Both sides float32, little endian.
    """
    if dimensions is not None:
        pooled = pooled[: 4 * dimensions]
    if not normalize:
        return pooled
    import numpy as np

    values = np.frombuffer(pooled, "<f4").astype(np.float64)
    length = math.sqrt(values.dot(values))
    return (values / length).astype("<f4").tobytes() if length else pooled
