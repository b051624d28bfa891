# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mii_zmq.errors import CheckpointError
from mii_zmq.tokenizer import FakeTokenizer, HfTokenizer, load_tokenizer
from tests import tiny_tokenizers

SAMPLES = [
    "<extra>the dog",
    "Hello  world",
    "你好 👩‍🚀 é",
    "<s>x</s>",
    "  lead",
    "a\n\n\tb",
    "<|im_end|> x",
    "STOP 12345",
]


def checkpoint(directory: Path, backend: Tokenizer | None = None, **settings: Any) -> Path:
    backend = backend or tiny_tokenizers.byte_level()._backend
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def load(directory: Path) -> HfTokenizer:
    tokenizer = load_tokenizer(str(directory))
    assert isinstance(tokenizer, HfTokenizer)
    return tokenizer


def test_fake_tokenizer_is_bytes() -> None:
    tokenizer = load_tokenizer("fake:anything")
    assert isinstance(tokenizer, FakeTokenizer)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.all_special_ids) == (257, (256,), {256})
    assert tokenizer.decode([0x41, 256, 999]) == "A<eos>"
    assert tokenizer.decode([0x41, 256], skip_special_tokens=True) == "A"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte_level", "space_mark"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"pad_token": "<pad>"},
        {"extra_special_tokens": ["<extra>", "the"]},
        {"eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}},
    ],
    ids=str,
)
def test_equal_to_transformers(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    # A copy: loading adds the settings' tokens to the backend.
    backend = Tokenizer.from_str(getattr(tiny_tokenizers, kind)()._backend.to_str())
    ours = load(checkpoint(tmp_path, backend, **settings))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.all_special_ids == set(theirs.all_special_ids) | {ours.token_id("<|im_end|>")}
    for text in SAMPLES:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids
            assert ours.decode(ids) == theirs.decode(ids)
            assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)


def test_tokens_of_the_settings_are_added(tmp_path: Path) -> None:
    size = tiny_tokenizers.byte_level().vocab_size
    added = {str(size): {"content": "<tool>", "special": True}, str(size + 1): {"content": "<plain>", "special": False}}
    backend = Tokenizer.from_str(tiny_tokenizers.byte_level()._backend.to_str())
    tokenizer = load(checkpoint(tmp_path, backend, added_tokens_decoder=added))
    assert tokenizer.encode("a<tool><plain>")[-2:] == [size, size + 1]
    assert size in tokenizer.all_special_ids
    assert size + 1 not in tokenizer.all_special_ids
    assert tokenizer.vocab_size == size + 2


def test_special_tokens_map_fills_what_the_settings_leave_out(tmp_path: Path) -> None:
    checkpoint(tmp_path, eos_token=None)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "x", "eos_token": {"content": "<|im_end|>"}}')
    tokenizer = load(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert tokenizer.eos_token_ids == (tokenizer.token_id("<|im_end|>"),)


@pytest.mark.parametrize(
    ("files", "entry", "expected"),
    [
        ({}, None, None),
        ({}, "from settings", "from settings"),
        ({}, [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
        ({}, [{"name": "rag", "template": "r"}], None),
        ({"chat_template.jinja": "from file"}, "from settings", "from file"),
        ({"chat_template.json": '{"chat_template": "from json"}'}, "from settings", "from json"),
    ],
)
def test_chat_template_sources(tmp_path: Path, files: dict[str, str], entry: Any, expected: str | None) -> None:
    checkpoint(tmp_path, **({"chat_template": entry} if entry else {}))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert load(tmp_path).chat_template == expected


def test_a_chat_template_for_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    checkpoint(tmp_path, chat_template=templates)
    tokenizer = load(tmp_path)
    assert (tokenizer.chat_template, tokenizer.tool_chat_template) == ("plain", "with tools")


def test_truncation_and_padding_of_the_file_have_no_effect(tmp_path: Path) -> None:
    backend = Tokenizer.from_str(tiny_tokenizers.byte_level()._backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    tokenizer = load(checkpoint(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("a longer text")) == "a longer text"


def test_no_token_stands_for_more_than_max_token_chars() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    assert tokenizer.max_token_chars is not None
    for text in tiny_tokenizers.CORPUS:
        assert len(text) <= tokenizer.max_token_chars * len(tokenizer.encode(text))
    assert tiny_tokenizers.space_mark().max_token_chars is None


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Custom: pass\n")
    checkpoint(tmp_path, auto_map={"AutoTokenizer": ["custom.Custom", None]}, tokenizer_class="Custom")
    assert load(tmp_path).encode("a")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    assert not marker.exists()


@pytest.mark.slow
def test_vocabulary_files_without_tokenizer_json(tmp_path: Path) -> None:
    tiny_tokenizers.byte_level()._backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": "t"})
    )
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the end of")) == "the end of"
    assert tokenizer.eos_token_ids == (tokenizer.token_id("<|endoftext|>"),)
    assert tokenizer.chat_template == "t"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": {}}}'),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    checkpoint(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/directory", "./missing", "a/b/c", "~/missing-model", "a//b"])
def test_missing_directories_are_refused_at_once(name: str) -> None:
    with pytest.raises(CheckpointError, match="no model directory"):
        load_tokenizer(name)


@pytest.mark.slow
def test_text_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    code = (
        "import sys, mii_zmq.worker.text\nfrom mii_zmq.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(tmp_path)!r})\nassert tokenizer.encode('a')\n"
        "print([name for name in ('torch', 'transformers', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
