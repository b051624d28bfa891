# SPDX-License-Identifier: Apache-2.0
"""The strict loader: what it accepts, what it refuses, and what each rank gets."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.hf_config import load_model_config
from mii_zmq.worker.models.model_weights import DecoderWeights
from mii_zmq.worker.models.random_weights import SHAPES
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.weights import load_weights
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


def test_several_files_without_an_index(editable: Callable[..., Path]) -> None:
    directory = editable(lambda tensors: None)
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    assert load(directory).embed.shape == (131, 48)
    shutil.copy(directory / "a.safetensors", directory / "b.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files but no"):
        load(directory)


def share(matrix: torch.Tensor, span: tuple[int, int], unit: int = 1, dim: int = 0) -> torch.Tensor:
    return matrix.narrow(dim, span[0] * unit, (span[1] - span[0]) * unit)


RANKED = [
    "qwen2",
    "qwen3",
    "phi3",
    "gpt2",
    "gpt_neox",
    "bloom",
    "falcon_7b",
    "falcon_40b",
    "gemma3",
    "gptj",
    "opt_350m",
]


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in RANKED), ("falcon_40b", 6), ("phi3", 4), ("bloom", 4), ("gpt2", 5)]
)
def test_each_rank_holds_its_part(checkpoints: Checkpoints, name: str, size: int) -> None:
    """Of all layouts of q, k and v, with biases; key/value heads are repeated where ranks outnumber them."""
    directory, _ = checkpoints(name)
    config = load_model_config(directory)
    whole = load(directory)
    width, (num_q, num_kv) = config.head_dim, (config.num_heads, config.num_kv_heads)
    for rank in range(size):
        info = RankInfo(rank, size)
        shard, part = Shard.of(config, info), load(directory, info)
        spans = (shard.heads, shard.kv_heads, shard.kv_heads)
        for layer, mine in zip(whole.layers, part.layers, strict=True):
            for has, got in ((layer.qkv.weight, mine.qkv.weight), (layer.qkv.bias, mine.qkv.bias)):
                if has is not None:
                    heads = has.split([num_q * width, num_kv * width, num_kv * width])
                    expected = [share(m, span, width) for m, span in zip(heads, spans, strict=True)]
                    assert torch.equal(got, torch.cat(expected))
            assert torch.equal(mine.out.weight, share(layer.out.weight, shard.heads, width, dim=1))
            parts = layer.up.weight.split(config.intermediate_size)
            assert torch.equal(mine.up.weight, torch.cat([share(m, shard.channels) for m in parts]))
            assert torch.equal(mine.down.weight, share(layer.down.weight, shard.channels, dim=1))
            for has, got in ((layer.out.bias, mine.out.bias), (layer.down.bias, mine.down.bias)):
                assert got is None if rank or has is None else torch.equal(got, has)
            if layer.qk_norm is not None:
                q_norm, k_norm = layer.qk_norm.split([num_q, num_kv])
                expected = [share(q_norm, shard.heads), share(k_norm, shard.kv_heads)]
                assert torch.equal(mine.qk_norm, torch.cat(expected))
        assert torch.equal(part.embed, whole.embed)
        if whole.head is not None:
            assert torch.equal(part.head.weight, share(whole.head.weight, shard.vocab))
            if whole.head.bias is not None:
                assert torch.equal(part.head.bias, share(whole.head.bias, shard.vocab))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe_dense_layer", "qwen3_moe"])
def test_experts_of_each_rank(checkpoints: Checkpoints, name: str) -> None:
    directory, model = checkpoints(name)
    config = load_model_config(directory)
    whole = load(directory)
    for layer, weights in enumerate(whole.layers):
        if not config.moe.layers[layer]:
            assert weights.moe is None
            assert torch.equal(weights.down.weight, model.model.layers[layer].mlp.down_proj.weight)
            continue
        experts = model.model.layers[layer].mlp.experts
        assert weights.up is None
        assert torch.equal(weights.moe.up, experts.gate_up_proj)
        assert torch.equal(weights.moe.down, experts.down_proj)
    held = 0
    for rank in range(2):
        shard, part = Shard.of(config, RankInfo(rank, 2)), load(directory, RankInfo(rank, 2))
        mine, moe = part.layers[0].moe, whole.layers[0].moe
        assert mine.first_expert == shard.experts[0]
        assert torch.equal(mine.up, share(moe.up, shard.experts))
        assert torch.equal(mine.down, share(moe.down, shard.experts))
        assert torch.equal(mine.router, moe.router)
        held += len(mine.up)
        if moe.shared_up is not None:
            gate, up = moe.shared_up.chunk(2)
            assert torch.equal(mine.shared_up, torch.cat([share(m, shard.shared_channels) for m in (gate, up)]))
            assert torch.equal(mine.shared_down, share(moe.shared_down, shard.shared_channels, dim=1))
            assert torch.equal(mine.shared_switch, moe.shared_switch)
    assert held == config.moe.num_experts


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe_dense_layer", "qwen3_moe"])
def test_stacked_experts(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    directory, model = checkpoints(name)
    model.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    for rank in (RankInfo(), RankInfo(1, 2)):
        one_by_one, stacked = load(directory, rank), load(tmp_path, rank)
        for a, b in zip(one_by_one.layers, stacked.layers, strict=True):
            assert a.moe is None or torch.equal(a.moe.up, b.moe.up)
            assert a.moe is None or torch.equal(a.moe.down, b.moe.down)
            assert a.moe is None or torch.equal(a.moe.router, b.moe.router)


def test_experts_both_ways_or_not_at_all(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory, model = checkpoints("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    stacked = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    save_file({**stacked, name: torch.zeros(48, 24)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds \S+ and \S+, which are the same"):
        load(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    for rank in (RankInfo(0, 2), RankInfo(1, 2)):
        with pytest.raises(CheckpointError, match=r"lacks 1 tensors, e\.g\. layers\.1\.mlp\.experts\.3\.down_proj"):
            load(tmp_path, rank)


def test_norms_with_an_offset_are_exact(checkpoints: Checkpoints) -> None:
    directory, model = checkpoints("gemma3")
    weights = load(directory, dtype=torch.bfloat16)
    norm = weights.layers[1].mlp_post_norm.weight
    assert norm.dtype is torch.float32
    assert torch.equal(norm, model.model.layers[1].post_feedforward_layernorm.weight + 1)
    assert weights.layers[1].qk_norm.dtype is torch.float32
    assert weights.embed.dtype is torch.bfloat16


def test_a_partly_rotated_head(checkpoints: Checkpoints) -> None:
    directory, model = checkpoints("gpt_neox")
    fused = model.gpt_neox.layers[0].attention.query_key_value.weight.view(6, 3, 8, 48)
    head = load(directory).layers[0].qkv.weight[8:16]
    assert torch.equal(head[0:4:2], fused[1, 0, :2])
    assert torch.equal(head[1:4:2], fused[1, 0, 2:4])
    assert torch.equal(head[4:], fused[1, 0, 4:])


def test_adjacent_pairs_stay_where_they_are(checkpoints: Checkpoints) -> None:
    directory, model = checkpoints("gptj")
    assert torch.equal(load(directory).layers[0].qkv.weight[:48], model.transformer.h[0].attn.q_proj.weight)


def test_a_tied_head_with_a_bias(checkpoints: Checkpoints) -> None:
    directory, model = checkpoints("gptj")
    config = replace(load_model_config(directory), tie_word_embeddings=True)
    weights = load_weights(directory, config, torch.float32, CPU, RankInfo(1, 2))
    assert torch.equal(weights.head.weight, weights.embed[66:])
    assert torch.equal(weights.head.bias, model.lm_head.bias[66:])


def test_masks_of_any_dtype_are_left_out(checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory, _ = checkpoints("gpt2")
    shutil.copytree(directory, tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    save_file(tensors, tmp_path / "copy" / "model.safetensors")
    assert len(load(tmp_path / "copy").layers) == 3


def test_progress_counts_bytes(checkpoints: Checkpoints) -> None:
    directory, _ = checkpoints("llama")
    config = load_model_config(directory)
    shares: list[float] = []
    load_weights(directory, config, torch.float32, CPU, progress=lambda text, done: shares.append(done))
    assert len(shares) > 10
    assert all(b - a >= 1 / 250 for a, b in pairwise(shares[:-1]))
    assert shares[-1] == 1.0


def test_large_tensors(tmp_path: Path) -> None:
    """Those of 2 MiB and more lie in memory of their own."""
    config = replace(SHAPES["tiny"], vocab_size=4096, num_layers=0, windows=(), ropes=(), tie_word_embeddings=True)
    embed = torch.randn(4096, 256)
    save_file(
        {"model.embed_tokens.weight": embed, "model.norm.weight": torch.ones(256)}, tmp_path / "model.safetensors"
    )
    weights = load_weights(tmp_path, config, torch.bfloat16, CPU)
    assert torch.equal(weights.embed, embed.bfloat16())
    weights.embed[0] = 0  # It is ordinary memory.


def test_heads_that_ranks_cannot_share(checkpoints: Checkpoints) -> None:
    directory, _ = checkpoints("llama")
    with pytest.raises(ModelUnsupported, match="cannot be shared by 3 ranks"):
        load(directory, RankInfo(0, 3))
