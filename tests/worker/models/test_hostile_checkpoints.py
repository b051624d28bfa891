# SPDX-License-Identifier: Apache-2.0
"""Hostile and broken checkpoints: each ends in one clear line, quickly, and no code out of a checkpoint runs."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from mii_zmq.errors import CheckpointError, ConfigError, ModelUnsupported, StartupError
from mii_zmq.worker.models import checkpoint_files
from mii_zmq.worker.models.checkpoint_files import INDEX_FILE, command
from mii_zmq.worker.models.demo_model import resolve_model
from mii_zmq.worker.models.hf_config import load_model_config
from mii_zmq.worker.models.model_weights import DecoderWeights
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.weights import allocate_weights, load_weights
from mii_zmq.worker.parallel import RankInfo
from tests.worker.models.checkpoints import COMMON, make_checkpoint
from tests.worker.models.conftest import Checkpoints
from tests.worker.models.gguf_files import gguf_tensors, model_fields, tiny_model, tokenizer_fields, write_file

CPU = torch.device("cpu")
LOADING_PAGE = Path(__file__).parents[3] / "docs" / "loading.md"


def load(name: Path) -> DecoderWeights:
    """As the engine does: from a name to weights."""
    directory = Path(resolve_model(str(name)))
    return load_weights(directory, load_model_config(directory), torch.float32, CPU)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MII_ZMQ_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def copied(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A llama checkpoint to break."""
    source, _ = checkpoints("llama")
    shutil.copytree(source, tmp_path / "copy")
    return tmp_path / "copy"


def refused(directory: Path, match: str, error: type[StartupError] = CheckpointError) -> None:
    with pytest.raises(error, match=match) as caught:
        load(directory)
    assert "\n" not in caught.value.message


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_header(path: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the JSON header, keeping the data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("keep", [0, 5, 60, 4000, -7])
def test_truncated_file(copied: Path, keep: int) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(copied, "download it again")


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 101 * 2**20, 0, 1])
def test_header_length_beyond_reason(copied: Path, length: int) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    refused(copied, "not a complete safetensors file")


HEADER_BOMBS: dict[str, Callable[[dict], object]] = {
    "absurd shape": lambda h: h["model.norm.weight"].update(shape=[2**40, 2**40]),
    "overflowing shape": lambda h: h["model.norm.weight"].update(shape=[2**63, 4]),
    "negative shape": lambda h: h["model.norm.weight"].update(shape=[-48]),
    "offsets behind the end": lambda h: h["model.norm.weight"].update(data_offsets=[2**50, 2**50 + 192]),
    "offsets reversed": lambda h: h["model.norm.weight"].update(data_offsets=[192, 0]),
    "offsets shared": lambda h: h["model.norm.weight"].update(
        data_offsets=h["model.layers.0.input_layernorm.weight"]["data_offsets"]
    ),
    "a hole": lambda h: h.pop("model.norm.weight"),
    "an unknown dtype": lambda h: h["model.norm.weight"].update(dtype="PICKLE"),
    "no dtype": lambda h: h["model.norm.weight"].pop("dtype"),
    "deep nesting": lambda h: h.update({"x": json.loads("[" * 200 + "]" * 200)}),
}


@pytest.mark.parametrize("kind", HEADER_BOMBS)
def test_header_that_lies(copied: Path, kind: str) -> None:
    replace_header(copied / "model.safetensors", HEADER_BOMBS[kind])
    refused(copied, "model.safetensors is damaged")


def test_a_name_twice_in_one_header(copied: Path) -> None:
    path = copied / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip()
    entries = json.loads(text)
    # The library keeps one of the two; unless they are equal, that leaves a hole.
    for other, is_fine in (("model.norm.weight", True), ("model.layers.0.input_layernorm.weight", False)):
        twice = text[:-1] + f',"model.norm.weight":{json.dumps(entries[other])}}}'.encode()
        path.write_bytes(len(twice).to_bytes(8, "little") + twice + data[8 + length :])
        if is_fine:
            assert load(copied).final_norm is not None
        else:
            refused(copied, "damaged")


def test_garbage_in_place_of_a_header(copied: Path) -> None:
    (copied / "model.safetensors").write_bytes((100).to_bytes(8, "little") + b"\x80\x04\x95cos\nsystem\n" * 50)
    refused(copied, "damaged")


