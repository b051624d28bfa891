# SPDX-License-Identifier: Apache-2.0
"""Generation options of one request, and the one validator that every door uses.

The names and defaults are those of the original MII (`max_length`, `max_new_tokens`, `do_sample`, `top_p` 0.9 ...),
plus what its users asked for (seed, penalties, bad words, stop ids, n). Doors with other names or defaults translate
into a mapping of these names first. Knows nothing of models: token ids are checked against the vocabulary by
`check_vocabulary`, in the worker.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from mii_zmq.errors import InvalidRequest
from mii_zmq.structured_output import StructuredOutput, check_structured_output

MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LIST_ITEMS = 256
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_ALLOWED_TOKENS = 2**14
MAX_TOKENS = 2**31 - 1
IGNORED_FIELDS = frozenset({"prompt_length"})
"""Fields that the original accepts and overwrites; taken and dropped."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Validated generation options. Build with `SamplingParams.from_mapping`, never directly from outside data."""

    max_length: int | None = None
    """Total tokens, prompt included; must exceed the prompt's length. None: no limit of its own."""
    max_new_tokens: int | None = None
    """Output tokens; wins over `max_length`. None: up to `max_length` or the model's context. 0, with `prompt_logprobs`
    or `return_full_text`: the prompt alone is wanted."""
    min_new_tokens: int = 0
    """End-of-sequence ids, stop ids and stop strings have no effect before this many output tokens."""
    ignore_eos: bool = False
    """Do not stop at end-of-sequence ids, stop ids and stop strings (as the original does)."""
    return_full_text: bool = False
    """Prepend the prompt's text to the generated text."""
    do_sample: bool = True
    """False: greedy. A temperature of 0 means the same."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float = 0.9
    min_p: float = 0.0
    """Drop tokens less probable than `min_p` times the most probable one."""
    seed: int | None = None
    """Fixes every draw of this request, in whatever batch it runs. None: derived from the request id."""
    repetition_penalty: float = 1.0
    """Over prompt and output, as transformers applies it (CTRL, arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text returned excludes them."""
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    """Strings whose token sequences are never produced."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids, -100 to 100, behind the penalties."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else is ever drawn; end-of-sequence ids only if they are among them. None: everything is allowed."""
    structured_output: StructuredOutput | None = None
    """The form that the output has to have. None: any."""
    logprobs: int | None = None
    """Report the log-probability of every output token, and of this many of the most probable ones in its place, by
    the model's own logits. None: report nothing."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first one."""
    n: int = 1
    """Independent continuations of one prompt."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text; the original keeps them."""

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Validate a mapping from outside.

        Raises:
            InvalidRequest: unknown name (with the nearest known one), wrong type or impossible value; `param` names
                the field.
        """
        known = cls.__struct_fields__
        values: dict[str, Any] = {}
        for name, value in fields.items():
            if name in IGNORED_FIELDS:
                continue
            if name not in known:
                raise unknown_field(str(name), known)
            values[name] = [value] if name in ("stop", "bad_words") and isinstance(value, str) else value
            if value is None and name in ("stop", "stop_token_ids", "bad_words"):
                values[name] = []
            if value is None and name == "logit_bias":
                values[name] = {}
        try:
            # Keys of a JSON or msgpack map are strings.
            params = msgspec.convert(values, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise _from_validation_error(error) from None
        _check_ranges(params)
        return params

    def to_mapping(self) -> dict[str, Any]:
        """Plain types for msgpack; defaults are left out."""
        return {name: _plain(value) for name, value in msgspec.structs.asdict(self).items() if value != _DEFAULTS[name]}

    def for_choice(self, index: int) -> SamplingParams:
        """The options of choice `index` of `n`: `n` is 1, and a given seed is advanced so that choices differ."""
        seed = self.seed
        if seed is not None and index:
            seed = (seed + index * 0x9E3779B97F4A7C15) % 2**63
        return msgspec.structs.replace(self, n=1, seed=seed)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    return {str(key): entry for key, entry in value.items()} if isinstance(value, dict) else value


def unknown_field(name: str, known: Any) -> InvalidRequest:
    """The error for a field that no version of the API has; names the nearest known field."""
    shown = name if len(name) <= 80 else name[:77] + "..."
    near = difflib.get_close_matches(name[:80], list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidRequest(f"unknown field {shown!r}{hint}", param=shown)


def check_text(text: str, param: str) -> str:
    """Refuse text that UTF-8 cannot carry (lone surrogates). Returns `text`."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} holds a lone surrogate at character {error.start}; send valid Unicode", param=param
        ) from None
    return text


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest when a token id lies outside the model's logits; a top_k beyond them filters nothing."""
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        largest = max(getattr(params, name) or (), default=-1)
        if largest >= vocab_size:
            raise InvalidRequest(f"{name} holds {largest}, but the vocabulary has {vocab_size} entries", param=name)


