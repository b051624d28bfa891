# SPDX-License-Identifier: Apache-2.0
"""The strict loader: what it accepts, what it refuses, and what each rank gets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.hf_config import load_model_config
from mii_zmq.worker.models.weights import DecoderWeights, load_weights
from mii_zmq.worker.parallel import RankInfo
from tests.worker.models.checkpoints import make_checkpoint
from tests.worker.models.conftest import Checkpoints

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def load(directory: Path, rank: RankInfo | None = None, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(directory, load_model_config(directory), dtype, CPU, rank)


@pytest.fixture
def editable(checkpoints: Checkpoints, tmp_path: Path) -> Callable[[Callable[[Tensors], None]], Path]:
    """Copy the llama checkpoint with its tensors changed."""

    def make(edit: Callable[[Tensors], None]) -> Path:
        source, _ = checkpoints("llama")
        directory = tmp_path / "copy"
        shutil.copytree(source, directory)
        tensors = load_file(directory / "model.safetensors")
        edit(tensors)
        save_file(tensors, directory / "model.safetensors")
        return directory

    return make


def test_fused_rows_hold_the_checkpoints_matrices(checkpoints: Checkpoints) -> None:
    directory, model = checkpoints("qwen2")
    weights = load(directory)
    attention = model.model.layers[1].self_attn
    qkv = weights.layers[1].qkv
    assert qkv.weight.shape == (48 + 2 * 16, 48)
    assert torch.equal(qkv.weight[64:], attention.v_proj.weight)
    # Halves are interleaved: row 2 i + j of a head is its row i of half j.
    first_head = attention.q_proj.weight[:8]
    assert torch.equal(qkv.weight[0:8:2], first_head[:4])
    assert torch.equal(qkv.weight[1:8:2], first_head[4:])
    assert qkv.bias is not None
    assert torch.equal(qkv.bias[1:8:2], attention.q_proj.bias[4:8])
    up = weights.layers[1].up
    assert torch.equal(up.weight[:80], model.model.layers[1].mlp.gate_proj.weight)
    assert torch.equal(up.weight[80:], model.model.layers[1].mlp.up_proj.weight)


def test_weights_are_converted_to_the_dtype(checkpoints: Checkpoints) -> None:
    directory, model = checkpoints("opt")
    weights = load(directory, dtype=torch.bfloat16)
    assert torch.equal(weights.embed, model.model.decoder.embed_tokens.weight.bfloat16())
    assert weights.positions is not None
    assert weights.positions.shape == (258, 48)


def test_shards_with_an_index(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    shares: list[float] = []
    config = load_model_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.float32, CPU, progress=lambda text, share: shares.append(share))
    assert torch.equal(weights.embed, model.model.embed_tokens.weight)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_missing_shard(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, max_shard_size="40KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        load(tmp_path)


def test_missing_tensor(editable: Callable[..., Path]) -> None:
    directory = editable(lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, e\.g\. layers\.2\.mlp\.up_proj\.weight"):
        load(directory)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.input_layernorm.weight", "x"])
def test_extra_tensor(editable: Callable[..., Path], name: str) -> None:
    directory = editable(lambda tensors: tensors.update({name: torch.zeros(48)}))
    with pytest.raises(CheckpointError, match="does\\s+not have|not have"):
        load(directory)


def test_wrong_shape(editable: Callable[..., Path]) -> None:
    directory = editable(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has the shape \[47\].*\[48\]"):
        load(directory)


def test_quantized_tensor(editable: Callable[..., Path]) -> None:
    directory = editable(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(ModelUnsupported, match="quantized"):
        load(directory)


def test_derived_tensors_and_a_stored_tied_head_are_left_out(editable: Callable[..., Path]) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "lm_head.weight": torch.zeros(131, 48),
    }
    assert load(editable(lambda tensors: tensors.update(extra))).head is None


def test_names_without_the_prefix(editable: Callable[..., Path]) -> None:
    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    assert load(editable(strip)).embed.shape == (131, 48)


@pytest.mark.parametrize("keep", [0, 5, 60, 4000, -7])
def test_truncated_file(editable: Callable[..., Path], keep: int) -> None:
    directory = editable(lambda tensors: None)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="download it again"):
        load(directory)


def test_header_length_beyond_reason(editable: Callable[..., Path]) -> None:
    directory = editable(lambda tensors: None)
    path = directory / "model.safetensors"
    path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load(directory)


def test_pickled_weights_only(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source, _ = checkpoints("llama")
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        load(tmp_path)


def test_several_files_without_an_index(editable: Callable[..., Path]) -> None:
    directory = editable(lambda tensors: None)
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    assert load(directory).embed.shape == (131, 48)
    shutil.copy(directory / "a.safetensors", directory / "b.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files but no"):
        load(directory)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}'])
def test_malformed_index(editable: Callable[..., Path], index: str) -> None:
    directory = editable(lambda tensors: None)
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="index"):
        load(directory)


def test_a_tensor_in_two_shards(editable: Callable[..., Path]) -> None:
    directory = editable(lambda tensors: None)
    shutil.copy(directory / "model.safetensors", directory / "other.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="already loaded"):
        load(directory)


def test_an_index_cannot_leave_the_directory(editable: Callable[..., Path]) -> None:
    directory = editable(lambda tensors: None)
    index = {"weight_map": {"a": "../../elsewhere.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks elsewhere\.safetensors"):
        load(directory)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_two_ranks_hold_the_whole(checkpoints: Checkpoints, name: str) -> None:
    directory, _ = checkpoints(name)
    whole = load(directory)
    parts = [load(directory, RankInfo(rank, 2)) for rank in range(2)]
    for layer, (a, b) in zip(whole.layers, zip(parts[0].layers, parts[1].layers, strict=True), strict=True):
        head_dim, num_q = layer.qkv.weight.shape[0] // 10, 6
        q, k, v = layer.qkv.weight.split([num_q * head_dim, 2 * head_dim, 2 * head_dim])
        for part, index in ((a, 0), (b, 1)):
            expected = torch.cat([m.chunk(2)[index] for m in (q, k, v)])
            assert torch.equal(part.qkv.weight, expected)
            gate, up = layer.up.weight.chunk(2)
            assert torch.equal(part.up.weight, torch.cat([gate.chunk(2)[index], up.chunk(2)[index]]))
            assert torch.equal(part.out.weight, layer.out.weight.chunk(2, dim=1)[index])
            assert torch.equal(part.down.weight, layer.down.weight.chunk(2, dim=1)[index])


def test_heads_that_ranks_cannot_share(checkpoints: Checkpoints) -> None:
    directory, _ = checkpoints("llama")
    with pytest.raises(ModelUnsupported, match="cannot be shared by 4 ranks"):
        load(directory, RankInfo(0, 4))