def test_missing_shard(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, max_shard_size="40KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    refused(tmp_path, f"lacks {re.escape(victim.name)}, which its index names")


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', "{}", '{"weight_map": {"a": 3}}', "[" * 100000])
def test_malformed_index(copied: Path, index: str) -> None:
    (copied / INDEX_FILE).write_text(index)
    refused(copied, "index")


@pytest.mark.parametrize("name", ["../../elsewhere.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\0b"])
def test_an_index_cannot_leave_the_directory(copied: Path, name: str) -> None:
    (copied / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(copied, "which is no file of its directory")


def test_a_tensor_in_two_shards(copied: Path) -> None:
    shutil.copy(copied / "model.safetensors", copied / "other.safetensors")
    (copied / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}))
    refused(copied, r"other\.safetensors holds \S+, which model\.safetensors holds too")


def test_symbolic_links_in_circles(copied: Path, tmp_path: Path) -> None:
    (copied / "model.safetensors").unlink()
    (copied / "model.safetensors").symlink_to(copied / "model.safetensors")
    refused(copied, r"holds no \.safetensors file")
    (copied / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    refused(copied, r"lacks model\.safetensors")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    refused(tmp_path / "circle", "no model directory")
    (tmp_path / "circle.gguf").symlink_to(tmp_path / "circle.gguf")
    refused(tmp_path / "circle.gguf", "circle.gguf")


def test_code_of_the_checkpoint_never_runs(copied: Path) -> None:
    marker = copied / "ran"
    (copied / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: ...\n")
    edit_config(copied, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"})
    assert load(copied).embed.shape == (131, 48)
    assert not marker.exists()
    assert "modeling_evil" not in sys.modules


def test_pickled_weights_only(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    refused(copied, r"holds no \.safetensors file")
    # A pickle whose loading would end the process.
    (copied / "pytorch_model.bin").write_bytes(b"cos\n_exit\n(I3\ntR.")
    refused(copied, "pickled weights only.*" + re.escape(command(checkpoint_files.CONVERT_PICKLED, copied)))


@pytest.mark.parametrize("layout", ["latest", "global_step", "mp_rank"])
def test_a_training_checkpoint_of_deepspeed(copied: Path, layout: str) -> None:
    (copied / "model.safetensors").unlink()
    states = copied / "global_step500"
    states.mkdir()
    (states / "mp_rank_00_model_states.pt").write_bytes(b"never opened")
    (states / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"never opened")
    name = copied
    if layout == "latest":
        (copied / "latest").write_text("global_step500")
        (copied / "zero_to_fp32.py").write_text("raise SystemExit(1)")
        (copied / "config.json").unlink()
    elif layout == "mp_rank":
        name = states
    refused(name, "DeepSpeed training checkpoint.*" + re.escape(command(checkpoint_files.CONVERT_ZERO, copied)))


def test_the_page_about_loading_has_the_commands_of_the_errors() -> None:
    lines = LOADING_PAGE.read_text().splitlines()
    assert checkpoint_files.CONVERT_ZERO in lines
    assert checkpoint_files.CONVERT_PICKLED in lines


def test_safetensors_beside_training_states_are_read(copied: Path) -> None:
    (copied / "global_step500").mkdir()
    (copied / "zero_to_fp32.py").write_text("raise SystemExit(1)")
    assert load(copied).embed.shape == (131, 48)


@pytest.mark.parametrize("rows", [132, 130])
def test_vocabulary_of_another_size(copied: Path, rows: int) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.zeros(rows, 48)
    save_file(tensors, copied / "model.safetensors")
    refused(copied, rf"model\.embed_tokens\.weight has {rows} rows.*vocab_size = 131")


def test_an_added_token_that_config_knows(copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.cat([tensors["model.embed_tokens.weight"], torch.ones(1, 48)])
    save_file(tensors, copied / "model.safetensors")
    edit_config(copied, vocab_size=132)
    assert load(copied).embed.shape == (132, 48)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 2**40}, "1099511627776 layers"),
        ({"num_hidden_layers": 9_999}, "9999 layers, but the checkpoint holds only"),
        ({"hidden_size": 2**62, "head_dim": 8}, "impossible sizes|implies"),
        ({"vocab_size": 10**12}, "vocab_size = 1000000000000"),
        ({"intermediate_size": 10**15}, "implies"),
    ],
)
def test_config_beyond_reason(copied: Path, changes: dict[str, object], match: str) -> None:
    edit_config(copied, **changes)
    refused(copied, match)


def test_experts_beyond_reason(checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoints("mixtral")[0], tmp_path / "copy")
    edit_config(tmp_path / "copy", num_local_experts=10**9)
    refused(tmp_path / "copy", "1000000000 experts, but the checkpoint holds only")


def test_weights_that_no_memory_holds(copied: Path) -> None:
    config = replace(load_model_config(copied), vocab_size=2**44)
    with pytest.raises(ConfigError, match="GiB, which cpu does not have"):
        allocate_weights(config, Shard.of(config, RankInfo()), torch.float32, CPU)


@pytest.fixture(scope="session")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**{**COMMON, "num_hidden_layers": 1, "vocab_size": 300})
    fields = {**model_fields(config), **tokenizer_fields(300)}
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_file(path, "llama", fields, gguf_tensors(tiny_model(config), "llama"))


