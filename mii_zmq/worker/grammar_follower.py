# SPDX-License-Identifier: Apache-2.0
"""One sequence on its way through a compiled grammar: tokens in, masks of what may come next out.

A mask is one bit per token id of the model's logits. Beside the grammar it holds what else the request forbids, so
that it never leaves the sampler without a token: an output that may end and cannot go on is complete. Runs in the
grammar process; knows neither processes nor messages.

Stop ids are in a mask only where the grammar may end, and not before `min_new_tokens`. The library is told of one more
stop id, behind the last one of the vocabulary: its bit says whether the output may end, also where there is no stop id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from mii_zmq.errors import InternalError, InvalidRequest
from mii_zmq.worker.grammar_limits import SequenceLimits

_ILL_FORMED = re.compile(rb"[\xC0\xC1\xF5-\xFF]|\xE0[\x80-\x9F]|\xED[\xA0-\xBF]|\xF0[\x80-\x8F]|\xF4[\x90-\xBF]")
"""Within UTF-8."""
_WRONG_SECOND_BYTES = {
    lead: frozenset(bytes((byte,)) for byte in range(first, last + 1))
    for lead, first, last in ((0xE0, 0x80, 0x9F), (0xED, 0xA0, 0xBF), (0xF0, 0x80, 0x8F), (0xF4, 0x90, 0xBF))
}


class Vocabulary:
    """The tokens of one model as the library sees them."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes`: one for every id of the logits; an empty one is never allowed by a grammar."""
        token_bytes = [b"" if _ILL_FORMED.search(spelling) else spelling for spelling in token_bytes]
        self.size = len(token_bytes)
        self.end_id = self.size
        """Stands for the end of the output."""
        self.info = xgrammar.TokenizerInfo([*token_bytes, b""], vocab_size=self.size + 1, stop_token_ids=[self.end_id])
        self.spelt = to_bits((token_id for token_id, spelling in enumerate(token_bytes) if spelling), self.size)
        """[words] int32: ids that stand for text."""
        self.last_byte = bytes(spelling[-1] if spelling else 0 for spelling in token_bytes)
        self.ill_formed = {
            lead: to_bits((i for i, spelling in enumerate(token_bytes) if spelling[:1] in wrong), self.size)
            for lead, wrong in _WRONG_SECOND_BYTES.items()
        }
        """By the byte before it, ids that would not be UTF-8."""


class GrammarFollower:
    """The state behind the output tokens so far."""

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        vocabulary: Vocabulary,
        limits: SequenceLimits,
        token_ids: Sequence[int] = (),
    ) -> None:
        """Raises InvalidRequest when `limits.lead` and `token_ids`, the output so far, do not follow the grammar."""
        size = vocabulary.size
        stops = sorted({token_id for token_id in limits.stop_token_ids if 0 <= token_id < size})
        self._end_id = vocabulary.end_id
        self._matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=[vocabulary.end_id, *stops])
        self._row = np.zeros((1, -(-(size + 1) // 32)), dtype=np.int32)
        self._num_words = -(-size // 32)
        self._stops = to_bits(stops, size)
        self._possible = vocabulary.spelt | self._stops
        if limits.allowed_token_ids:
            self._possible &= to_bits((i for i in limits.allowed_token_ids if 0 <= i < size), size)
        self._vocabulary = vocabulary
        self._bad_words = [word for word in limits.bad_words if word and 0 <= min(word) <= max(word) < size]
        self._min_new_tokens = limits.min_new_tokens
        self._history = list(limits.prompt_tail)
        self._num_prompt = len(self._history)
        if limits.lead and not self._matcher.accept_string(limits.lead):
            raise InvalidRequest(
                f"structured_output: the chat template begins the answer with {limits.lead.strip()!r}, which this "
                "grammar does not allow; let it begin with a block of reasoning, or tell the template not to reason",
                param="structured_output",
            )
        for token_id in token_ids:
            if not self._accept(token_id):
                raise InvalidRequest(
                    f"structured_output: the output that was to be continued does not follow it (token {token_id})",
                    param="structured_output",
                )

    @property
    def num_output_tokens(self) -> int:
        return len(self._history) - self._num_prompt

    def accept(self, token_id: int) -> None:
        """The sequence's next output token; raises InternalError for one that no mask has allowed."""
        if not self._accept(token_id):
            raise InternalError(f"token {token_id} was drawn where the grammar does not allow it; please report this")

    def next_mask(self) -> bytes | None:
        """What may come next, as `StepPlan.masks` has it; None: nothing, the output is complete.

        Raises:
            InvalidRequest: the grammar goes on, but everything that it allows is forbidden by the request or missing
                in the vocabulary.
        """
        self._matcher.fill_next_token_bitmask(self._row)
        row = self._row[0]
        may_end = bool(row[self._end_id // 32] >> (self._end_id % 32) & 1)
        mask: np.ndarray[Any, Any] = row[: self._num_words] & self._possible
        if self.num_output_tokens < self._min_new_tokens:
            mask &= ~self._stops
        if self.num_output_tokens:
            # The library's classes of characters let overlong forms and surrogates pass.
            wrong = self._vocabulary.ill_formed.get(self._vocabulary.last_byte[self._history[-1]])
            if wrong is not None:
                mask &= ~wrong
        for word in self._bad_words:
            prefix = word[:-1]
            if not prefix or self._history[-len(prefix) :] == prefix:
                mask[word[-1] // 32] &= _without(word[-1] % 32)
        if mask.any():
            return mask.tobytes()
        if may_end:
            return None
        raise InvalidRequest(
            "structured_output: nothing can follow the output so far: what the grammar allows is forbidden by "
            "allowed_token_ids or bad_words, or the model has no token for it",
            param="structured_output",
        )

    def _accept(self, token_id: int) -> bool:
        if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
            return False
        self._history.append(token_id)
        return True


def to_bits(token_ids: Any, size: int) -> np.ndarray[Any, Any]:
    """[ceil(size / 32)] int32 with the bits of these ids set."""
    flags = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    flags[np.fromiter(token_ids, dtype=np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def _without(bit: int) -> np.ndarray[Any, Any]:
    return np.array(~(1 << bit) & 0xFFFFFFFF, dtype=np.uint32).view(np.int32)
