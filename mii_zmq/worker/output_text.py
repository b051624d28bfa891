# SPDX-License-Identifier: Apache-2.0
"""The engine's token ids -> a request's text: detokenizes, finds stop strings, decides when a sequence has ended.

What comes out depends only on the ids, not on how they were cut into steps, so a streamed and an unstreamed answer are
the same text and a resumed sequence continues exactly where it was. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from mii_zmq.sampling_params import SamplingParams
from mii_zmq.tokenizer import TextTokenizer
from mii_zmq.worker.detokenizer import TAIL_TOKENS, Detokenizer, StopMatcher


class OutputProcessor:
    """One sequence's output: ids in, text out.

    The text of an end-of-sequence or stop id that ends the sequence is dropped, though the token is counted. Stop
    strings match only in text from tokens after the first `min_new_tokens`, and not at all with `ignore_eos`. With
    `return_full_text` the prompt's text comes first, else `lead`. Where no output is wanted, none is used.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        prompt_text: str | None = None,
        stop_token_ids: Sequence[int] = (),
        max_new_tokens: int | None = None,
        lead: str = "",
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids[-TAIL_TOKENS:], params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop) if params.stop and not params.ignore_eos else None
        self._min_new_tokens = params.min_new_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_new_tokens = max_new_tokens
        self._is_prompt_only = params.max_new_tokens == 0
        self._lead = lead
        if params.return_full_text:
            self._lead = prompt_text if prompt_text is not None else tokenizer.decode(
                prompt_token_ids, params.skip_special_tokens
            )  # fmt: skip
        self.num_tokens = 0
        """Output tokens consumed so far: the generated length, the ending token included."""
        self.finish_reason: str | None = None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the sequence."""
        return None if self._matcher is None else self._matcher.matched_stop

    def push(self, token_ids: Sequence[int], engine_finish_reason: str | None = None) -> tuple[str, str | None, int]:
        """Take one step's tokens; returns (new text, finish reason or None, how many of the tokens were used).

        Fewer are used when a stop string ends the sequence before the engine does; the caller then cancels it there
        and forgets the rest. After the end nothing is used.
        """
        if self.finish_reason is not None:
            return "", self.finish_reason, 0
        if self._is_prompt_only:
            self.finish_reason = "length"
            return self._lead, self.finish_reason, 0
        has_ending_token = engine_finish_reason == "stop" and len(token_ids) > 0
        kept = token_ids[:-1] if has_ending_token else token_ids
        text, num_used = self._consume(kept)
        if self.finish_reason is None and engine_finish_reason is not None:
            num_used += has_ending_token
            text += self._end(engine_finish_reason)
        self.num_tokens += num_used
        lead, self._lead = self._lead, ""
        return lead + text, self.finish_reason, num_used

    def replay(self, token_ids: Sequence[int]) -> str | None:
        """Rebuild the state after `token_ids` of a resumed sequence; their text has been delivered already.

        Returns the finish reason if the sequence had in fact ended with them, so that only the end is missing.
        """
        if not token_ids:
            return None
        num_before = len(token_ids) - 1
        if token_ids[-1] in self._stop_token_ids and num_before >= self._min_new_tokens:
            reason: str | None = "stop"
        elif self._max_new_tokens is not None and len(token_ids) >= self._max_new_tokens:
            reason = "length"
        else:
            reason = None
        self.push(token_ids, reason)
        return self.finish_reason

    def _consume(self, token_ids: Sequence[int]) -> tuple[str, int]:
        matcher = self._matcher
        num_free = len(token_ids) if matcher is None else max(0, self._min_new_tokens - self.num_tokens)
        pieces = [self._detokenizer.push(token_ids[:num_free])]
        if matcher is not None:
            for index, token_id in enumerate(token_ids[num_free:], start=min(num_free, len(token_ids))):
                pieces.append(matcher.push(self._detokenizer.push((token_id,))))
                if matcher.matched:
                    self.finish_reason = "stop"
                    return "".join(pieces), index + 1
        return "".join(pieces), len(token_ids)

    def _end(self, reason: str) -> str:
        self.finish_reason = reason
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        text = self._matcher.push(text)
        if self._matcher.matched:
            self.finish_reason = "stop"
        return text + self._matcher.flush()