@pytest.fixture
def gguf_bytes(gguf_path: Path) -> bytes:
    return gguf_path.read_bytes()


@pytest.mark.parametrize(
    ("at", "content", "match"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "of version 1"),
        (4, struct.pack(">I", 3), "of version"),
        (8, struct.pack("<Q", 2**63), "behind the end"),
        (16, struct.pack("<Q", 2**40), "behind the end"),
        (24, struct.pack("<Q", 2**62), "behind the end"),
    ],
)
def test_gguf_header_that_lies(gguf_bytes: bytes, tmp_path: Path, at: int, content: bytes, match: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(gguf_bytes[:at] + content + gguf_bytes[at + len(content) :])
    refused(path, match, StartupError)


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 5000, -1, -4000])
def test_truncated_gguf(gguf_bytes: bytes, tmp_path: Path, keep: int) -> None:
    (tmp_path / "cut.gguf").write_bytes(gguf_bytes[:keep])
    refused(tmp_path / "cut.gguf", "cut.gguf")


def test_absurd_counts_inside_gguf(tmp_path: Path) -> None:
    def field(name: bytes, kind: int, rest: bytes) -> bytes:
        return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + rest

    def write(body: bytes, tensors: int, fields: int) -> Path:
        path = tmp_path / "bomb.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + body + bytes(4096))
        return path

    array = field(b"a", 9, struct.pack("<IQ", 0, 2**60))
    refused(write(array, 0, 1), "behind the end")
    refused(write(field(b"a", 9, struct.pack("<IQ", 8, 2**40)), 0, 1), "behind the end")
    refused(write(field(b"a", 9, struct.pack("<IQ", 9, 1)), 0, 1), "unknown type 9")
    refused(write(field(b"a", 77, b""), 0, 1), "unknown type 77")
    name = struct.pack("<Q", 1) + b"t"
    refused(write(name + struct.pack("<IQQIQ", 2, 2**60, 2**60, 0, 0), 1, 0), "ends behind the end")
    refused(write(name + struct.pack("<IQIQ", 1, 8, 0, 2**62), 1, 0), "ends behind the end")
    refused(write(name + struct.pack("<I", 2**31), 1, 0), "dimensions")
    refused(write(name + struct.pack("<IQIQ", 1, 8, 999, 0), 1, 0), "type 999", ModelUnsupported)


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("model.norm.weight", np.zeros(48, np.float32), "holds output_norm.weight and model.norm.weight"),
        ("rope_freqs.weight", np.zeros(0, np.float32), "other than those of Llama 3"),
        ("rope_freqs.weight", np.full(4, np.nan, np.float32), "other than those of Llama 3"),
    ],
)
def test_gguf_tensors_that_contradict_others(tmp_path: Path, name: str, values: np.ndarray, match: str) -> None:
    config = LlamaConfig(**{**COMMON, "num_hidden_layers": 1, "vocab_size": 300})
    tensors = gguf_tensors(tiny_model(config), "llama") | {name: values}
    path = write_file(tmp_path / "odd.gguf", "llama", {**model_fields(config), **tokenizer_fields(300)}, tensors)
    refused(path, match, StartupError)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 12000), value=st.integers(0, 255), keep=st.integers(0, 2**20))
@pytest.mark.slow
def test_any_damage_to_gguf_is_a_clear_line(gguf_path: Path, tmp_path: Path, at: int, value: int, keep: int) -> None:
    data = bytearray(gguf_path.read_bytes())
    data[at % len(data)] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(bytes(data[: max(keep, at)]))
    try:
        load(path)
    except StartupError:
        pass


def test_a_split_gguf(tmp_path: Path, gguf_bytes: bytes) -> None:
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00002.gguf").write_bytes(gguf_bytes)
    refused(tmp_path, "holds 2 GGUF files")
