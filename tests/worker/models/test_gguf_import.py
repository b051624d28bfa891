# SPDX-License-Identifier: Apache-2.0
"""From the name of a GGUF file to a directory with config and tokenizer: once per file, vocabularies of both kinds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.tokenizer import TextTokenizer, load_tokenizer
from mii_zmq.worker.models.demo_model import resolve_model
from mii_zmq.worker.models.gguf_tokenizer import PLAIN, SINGLE_DIGITS, SPLITS, write_tokenizer
from mii_zmq.worker.models.hf_config import load_model_config
from tests.worker.models.gguf_files import TOKENS, tokenizer_fields, write_file

PIECES = [
    "▁",
    "h",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "he",
    "ll",
    "llo",
    "hello",
    "▁hello",
    "▁w",
    "▁wor",
    "or",
    "ld",
    "▁world",
]
SP_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<|user|>", "  "]
SP_FIELDS: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SP_TOKENS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(PIECES))] + [0.0, 0.0],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4, 4],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
SIZES = {
    ".block_count": 1, ".context_length": 64, ".embedding_length": 16, ".feed_forward_length": 16,
    ".attention.head_count": 2, ".attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MII_ZMQ_CACHE_DIR", str(tmp_path / "cache"))


def write(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    tensors = {"token_embd.weight": np.zeros((len(TOKENS), 16), dtype=np.float32)}
    return write_file(path, architecture, {**SIZES, **tokenizer_fields(), **changes}, tensors)


def sentencepiece(directory: Path, **changes: Any) -> TextTokenizer:
    fields = {**SP_FIELDS, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}
    write_tokenizer(fields, directory, 64)
    return load_tokenizer(str(directory))


def test_a_file_is_imported_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "my model.gguf")
    said: list[str] = []
    first = resolve_model(str(path), said.append)
    assert said == ["importing my model.gguf"]
    assert resolve_model(str(path), said.append) == resolve_model(first) == first
    assert len(said) == 1
    assert Path(first).name.startswith("my-model-")
    assert (Path(first) / "model.gguf").resolve() == path
    os.utime(path, ns=(1, 1))
    assert resolve_model(str(path)) != first
    assert [entry.name for entry in (tmp_path / "cache" / "gguf").iterdir() if not entry.name.startswith(".")]


def test_a_directory_with_one_file(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    path = write(tmp_path / "models" / "a.gguf")
    assert resolve_model(str(tmp_path / "models")) == resolve_model(str(path))
    write(tmp_path / "models" / "b.gguf")
    with pytest.raises(CheckpointError, match="holds 2 GGUF files"):
        resolve_model(str(tmp_path / "models"))
    with pytest.raises(CheckpointError, match=r"c\.gguf cannot be read: No such file"):
        resolve_model(str(tmp_path / "models" / "c.gguf"))


def test_config_and_ends(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 0, ".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0}
    directory = Path(resolve_model(str(write(tmp_path / "a.gguf", **extra))))
    config = load_model_config(directory)
    assert config.eos_token_ids == (2, 0)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps, config.dtype) == (2, 8, 1e-6, "float32")
    assert config.tie_word_embeddings
    rope = config.ropes[0]
    assert rope is not None
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 64)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"architecture": "mamba"}, ModelUnsupported, "has the architecture 'mamba'"),
        ({".rope.scaling.type": "spiral"}, ModelUnsupported, "rotary scaling 'spiral'"),
        ({".block_count": 10**6}, CheckpointError, "says 1000000 layers, but holds only 1 tensors"),
        ({".attention.head_count": "two"}, CheckpointError, r"llama\.attention\.head_count = 'two'"),
        ({".attention.layer_norm_rms_epsilon": -1.0}, CheckpointError, r"epsilon = -1\.0"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, changes: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        resolve_model(str(write(tmp_path / "a.gguf", **changes)))


@pytest.mark.parametrize(
    "changes",
    [{"tokenizer.ggml.model": "rwkv"}, {"tokenizer.ggml.pre": "elaborate"}, {"tokenizer.ggml.tokens": [1, 2]}],
)
def test_a_vocabulary_that_cannot_be_converted_asks_for_another(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = resolve_model(str(write(tmp_path / "a.gguf", **changes)))
    assert load_model_config(Path(directory)).vocab_size == len(TOKENS)
    with pytest.raises(CheckpointError, match="give a tokenizer with --tokenizer"):
        load_tokenizer(directory)


SPLIT_TEXT = "It'LL cost 12345 x\n\n  y Ab"
LLAMA3_SPLIT = ["It", "'LL", " cost", " ", "123", "45", " x", "\n\n", " ", " y", " Ab"]
QWEN2_SPLIT = ["It", "'LL", " cost", " ", "1", "2", "3", "4", "5", " x", "\n\n", " ", " y", " Ab"]
SPLIT_CASES = {
    "llama-bpe": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT,
    "tekken": ["It", "'LL", " cost", " ", "1", "2", "3", "4", "5", " x", "\n\n", " ", " y", " Ab"],
    "gpt-4o": ["It'LL", " cost", " ", "123", "45", " x", "\n\n", " ", " y", " Ab"],
    "gpt-2": ["It", "'", "LL", " cost", " 12345", " x", "\n\n ", " y", " Ab"],
    "smollm": ["It", "'", "LL", " cost", " ", "1", "2", "3", "4", "5", " x", "\n\n ", " y", " Ab"],
}


@pytest.mark.parametrize("pre", SPLIT_CASES)
def test_text_is_split_as_the_format_says(tmp_path: Path, pre: str) -> None:
    write_tokenizer(tokenizer_fields(pre=pre), tmp_path, 64)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(SPLIT_TEXT)]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in pieces] == SPLIT_CASES[pre]
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode(SPLIT_TEXT + " ½你")) == SPLIT_TEXT + " ½你"


def test_every_known_split_builds(tmp_path: Path) -> None:
    for pre in (*SPLITS, *SINGLE_DIGITS, *PLAIN):
        write_tokenizer(tokenizer_fields(pre=pre), tmp_path, 64)
        assert load_tokenizer(str(tmp_path)).encode("a") == [TOKENS.index("a")]


def test_byte_level_ends(tmp_path: Path) -> None:
    fields = {**tokenizer_fields(), "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    write_tokenizer(fields, tmp_path, 64)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("he") == [1, TOKENS.index("he"), 2]
    assert tokenizer.encode("he", add_special_tokens=False) == [TOKENS.index("he")]
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    ids = {token: token_id for token_id, token in enumerate(SP_TOKENS)}
    assert tokenizer.encode("hello world") == [1, ids["▁hello"], ids["▁world"]]
    assert tokenizer.encode("he", add_special_tokens=False) == [ids["▁"], ids["he"]]
    # What no piece covers becomes bytes, and comes back.
    assert tokenizer.encode("é", add_special_tokens=False) == [ids["▁"], ids["<0xC3>"], ids["<0xA9>"]]
    for text in ("hello world", "é 你 hello", "  hello  w\n"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode("hello<|user|>", add_special_tokens=False) == [ids["▁hello"], ids["<|user|>"]]
    assert tokenizer.all_special_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.strips_first_space


def test_sentencepiece_without_a_first_space(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert tokenizer.encode("hello") == [SP_TOKENS.index("hello")]
    assert not tokenizer.strips_first_space


def test_better_scores_merge_first(tmp_path: Path) -> None:
    """'lloo': either 'll' or 'lo' first."""
    tokens = ["<unk>", "<s>", "</s>", "l", "o", "ll", "lo"]
    for scores, expected in (
        ([0.0, 0.0, 0.0, -3.0, -3.0, -1.0, -2.0], [5, 4]),
        ([0.0, 0.0, 0.0, -3.0, -3.0, -2.0, -1.0], [3, 6]),
    ):
        kinds = [2, 3, 3, 1, 1, 1, 1]
        changes = {"tokens": tokens, "scores": scores, "token_type": kinds, "add_space_prefix": False}
        assert sentencepiece(tmp_path, **changes).encode("llo", add_special_tokens=False) == expected


def test_the_order_of_gemmas_vocabulary_is_that_of_its_merges(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "l", "o", "ll", "lo", "  ", " "]
    fields = {
        **SP_FIELDS, "general.architecture": "gemma2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -3.0, -2.0, -1.0, 0.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 4, 4],
    }  # fmt: skip
    write_tokenizer(fields, tmp_path, 64)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("llo") == [1, 5, 4]
    assert tokenizer.encode("l  o") == [1, 3, 7, 4]
    assert tokenizer.decode([3, 7, 4]) == "l  o"
    assert "<|user|>" not in json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
