# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of the kinds that exist, trained in a moment: byte-level, space marks with byte fallback, words."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mii_zmq.config import cache_dir
from mii_zmq.tokenizer import FakeTokenizer, HfTokenizer, TextTokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog.  Two  spaces,   three.",
    "stop STOP stopping </s> END END. the end\n\nof the line\n\n\nuser: hi",
    "你好，世界！今天天气很好。你好你好",
    "naïve café über straße — “quotes” …",
    "👨‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽 thumbs",
    "def f(x):\n    return x ** 2  # 12345",
] * 3
SETTINGS = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>", "<|im_end|>")]
REAL_DIRECTORY = cache_dir() / "models" / "SmolLM2-135M-Instruct"


@functools.cache
def byte_level() -> HfTokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(SPECIAL)
    return HfTokenizer(backend, SETTINGS, None)


@functools.cache
def space_mark(strip: bool = True) -> HfTokenizer:
    """As SentencePiece models look after conversion: U+2581 for spaces, unknown characters as <0xNN> tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, limit_alphabet=70)
    trained.train_from_iterator([line for line in CORPUS if line.isascii()], trainer)
    model = json_model(trained)
    vocab: dict[str, int] = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in sorted(model["vocab"], key=model["vocab"].__getitem__):
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(SPECIAL)
    return HfTokenizer(backend, SETTINGS, None)


@functools.cache
def metaspace_decoder() -> HfTokenizer:
    """The same vocabulary behind a decoder that gives no access to bytes."""
    backend = Tokenizer.from_str(space_mark()._backend.to_str())
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return HfTokenizer(backend, SETTINGS, None)


@functools.cache
def word_pieces() -> HfTokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return HfTokenizer(backend, {}, None)


def json_model(backend: Tokenizer) -> dict:
    import json

    return json.loads(backend.to_str())["model"]


@functools.cache
def real() -> TextTokenizer:
    return load_tokenizer(str(REAL_DIRECTORY))


def joining() -> dict[str, TextTokenizer]:
    """Tokenizers whose tokens' bytes can be joined; the real one where the demo model has been prepared."""
    found: dict[str, TextTokenizer] = {
        "fake": FakeTokenizer(),
        "byte_level": byte_level(),
        "space_mark": space_mark(),
        "space_mark_unstripped": space_mark(strip=False),
    }
    if (REAL_DIRECTORY / "tokenizer.json").is_file():
        found["real"] = real()
    return found
