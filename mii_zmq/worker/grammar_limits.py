# SPDX-License-Identifier: Apache-2.0
"""A request's grammar on its way to the engine, and what the request allows beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mii_zmq.errors import InvalidRequest
from mii_zmq.sampling_params import SamplingParams
from mii_zmq.tokenizer import TextTokenizer
from mii_zmq.worker.grammar_checks import compilable
from mii_zmq.worker.plan import EngineLimits, SequenceRequest


@dataclass(slots=True)
class SequenceLimits:
    """Plain types for the channel. Ids outside the vocabulary mean nothing."""

    stop_token_ids: list[int] = field(default_factory=list)
    min_new_tokens: int = 0
    allowed_token_ids: list[int] = field(default_factory=list)
    """Empty: all."""
    bad_words: list[list[int]] = field(default_factory=list)
    prompt_tail: list[int] = field(default_factory=list)
    """The end of the prompt, as far as bad words can begin in it."""
    lead: str = ""
    """Text that the grammar reads before the first token."""
    tenant: str = ""
    """Tenants take turns at having grammars compiled."""

    @classmethod
    def of(cls, request: SequenceRequest) -> SequenceLimits:
        sampling = request.sampling
        num_tail = max((len(word) - 1 for word in sampling.bad_words), default=0)
        return cls(
            stop_token_ids=list(sampling.stop_token_ids),
            min_new_tokens=sampling.min_new_tokens,
            allowed_token_ids=list(sampling.allowed_token_ids),
            bad_words=[list(word) for word in sampling.bad_words],
            prompt_tail=request.prompt_token_ids[-num_tail:] if num_tail else [],
            lead=request.grammar_lead,
            tenant=request.cache_salt,
        )


def grammar_of(tokenizer: TextTokenizer, limits: EngineLimits, params: SamplingParams) -> tuple[str, str] | None:
    """Kind and text of the grammar that the engine has to compile, if any.

    Raises:
        InvalidRequest: this worker, this model or any grammar cannot do it, as far as that can be told here.
    """
    wanted = params.structured_output
    if wanted is None:
        return None
    problem = None
    if not limits.takes_grammars:
        problem = "this worker lacks its library; install mii_zmq with the extra 'structured' there"
    elif tokenizer.token_bytes is None:
        problem = "this model's tokenizer does not tell the bytes of its tokens, so no grammar can be followed"
    if problem is not None:
        raise InvalidRequest(f"structured_output: {problem}", param="structured_output")
    compilable(wanted.kind, wanted.value)
    return wanted.kind, wanted.value
