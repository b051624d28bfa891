# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's vocabulary -> tokenizer.json and tokenizer_config.json, built with the `tokenizers` library alone.

Byte-level BPE ('gpt2') needs to know how text is split before merging; the format names the split, and those that
models of the imported architectures use are listed here. SentencePiece BPE ('llama') stores scores instead of merges;
the merges follow from them. Any other vocabulary is an error that asks for a tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mii_zmq.errors import CheckpointError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Token types of the format that are matched whole in text."""
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+ENDING"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*ENDING"
)
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_REST}"
_TEKKEN = rf"{_CASED.replace('ENDING', '')}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED.replace('ENDING', _ENDINGS + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}"
SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
"""By the format's name, as the published tokenizer.json files have them."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""A word that is a token is one, whether the merges lead there or not."""
SINGLE_DIGITS = ("smollm", "starcoder", "refact")
PLAIN = ("gpt-2",)
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(fields: dict[str, Any], directory: Path, context: int) -> None:
    """Write both files; `fields` are a GGUF file's metadata.

    Raises:
        CheckpointError: the vocabulary is malformed, or of a kind that cannot be converted.
    """
    tokens, kinds = _strings(fields, "tokens"), fields.get("tokenizer.ggml.token_type")
    if not tokens:
        raise CheckpointError("the GGUF file holds no vocabulary; give a tokenizer with --tokenizer")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        kinds = [1] * len(tokens)
    model = fields.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(fields, tokens)
    elif model == "llama":
        tokenizer, tokens = _sentencepiece(fields, tokens)
    else:
        raise CheckpointError(
            f"the GGUF file's vocabulary is of the kind {model!r}, which cannot be converted; give a tokenizer with "
            "--tokenizer"
        )
    special = (CONTROL, UNKNOWN) if model == "llama" else (CONTROL,)
    typed = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in typed if kind in special]
    )
    # Runs of spaces are ordinary pieces of a SentencePiece vocabulary, whatever the file calls them.
    own = [token for token, kind in typed if kind == USER_DEFINED and token.strip(" ▁")]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])
    _add_ends(tokenizer, fields, tokens, model == "llama")
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {name: _token_id(fields, kind, tokens) for name, kind in _NAMES.items()}
    settings = {
        # Transformers' named classes replace the pre-tokenizer of tokenizer.json by their own; this one keeps it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
    }
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _strings(fields: dict[str, Any], name: str) -> list[str]:
    values = fields.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"the GGUF file's tokenizer.ggml.{name} is malformed; give a tokenizer with --tokenizer")
    return values


def _token_id(fields: dict[str, Any], kind: str, tokens: list[str]) -> int | None:
    token_id = fields.get(f"tokenizer.ggml.{kind}_token_id")
    return token_id if isinstance(token_id, int) and 0 <= token_id < len(tokens) else None


def _byte_level(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    split = str(fields.get("tokenizer.ggml.pre"))
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in _strings(fields, "merges")]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in WHOLE_WORDS))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for malformed merges
        raise CheckpointError(f"the GGUF file's merges are malformed: {error}") from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split not in SPLITS)
    steps: list[Any] = [byte_level]
    if split in SPLITS:
        steps.insert(0, pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated"))
    elif split in SINGLE_DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif split not in PLAIN:
        raise CheckpointError(
            f"the GGUF file's pre-tokenizer {split!r} is not known here; give a tokenizer with --tokenizer"
        )
    if split in SPLITS and SPLITS[split] is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, and the tokens as SentencePiece spells them."""
    is_gemma = str(fields.get("general.architecture")).startswith("gemma")
    # The converter writes runs of spaces as they are.
    tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    scores: list[Any] = fields.get("tokenizer.ggml.scores") or []
    is_scored = isinstance(scores, list) and len(scores) == len(tokens)
    if is_gemma or not is_scored or not all(isinstance(score, float) for score in scores):
        # Gemma's merges were made in the order of the vocabulary, which its scores do not follow.
        scores = [-float(index) for index in range(len(tokens))]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = _token_id(fields, "unknown", tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback="<0x00>" in vocabulary,
        )
    )
    adds_space = bool(fields.get("tokenizer.ggml.add_space_prefix", not is_gemma))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    joins: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.insert(0, normalizers.Prepend("▁"))
        joins.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(joins)
    return tokenizer, tokens


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others; better tokens first, as SentencePiece merges."""
    merges = []
    for token, token_id in vocabulary.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-scores[token_id], pair) for pair in known]
    merges.sort(key=lambda entry: entry[0])
    return [pair for _, pair in merges]


def _add_ends(tokenizer: Tokenizer, fields: dict[str, Any], tokens: list[str], is_sentencepiece: bool) -> None:
    """The tokens that are put around a text."""
    used: list[tuple[str, int]] = []
    pattern = ["$A"]
    for kind, place in (("bos", 0), ("eos", len(pattern) + 1)):
        default = is_sentencepiece and kind == "bos"
        token_id = _token_id(fields, kind, tokens)
        if fields.get(f"tokenizer.ggml.add_{kind}_token", default) and token_id is not None:
            pattern.insert(place, tokens[token_id])
            used.append((tokens[token_id], token_id))
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[f"{piece}:0" if piece == "$A" else piece for piece in pattern], special_tokens=used
        )