def _from_validation_error(error: msgspec.ValidationError) -> InvalidRequest:
    # "... - at `$.stop[1]`", or of a map's key "... - at `key` in `$.logit_bias`".
    reason, _, path = str(error).partition(" - at `")
    param = path.rpartition("$.")[2].rstrip("`").split("[")[0] or None
    return InvalidRequest(f"{param}: {reason}" if param else reason, param=param)


def _check_ranges(params: SamplingParams) -> None:
    _check_numbers(params)
    _check_lengths(params)
    for name in ("stop", "bad_words"):
        strings: tuple[str, ...] = getattr(params, name)
        limit = MAX_STOP_STRINGS if name == "stop" else MAX_LIST_ITEMS
        _require(len(strings) <= limit, name, f"a list of {len(strings)} strings", f"at most {limit} strings")
        for string in strings:
            _require(
                0 < len(string) <= MAX_STOP_CHARS,
                name,
                string[:40],
                f"strings of 1 to {MAX_STOP_CHARS} characters",
            )
            check_text(string, name)
    _check_token_lists(params)
    if params.structured_output is not None:
        check_structured_output(params.structured_output)


def _check_token_lists(params: SamplingParams) -> None:
    allowed = params.allowed_token_ids
    _require(allowed is None or len(allowed) > 0, "allowed_token_ids", "empty", "at least one id")
    for name, limit in (
        ("stop_token_ids", MAX_LIST_ITEMS), ("logit_bias", MAX_BIASES), ("allowed_token_ids", MAX_ALLOWED_TOKENS)
    ):  # fmt: skip
        token_ids = getattr(params, name) or ()
        _require(len(token_ids) <= limit, name, f"{len(token_ids)} ids", f"at most {limit} ids")
        for token_id in token_ids:
            _require(0 <= token_id <= MAX_TOKENS, name, token_id, "ids from 0 to the vocabulary size")
    for token_id, bias in params.logit_bias.items():
        is_fine = math.isfinite(bias) and abs(bias) <= MAX_BIAS
        _require(is_fine, "logit_bias", f"{bias} for {token_id}", f"{-MAX_BIAS:g} to {MAX_BIAS:g}")


def _check_numbers(params: SamplingParams) -> None:
    ranges: list[tuple[str, float, float, str]] = [
        ("temperature", 0.0, 100.0, "0 (greedy) to 100"),
        ("min_p", 0.0, 1.0, "0 to 1"),
        ("presence_penalty", -100.0, 100.0, "-100 to 100"),
        ("frequency_penalty", -100.0, 100.0, "-100 to 100"),
    ]
    for name, low, high, words in ranges:
        value = getattr(params, name)
        _require(value is None or (math.isfinite(value) and low <= value <= high), name, value, words)
    _require(math.isfinite(params.top_p) and 0 < params.top_p <= 1, "top_p", params.top_p, "more than 0, at most 1")
    penalty = params.repetition_penalty
    _require(
        math.isfinite(penalty) and 0 < penalty <= 100,
        "repetition_penalty",
        penalty,
        "more than 0, at most 100",
    )
    _require(params.seed is None or 0 <= params.seed < 2**63, "seed", params.seed, "0 to 2^63 - 1")
    _require(1 <= params.n <= MAX_N, "n", params.n, f"1 to {MAX_N}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        _require(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"0 to {MAX_LOGPROBS}")
    _require(params.top_k is None or 1 <= params.top_k <= MAX_TOKENS, "top_k", params.top_k, f"1 to {MAX_TOKENS}")


def _check_lengths(params: SamplingParams) -> None:
    least = 0 if params.prompt_logprobs is not None or params.return_full_text else 1
    for name, lowest in (("max_length", 1), ("max_new_tokens", least)):
        value = getattr(params, name)
        allowed = f"{lowest} to {MAX_TOKENS}"
        if name == "max_new_tokens" and value == 0:
            allowed += "; 0 where prompt_logprobs or the prompt itself (echo, return_full_text) is asked for"
        _require(value is None or lowest <= value <= MAX_TOKENS, name, value, allowed)
    _require(0 <= params.min_new_tokens <= MAX_TOKENS, "min_new_tokens", params.min_new_tokens, f"0 to {MAX_TOKENS}")
    if params.max_new_tokens is not None:
        _require(
            params.min_new_tokens <= params.max_new_tokens,
            "min_new_tokens",
            params.min_new_tokens,
            f"at most max_new_tokens ({params.max_new_tokens})",
        )


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        shown = repr(value) if isinstance(value, str) else str(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise InvalidRequest(f"{name} is {shown}, allowed: {allowed}", param=name)


_DEFAULTS: dict[str, Any] = msgspec.structs.asdict(SamplingParams())
