# SPDX-License-Identifier: Apache-2.0
"""What a request allows beside its grammar, as engine and grammar process exchange it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mii_zmq.worker.plan import SequenceRequest


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
        )
