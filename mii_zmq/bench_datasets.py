# SPDX-License-Identifier: Apache-2.0
"""The prompts of a serving benchmark and the times at which they are due. Pure but for reading a ShareGPT file.

Made of a seed and of nothing else, so a run can be repeated. Random prompts are token ids, which need no tokenizer; the
chat door takes text only, so there every id becomes a short English word. Lengths of text are estimates: what counts in
the results is the usage that the server states.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mii_zmq.errors import ConfigError

FIRST_TOKEN_ID = 32
"""Lower ids are often special ones."""
DEFAULT_VOCAB_SIZE = 94
"""Up to here the ids of byte-level vocabularies are ASCII characters. Prompts of other bytes make models answer in
pieces of characters; a server holds their text back, so that gaps between chunks are those of several tokens."""
CHARACTERS_PER_TOKEN = 4
MIN_SHAREGPT_TOKENS = 4
MAX_SHAREGPT_PROMPT_TOKENS = 1024
MAX_SHAREGPT_TOKENS = 2048
"""vLLM's limits on conversations: shorter sides, longer prompts and longer sums are left out."""
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "nation", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word",
    "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game",
    "line", "end", "member", "law", "car", "city", "name", "team", "minute", "idea", "kid", "body",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    content: str | list[int]
    num_tokens: int
    """Exact for token ids, an estimate for text."""
    output_tokens: int
    """How many are asked for."""


@dataclass(frozen=True, slots=True)
class RandomOptions:
    """Independent random prompts behind one common random prefix."""

    input_tokens: int = 1024
    output_tokens: int = 128
    prefix_tokens: int = 0
    range_ratio: float = 0.0
    """Uniform: lengths lie within this share of the mean. Normal: their standard deviation is this share of it."""
    distribution: Literal["uniform", "normal"] = "uniform"
    max_input_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """Few prefixes, each followed by many different suffixes."""

    prefix_tokens: int = 256
    suffix_tokens: int = 256
    num_prefixes: int = 10
    output_tokens: int = 128


@dataclass(frozen=True, slots=True)
class ShareGPTOptions:
    """First two turns of conversations in ShareGPT's format."""

    path: Path = field(default_factory=Path)
    output_tokens: int | None = None
    """Asked of every request; None: as many as the answer in the file has, by estimate."""


DatasetOptions = RandomOptions | PrefixOptions | ShareGPTOptions


def make_prompts(
    options: DatasetOptions, num_prompts: int, seed: str, vocab_size: int, *, as_text: bool
) -> list[BenchPrompt]:
    """Exactly `num_prompts` prompts.

    Raises:
        ConfigError: the file cannot be read or holds too few conversations.
    """
    rng = random.Random(seed)
    if isinstance(options, ShareGPTOptions):
        return _sharegpt_prompts(rng, options, num_prompts)
    token_ids = range(FIRST_TOKEN_ID, vocab_size)
    if isinstance(options, RandomOptions):
        drawn = _random_prompts(rng, options, num_prompts, token_ids)
    else:
        drawn = _prefix_prompts(rng, options, num_prompts, token_ids)
    return [
        BenchPrompt(_as_words(content) if as_text else content, len(content), output_tokens)
        for content, output_tokens in drawn
    ]


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: str) -> list[float]:
    """Seconds from the start at which each request is due, ascending.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier, more is steadier,
    infinite is constant. They are stretched so that the last request is due at exactly num_requests / rate. An infinite
    rate has all due at once.
    """
    if math.isinf(rate) or not num_requests:
        return [0.0] * num_requests
    rng = random.Random(seed)
    due = 0.0
    times = []
    for _ in range(num_requests):
        due += 1 / rate if math.isinf(burstiness) else rng.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(due)
    stretch = num_requests / rate / due if due > 0 else 1.0
    return [time * stretch for time in times]


def _random_prompts(
    rng: random.Random, options: RandomOptions, num_prompts: int, token_ids: range
) -> Iterable[tuple[list[int], int]]:
    prefix = rng.choices(token_ids, k=options.prefix_tokens)
    for _ in range(num_prompts):
        length = _length(rng, options.input_tokens, options)
        if options.max_input_tokens is not None:
            length = max(1, min(length, options.max_input_tokens - options.prefix_tokens))
        yield prefix + rng.choices(token_ids, k=length), _length(rng, options.output_tokens, options)


def _length(rng: random.Random, mean: int, options: RandomOptions) -> int:
    """At least 1."""
    spread = mean * options.range_ratio
    if options.distribution == "normal":
        return max(1, round(rng.gauss(mean, spread)))
    return rng.randint(max(1, math.floor(mean - spread)), max(1, math.ceil(mean + spread)))


def _prefix_prompts(
    rng: random.Random, options: PrefixOptions, num_prompts: int, token_ids: range
) -> Iterable[tuple[list[int], int]]:
    prefixes = [rng.choices(token_ids, k=options.prefix_tokens) for _ in range(options.num_prefixes)]
    order = [index % options.num_prefixes for index in range(num_prompts)]
    rng.shuffle(order)
    for index in order:
        yield prefixes[index] + rng.choices(token_ids, k=options.suffix_tokens), options.output_tokens


def _as_words(token_ids: Sequence[int]) -> str:
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in token_ids)


def _sharegpt_prompts(rng: random.Random, options: ShareGPTOptions, num_prompts: int) -> list[BenchPrompt]:
    usable = [
        prompt
        for entry in _read_conversations(options.path)
        if (prompt := _sharegpt_prompt(entry, options)) is not None
    ]
    if len(usable) < num_prompts:
        raise ConfigError(
            f"{options.path} holds {len(usable)} conversations of usable length, but {num_prompts} requests are asked "
            "for; lower --num-prompts (a prompt that is sent twice would be served from the prefix cache)"
        )
    return rng.sample(usable, num_prompts)


def _read_conversations(path: Path) -> list[Any]:
    try:
        entries = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the dataset {path}: {error.strerror}; name a ShareGPT file") from None
    except ValueError as error:
        raise ConfigError(f"the dataset {path} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ConfigError(f"the dataset {path} is not a JSON list of conversations, as ShareGPT's format asks for")
    return entries


def _sharegpt_prompt(entry: Any, options: ShareGPTOptions) -> BenchPrompt | None:
    """None for a conversation of less than two turns or of unusable length."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    prompt, answer = texts
    if not isinstance(prompt, str) or not isinstance(answer, str):
        return None
    num_prompt, num_answer = (math.ceil(len(text) / CHARACTERS_PER_TOKEN) for text in (prompt, answer))
    num_output = num_answer if options.output_tokens is None else options.output_tokens
    if num_prompt < MIN_SHAREGPT_TOKENS or (options.output_tokens is None and num_answer < MIN_SHAREGPT_TOKENS):
        return None
    if num_prompt > MAX_SHAREGPT_PROMPT_TOKENS or num_prompt + num_output > MAX_SHAREGPT_TOKENS:
        return None
    return BenchPrompt(prompt, num_prompt, num_output)
