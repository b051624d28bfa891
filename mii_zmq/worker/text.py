# SPDX-License-Identifier: Apache-2.0
"""Everything between a request's text and the engine's token ids, shared by the actor and `pipeline()`.

`build_sequence` turns a validated request into a `SequenceRequest` for the engine; `OutputProcessor` turns the ids
that come back into text, finds stop strings and decides when a sequence has ended. Pure: no sockets, no engine, no
clock. A processor's output depends only on the ids, not on how they were cut into steps, so a streamed and an
unstreamed answer are the same text and a resumed sequence continues exactly where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mii_zmq.errors import InvalidRequest, PromptTooLong, RequestError
from mii_zmq.sampling_params import SamplingParams, check_text, check_vocabulary
from mii_zmq.tokenizer import HfTokenizer, TextTokenizer
from mii_zmq.worker.chat_template import open_reasoning, render_chat
from mii_zmq.worker.detokenizer import TAIL_TOKENS, Detokenizer, StopMatcher
from mii_zmq.worker.grammar_limits import grammar_of
from mii_zmq.worker.logprob_records import RecordWriter, check_prompt_entries
from mii_zmq.worker.plan import EngineLimits, SamplingSpec, SequenceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInput:
    """A request's prompt in exactly one of its three forms, unchecked."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Any = None
    add_special_tokens: bool = True
    """With text: begin-of-sequence and the like, as the tokenizer has them."""
    add_generation_prompt: bool = True
    """With messages: end with the opening of an assistant message."""
    tools: Any = None
    """With messages: functions that the model may call, for the template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """With messages: more variables for the template."""
    continue_final_message: bool = False
    """With messages: end within the last one, for the model to go on with."""
    return_reasoning_start: bool = False
    """Where the prompt ends with an opening <think>, the output's text begins with it."""


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
    resumed = _check_token_ids(resumed_token_ids, limits.vocab_size, "resume")
    if len(resumed) > max_new_tokens:
        raise InvalidRequest(
            f"resume holds {len(resumed)} token ids, more than the {max_new_tokens} output tokens asked for",
            param="resume",
        )
    if params.prompt_logprobs is not None:
        check_prompt_entries(len(prompt_token_ids), params.prompt_logprobs)
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
    )
    lead = open_reasoning(prompt_text) if prompt.return_reasoning_start and prompt_text is not None else ""
    return PreparedSequence(sequence, params, prompt_text, tokenizer, lead)


def encode_prompt(
    tokenizer: TextTokenizer, limits: EngineLimits, prompt: PromptInput, *, must_fit: bool = True
) -> tuple[list[int], str | None]:
    """The prompt's ids, and its text unless it came as ids.

    Raises as `build_sequence`; PromptTooLong only where it `must_fit` the context.
    """
    forms = [form for form in (prompt.text, prompt.token_ids, prompt.messages) if form is not None]
    if len(forms) != 1:
        raise InvalidRequest(
            f"give exactly one of prompt, prompt_token_ids and messages, not {len(forms)}", param="prompt"
        )
    if prompt.token_ids is not None:
        token_ids = _check_token_ids(prompt.token_ids, limits.vocab_size, "prompt_token_ids")
        if not token_ids:
            raise InvalidRequest("prompt_token_ids is empty; send at least one token", param="prompt_token_ids")
        if must_fit:
            _check_context(len(token_ids), limits, "prompt_token_ids")
        return token_ids, None
    if prompt.messages is not None:
        param, text = (
            "messages",
            render_chat(
                tokenizer,
                prompt.messages,
                prompt.add_generation_prompt,
                tools=prompt.tools,
                variables=prompt.chat_template_kwargs,
                continue_final_message=prompt.continue_final_message,
            ),
        )
    else:
        param, text = "prompt", _check_prompt_text(prompt.text)
    if must_fit:
        _check_characters(tokenizer, len(text), limits, param)
    # A chat template writes its own special tokens.
    token_ids = tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens and prompt.messages is None)
    if not token_ids:
        raise InvalidRequest(f"{param} gives no tokens; send some text", param=param)
    if must_fit:
        _check_context(len(token_ids), limits, param)
    if max(token_ids) >= limits.vocab_size:
        raise InvalidRequest(
            f"{param} contains a token ({max(token_ids)}) that the tokenizer knows but the model does not", param=param
        )
    return token_ids, text


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


def _check_prompt_text(text: Any) -> str:
    if not isinstance(text, str):
        raise InvalidRequest(f"prompt must be a string, got {type(text).__name__}", param="prompt")
    if not text:
        raise InvalidRequest("prompt is empty; send some text", param="prompt")
    return check_text(text, "prompt")


def _check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> list[int]:
    checked = list(token_ids)
    for index, token_id in enumerate(checked):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param}[{index}] is {str(token_id)[:40]}, allowed: integers from 0 to {vocab_size - 1}", param=param
            )
    return checked


def _capacity(limits: EngineLimits) -> int:
    """Tokens that one sequence can have: by the model's context and by the whole KV pool."""
    return min(limits.max_model_len, limits.num_blocks * limits.block_size)


def _too_long(found: str, limits: EngineLimits, param: str) -> RequestError:
    bound = "the model's context" if limits.max_model_len <= _capacity(limits) else "the KV pool"
    return PromptTooLong(f"{found}; {bound} holds {_capacity(limits)} tokens of prompt and output", param=param)


def _check_context(num_tokens: int, limits: EngineLimits, param: str) -> None:
    if num_tokens >= _capacity(limits):
        raise _too_long(f"{param} has {num_tokens} tokens, and at least one must be left for output", limits, param)


def _check_characters(tokenizer: TextTokenizer, num_chars: int, limits: EngineLimits, param: str) -> None:
    """Refuse, before the work of tokenizing it, a text that cannot fit however it is cut."""
    if tokenizer.max_token_chars is not None and num_chars >= tokenizer.max_token_chars * _capacity(limits):
        least = -(-num_chars // tokenizer.max_token_chars)
        raise _too_long(f"{param} has {num_chars} characters, at least {least} tokens", limits, param)


def _output_limit(params: SamplingParams, prompt_length: int, limits: EngineLimits) -> int:
    """Output tokens at most: as asked for, else all that the context has left."""
    capacity = _capacity(limits)
    if params.max_length is not None:
        if params.max_length <= prompt_length:
            raise InvalidRequest(
                f"max_length is {params.max_length}, but it counts the prompt too, which has {prompt_length} tokens",
                param="max_length",
            )
        if params.max_length > capacity:
            raise _too_long(f"max_length is {params.max_length}", limits, "max_length")
    if params.max_new_tokens is not None:
        max_new_tokens = params.max_new_tokens
        if prompt_length + max_new_tokens > capacity:
            found = f"the prompt has {prompt_length} tokens and max_new_tokens is {max_new_tokens}"
            raise _too_long(found, limits, "max_new_tokens")
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
