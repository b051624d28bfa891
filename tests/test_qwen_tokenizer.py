# SPDX-License-Identifier: Apache-2.0
"""`qwen.tiktoken` read as data gives the ids of a slow, independent byte-pair encoder."""

from __future__ import annotations

import base64
import itertools
import json
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
import regex

from mii_zmq.errors import CheckpointError
from mii_zmq.qwen_tokenizer import PIECES, SPECIAL_TOKENS
from mii_zmq.tokenizer import HfTokenizer, load_tokenizer
from tests.tiny_tokenizers import CORPUS

TEXTS = [
    *CORPUS[:6],
    "",
    "The  quick\tbrown\r\n fox'LL doesn't 12345 ",
    "cafe\u0301 (decomposed) aaaaaaa  \n\n  x",
    "你好。🏳️‍🌈 \x00\x7f",
]


def learn_ranks(num_merges: int) -> dict[bytes, int]:
    """Byte-pair encoding by the book: again and again the most frequent pair."""
    words = Counter(
        tuple(bytes((b,)) for b in piece.encode()) for text in CORPUS for piece in regex.findall(PIECES, text)
    )
    ranks = {bytes((255 - byte,)): byte for byte in range(256)}
    for _ in range(num_merges):
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.setdefault(left + right, len(ranks))
        words = Counter({merge_all(word, left + right): count for word, count in words.items()})
    return ranks


def merge_all(word: tuple[bytes, ...], joined: bytes) -> tuple[bytes, ...]:
    parts: list[bytes] = []
    for part in word:
        if parts and parts[-1] + part == joined:
            parts[-1] = joined
        else:
            parts.append(part)
    return tuple(parts)


def slow_encode(text: str, ranks: dict[bytes, int]) -> list[int]:
    ids = []
    for piece in regex.findall(PIECES, unicodedata.normalize("NFC", text)):
        parts = [bytes((byte,)) for byte in piece.encode()]
        while True:
            joined = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
            rank, index = min(joined, default=(len(ranks), 0))
            if rank == len(ranks):
                break
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def write_ranks(directory: Path, ranks: dict[bytes, int]) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (directory / "qwen.tiktoken").write_text("\n".join(lines) + "\n")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}})
    )


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return learn_ranks(150)


def load(directory: Path, ranks: dict[bytes, int]) -> HfTokenizer:
    write_ranks(directory, ranks)
    tokenizer = load_tokenizer(str(directory))
    assert isinstance(tokenizer, HfTokenizer)
    return tokenizer


def test_ids_are_those_of_a_slow_encoder(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    tokenizer = load(tmp_path, ranks)
    assert max(map(len, ranks)) > 4, "something was merged"
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == slow_encode(text, ranks), text
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
        assert tokenizer.token_bytes is not None
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == unicodedata.normalize("NFC", text)


def test_special_tokens_follow_the_ranks(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    tokenizer = load(tmp_path, ranks)
    first = len(ranks)
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|><|endoftext|>")
    assert (ids[0], ids[-2], ids[-1]) == (first + 1, first + 2, first)
    assert tokenizer.vocab_size == first + len(SPECIAL_TOKENS)
    assert tokenizer.token_id("<|extra_204|>") == first + 207
    assert tokenizer.eos_token_ids == (first,)
    assert {first, first + 1, first + 207} <= tokenizer.all_special_ids


def test_chat_models_get_their_template(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    assert load(tmp_path, ranks).chat_template is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"chat_format": "chatml"}))
    template = load(tmp_path, ranks).chat_template
    assert template is not None
    assert "<|im_start|>assistant" in template


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("AA== 0\nnot base64 1\n", "line 2"),
        ("AA==\n", "line 1"),
        ("AA== x\n", "line 1"),
        ("AA== 0\n", "incomplete"),
        ("", "incomplete"),
    ],
)
def test_malformed_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "qwen.tiktoken").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(str(tmp_path))
