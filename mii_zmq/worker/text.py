# SPDX-License-Identifier: Apache-2.0
"""A request's way from text to the engine and back, shared by the actor and `pipeline()`.

`build_sequence` turns a validated request into a `SequenceRequest` for the engine (its prompt by `prompt_text`) and
into what turns the ids that come back into text (`output_text`). Pure: no sockets, no engine, no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mii_zmq.errors import InvalidRequest
from mii_zmq.sampling_params import SamplingParams, check_vocabulary
from mii_zmq.tokenizer import HfTokenizer, TextTokenizer
from mii_zmq.worker.chat_template import open_reasoning
from mii_zmq.worker.grammar_limits import grammar_of
from mii_zmq.worker.logprob_records import RecordWriter, check_prompt_entries
from mii_zmq.worker.output_text import OutputProcessor
from mii_zmq.worker.plan import EngineLimits, SamplingSpec, SequenceRequest
from mii_zmq.worker.prompt_text import PromptInput, check_token_ids, encode_prompt, sequence_capacity, too_long


@dataclass(slots=True)
class PreparedSequence:
    """A request ready for the engine, and what turning its output into text needs."""

    sequence: SequenceRequest
    params: SamplingParams
    prompt_text: str | None
    """None where the prompt came as token ids."""
    tokenizer: TextTokenizer
    lead: str = ""
    """Text of the prompt that the output's text begins with."""

    @property
    def prompt_length(self) -> int:
        return len(self.sequence.prompt_token_ids)

    def record_writer(self) -> RecordWriter | None:
        """For the log-probabilities that the request asked for, if any."""
        if self.params.logprobs is None and self.params.prompt_logprobs is None:
            return None
        return RecordWriter(self.tokenizer, self.sequence.prompt_token_ids)

    def output_processor(self) -> OutputProcessor:
        """A processor for the sequence's output; resumed tokens still have to be replayed."""
        return OutputProcessor(
            self.tokenizer,
            self.params,
            prompt_token_ids=self.sequence.prompt_token_ids,
            prompt_text=self.prompt_text,
            stop_token_ids=self.sequence.sampling.stop_token_ids,
            max_new_tokens=self.sequence.max_new_tokens,
            lead=self.lead,
        )


def build_sequence(
    tokenizer: TextTokenizer,
    limits: EngineLimits,
    params: SamplingParams,
    request_id: bytes,
    prompt: PromptInput,
    *,
    seq_id: int = 0,
    choice: int = 0,
    resumed_token_ids: Sequence[int] = (),
    priority: int = 0,
    deadline_s: float | None = None,
    cache_salt: str = "",
    score_prompt: bool = True,
) -> PreparedSequence:
    """Tokenize and check one request; `choice` is the index of the continuation when `params.n` is more than 1.

    `score_prompt` False: the reader has the prompt's log-probabilities already, if they were asked for.

    Raises:
        InvalidRequest: the prompt is empty or malformed, or an option does not fit it or the model.
        PromptTooLong: prompt plus requested output exceed the model's context or the whole KV pool.
    """
    prompt_token_ids, prompt_text = encode_prompt(tokenizer, limits, prompt)
    params = params.for_choice(choice)
    check_vocabulary(params, limits.vocab_size)
    max_new_tokens = _output_limit(params, len(prompt_token_ids), limits)
    resumed = check_token_ids(resumed_token_ids, limits.vocab_size, "resume")
    if len(resumed) > max_new_tokens:
        raise InvalidRequest(
            f"resume holds {len(resumed)} token ids, more than the {max_new_tokens} output tokens asked for",
            param="resume",
        )
    if params.prompt_logprobs is not None:
        check_prompt_entries(len(prompt_token_ids), params.prompt_logprobs)
    lead = open_reasoning(prompt_text) if prompt.return_reasoning_start and prompt_text is not None else ""
    sequence = SequenceRequest(
        seq_id=seq_id,
        prompt_token_ids=prompt_token_ids,
        # The engine draws at least one, which `OutputProcessor` drops.
        max_new_tokens=max(1, max_new_tokens),
        sampling=_sampling_spec(tokenizer, limits, params, request_id, choice),
        resumed_token_ids=resumed,
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
        score_prompt=score_prompt and params.prompt_logprobs is not None,
        grammar=grammar_of(tokenizer, limits, params),
        grammar_lead="" if params.structured_output is None else lead,
    )
    return PreparedSequence(sequence, params, prompt_text, tokenizer, lead)


def bad_words_ids(tokenizer: TextTokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell the words, each at the start of a text and after a space.

    Raises:
        InvalidRequest: a word that the tokenizer turns into nothing.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        spellings = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, " " + word.lstrip())]
        if not all(spellings):
            raise InvalidRequest(f"bad_words holds {word!r}, which gives no tokens", param="bad_words")
        if isinstance(tokenizer, HfTokenizer):
            spellings.append(_without_leading_mark(tokenizer, spellings[0]))
        found.update(dict.fromkeys(spelling for spelling in spellings if spelling))
    return tuple(found)


def _output_limit(params: SamplingParams, prompt_length: int, limits: EngineLimits) -> int:
    """Output tokens at most: as asked for, else all that the context has left."""
    capacity = sequence_capacity(limits)
    if params.max_length is not None:
        if params.max_length <= prompt_length:
            raise InvalidRequest(
                f"max_length is {params.max_length}, but it counts the prompt too, which has {prompt_length} tokens",
                param="max_length",
            )
        if params.max_length > capacity:
            raise too_long(f"max_length is {params.max_length}", limits, "max_length")
    if params.max_new_tokens is not None:
        max_new_tokens = params.max_new_tokens
        if prompt_length + max_new_tokens > capacity:
            found = f"the prompt has {prompt_length} tokens and max_new_tokens is {max_new_tokens}"
            raise too_long(found, limits, "max_new_tokens")
    else:
        max_new_tokens = (params.max_length if params.max_length is not None else capacity) - prompt_length
    if params.min_new_tokens > max_new_tokens:
        raise InvalidRequest(
            f"min_new_tokens is {params.min_new_tokens}, but at most {max_new_tokens} tokens can follow this prompt",
            param="min_new_tokens",
        )
    return max_new_tokens


def _sampling_spec(
    tokenizer: TextTokenizer, limits: EngineLimits, params: SamplingParams, request_id: bytes, choice: int
) -> SamplingSpec:
    stop_token_ids: tuple[int, ...] = ()
    if not params.ignore_eos:
        eos_token_ids = limits.eos_token_ids or tokenizer.eos_token_ids
        stop_token_ids = tuple(sorted({*eos_token_ids, *params.stop_token_ids}))
    shared: dict[str, Any] = {
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "min_new_tokens": params.min_new_tokens,
        "stop_token_ids": stop_token_ids,
        "bad_words": tuple(
            word for word in bad_words_ids(tokenizer, params.bad_words) if max(word) < limits.vocab_size
        ),
        "logit_bias": tuple(params.logit_bias.items()),
        "allowed_token_ids": tuple(sorted(set(params.allowed_token_ids or ()))),
        "num_logprobs": params.logprobs,
        "num_prompt_logprobs": params.prompt_logprobs or 0,
        "is_masked": params.structured_output is not None,
    }
    _check_allowed(params, shared)
    if params.is_greedy:
        return SamplingSpec(temperature=0.0, **shared)
    return SamplingSpec(
        seed=params.seed if params.seed is not None else _derive_seed(request_id, choice),
        temperature=1.0 if params.temperature is None else params.temperature,
        top_k=params.top_k or 0,
        top_p=params.top_p,
        min_p=params.min_p,
        **shared,
    )


def _check_allowed(params: SamplingParams, shared: dict[str, Any]) -> None:
    """Refuse a request of which the masks could leave no token to draw."""
    masked = {word[-1] for word in shared["bad_words"]}
    if params.min_new_tokens:
        masked.update(shared["stop_token_ids"])
    if params.allowed_token_ids is not None and masked.issuperset(params.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids holds nothing but tokens that bad_words or min_new_tokens forbid; allow others, too",
            param="allowed_token_ids",
        )


def _derive_seed(request_id: bytes, choice: int) -> int:
    digest = hashlib.blake2b(request_id + choice.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _without_leading_mark(tokenizer: HfTokenizer, spelling: tuple[int, ...]) -> tuple[int, ...]:
    """For tokenizers that put a space mark before every text: the spelling of the word inside a longer one."""
    first = tokenizer.token_text(spelling[0]) or ""
    if not first.startswith("▁"):
        return ()
    if first == "▁":
        return spelling[1:]
    inner = tokenizer.token_id(first.removeprefix("▁"))
    return () if inner is None else (inner, *spelling[1:])
