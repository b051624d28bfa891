# SPDX-License-Identifier: Apache-2.0
"""GGUF files serve the model they were made from: config, weights and logits, whole and sliced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.demo_model import resolve_model
from mii_zmq.worker.models.gguf_file import READABLE, GgufFile
from mii_zmq.worker.models.hf_config import load_model_config
from mii_zmq.worker.models.weights import load_weights
from mii_zmq.worker.parallel import RankInfo
from tests.worker.models.checkpoints import COMMON
from tests.worker.models.decoder_driver import DecoderDriver
from tests.worker.models.gguf_files import (
    gguf_tensors,
    llama3_factors,
    model_fields,
    tiny_model,
    tokenizer_fields,
    write_file,
)

CPU = torch.device("cpu")
PROMPT = [5, 17, 101, 3, 88, 64, 9, 120, 77, 42, 6, 13, 99, 31, 58]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.5, 4.0],
}
_GEMMA = {**COMMON, "head_dim": 16, "rms_norm_eps": 1e-5}

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", LlamaConfig(**COMMON), {".rope.freq_base": 10000.0}),
    "llama_bias": (
        "llama",
        LlamaConfig(**COMMON, attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
        {".rope.freq_base": 77.0},
    ),
    "llama3": ("llama", LlamaConfig(**COMMON, rope_parameters=_LLAMA3), {".rope.freq_base": 500000.0}),
    "mixtral": (
        "llama",
        MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        {".rope.freq_base": 1e6, ".expert_count": 4, ".expert_used_count": 2},
    ),
    "qwen2": (
        "qwen2",
        Qwen2Config(**COMMON, rope_parameters={"rope_type": "linear", "rope_theta": 9000.0, "factor": 2.0}),
        {".rope.freq_base": 9000.0, ".rope.scaling.type": "linear", ".rope.scaling.factor": 2.0},
    ),
    "qwen2_moe": (
        "qwen2moe",
        Qwen2MoeConfig(**COMMON, **_EXPERTS, shared_expert_intermediate_size=40, norm_topk_prob=False),
        {
            ".expert_count": 4, ".expert_used_count": 2, ".expert_feed_forward_length": 24,
            ".expert_shared_feed_forward_length": 40,
        },
    ),
    "qwen3": (
        "qwen3",
        Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True),
        {".attention.key_length": 16, ".rope.freq_base": 10000.0},
    ),
    "qwen3_moe": (
        "qwen3moe",
        Qwen3MoeConfig(**COMMON, **_EXPERTS, head_dim=16, norm_topk_prob=True),
        {
            ".attention.key_length": 16, ".expert_count": 4, ".expert_used_count": 2,
            ".expert_feed_forward_length": 24,
        },
    ),
    "phi3": (
        "phi3",
        Phi3Config(
            **COMMON, rope_parameters=_LONG, partial_rotary_factor=0.75, original_max_position_embeddings=32,
            sliding_window=11,
        ),
        {
            ".rope.scaling.original_context_length": 32, ".rope.dimension_count": 6, ".attention.sliding_window": 11,
            ".rope.scaling.attn_factor": float(np.sqrt(1 + np.log(8) / np.log(32))),
        },
    ),
    "gemma": ("gemma", GemmaConfig(**_GEMMA), {".attention.key_length": 16}),
    "gemma2": (
        "gemma2",
        Gemma2Config(**_GEMMA, query_pre_attn_scalar=16, sliding_window=9),
        {
            ".attention.key_length": 16, ".attention.sliding_window": 9, ".attn_logit_softcapping": 50.0,
            ".final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3",
        Gemma3TextConfig(
            **{**_GEMMA, "num_hidden_layers": 7},
            query_pre_attn_scalar=16,
            sliding_window=9,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        {
            ".attention.key_length": 16, ".attention.sliding_window": 9, ".rope.freq_base": 1e6,
            ".rope.scaling.type": "linear", ".rope.scaling.factor": 8.0,
        },
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MII_ZMQ_CACHE_DIR", str(tmp_path / "cache"))


def write_case(name: str, directory: Path) -> tuple[Path, Any]:
    """(GGUF file, the transformers model in it)."""
    architecture, config, fields = CASES[name]
    model = tiny_model(config)
    tensors = gguf_tensors(model, architecture)
    if name == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(500000.0, 8, 8.0)
    if name == "phi3":
        tensors["rope_factors_short.weight"] = np.array(_LONG["short_factor"], dtype=np.float32)
        tensors["rope_factors_long.weight"] = np.array(_LONG["long_factor"], dtype=np.float32)
    everything = {**model_fields(config), **fields, **tokenizer_fields(config.vocab_size)}
    return write_file(directory / f"{name}.gguf", architecture, everything, tensors), model


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model_in_the_file(tmp_path: Path, name: str) -> None:
    path, model = write_case(name, tmp_path)
    directory = Path(resolve_model(str(path)))
    logits = DecoderDriver(directory).step([(0, PROMPT)])
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    assert logits is not None
    assert float((logits[0] - expected).abs().max() / expected.abs().max()) < 1e-4
    model.save_pretrained(tmp_path / "same")
    same = DecoderDriver(tmp_path / "same").step([(0, PROMPT)])
    # The files' tensors lie at other addresses, by which a sum may take another order. Gemma's offset was added and
    # taken off again, in float32.
    torch.testing.assert_close(logits, same, rtol=0, atol=1e-4 if name.startswith("gemma") else 1e-5)


def random_blocks(kind: str, rows: int, width: int) -> np.ndarray:
    """Raw values of a kind: any bytes, with scales that are finite."""
    random = np.random.default_rng(4)
    values = random.normal(size=(rows, width)).astype(np.float32)
    if kind in ("Q4_K", "Q6_K"):
        block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
        raw = random.integers(0, 256, size=(rows, width // block, size), dtype=np.uint8)
        scales = (0, 2) if kind == "Q4_K" else (size - 2,)
        for at in scales:
            raw[:, :, at : at + 2] = np.array([0.01], dtype=np.float16).view(np.uint8)
        return raw.reshape(rows, -1)
    return gguf.quantize(values, Kind[kind])


@pytest.mark.parametrize("kind", READABLE)
def test_boxes_of_every_kind(tmp_path: Path, kind: str) -> None:
    raw = random_blocks(kind, 12, 768)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("matrix", raw, raw_dtype=Kind[kind])
    writer.add_tensor("stack", raw.reshape(3, 4, -1), raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.dequantize(raw, Kind[kind]).reshape(12, 768)
    file = GgufFile(tmp_path / "one.gguf")
    assert file.tensors["matrix"].shape == (12, 768)
    for rows, columns in ((slice(None), slice(None)), (slice(3, 7), slice(None)), (slice(2, 11), slice(100, 515))):
        np.testing.assert_array_equal(file.read("matrix", rows, columns).float().numpy(), expected[rows, columns])
    stacked = file.read("stack", slice(1, 3), slice(256, 300), 2).float().numpy()
    np.testing.assert_array_equal(stacked, expected.reshape(3, 4, 768)[2, 1:3, 256:300])


def test_quantised_weights_are_those_of_the_library(tmp_path: Path) -> None:
    config = LlamaConfig(**{**COMMON, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4})
    tensors = gguf_tensors(tiny_model(config), "llama")
    kinds = {
        "blk.0.ffn_down.weight": Kind.Q8_0, "blk.1.ffn_down.weight": Kind.Q4_0, "blk.2.ffn_down.weight": Kind.Q4_1,
        "blk.0.attn_output.weight": Kind.BF16, "token_embd.weight": Kind.F16,
    }  # fmt: skip
    fields = {**model_fields(config), **tokenizer_fields(config.vocab_size)}
    directory = Path(resolve_model(str(write_file(tmp_path / "q.gguf", "llama", fields, tensors, kinds))))
    model = load_model_config(directory)
    assert model.dtype == "bfloat16"
    whole = load_weights(directory, model, torch.float32, CPU)
    ranks = [load_weights(directory, model, torch.float32, CPU, RankInfo(rank, 2)) for rank in range(2)]

    def stored(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(gguf.quantize(tensors[name], kinds[name]), kinds[name]))

    for layer in range(3):
        down = stored(f"blk.{layer}.ffn_down.weight")
        assert torch.equal(whole.layers[layer].down.weight, down)
        assert torch.equal(torch.cat([rank.layers[layer].down.weight for rank in ranks], dim=1), down)
    assert torch.equal(whole.layers[0].out.weight, stored("blk.0.attn_output.weight"))
    assert torch.equal(whole.embed, stored("token_embd.weight"))
    q, k, v = whole.layers[0].qkv.weight.split([64, 32, 32])
    for rank, part in enumerate(ranks):
        expected = torch.cat([matrix.chunk(2)[rank] for matrix in (q, k, v)])
        assert torch.equal(part.layers[0].qkv.weight, expected)


def test_a_kind_that_is_not_read(tmp_path: Path) -> None:
    config = LlamaConfig(**{**COMMON, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4})
    tensors = gguf_tensors(tiny_model(config), "llama")
    fields = {**model_fields(config), **tokenizer_fields(config.vocab_size)}
    path = write_file(tmp_path / "q.gguf", "llama", fields, tensors, {"blk.1.ffn_up.weight": Kind.Q5_0})
    directory = Path(resolve_model(str(path)))
    with pytest.raises(ModelUnsupported, match=r"layers\.1\.mlp\.up_proj\.weight is stored as Q5_0; read are F32"):
        load_weights(directory, load_model_config(directory), torch.float32, CPU)


def test_strictness(tmp_path: Path) -> None:
    config = LlamaConfig(**COMMON)
    tensors = gguf_tensors(tiny_model(config), "llama")
    fields = {**model_fields(config), **tokenizer_fields(config.vocab_size)}

    def load(changed: dict[str, np.ndarray]) -> None:
        path = write_file(tmp_path / f"{len(changed)}-{hash(str(changed)) % 1000}.gguf", "llama", fields, changed)
        directory = Path(resolve_model(str(path)))
        load_weights(directory, load_model_config(directory), torch.float32, CPU)

    lacking = {name: values for name, values in tensors.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors, e\.g\. layers\.1\.mlp\.up_proj\.weight"):
        load(lacking)
    with pytest.raises(CheckpointError, match=r"holds blk\.0\.mystery\.weight"):
        load({**tensors, "blk.0.mystery.weight": np.zeros(4, dtype=np.float32)})
    with pytest.raises(CheckpointError, match=r"norm\.weight has the shape \[47\]"):
        load({**tensors, "output_norm.weight": np.zeros(47, dtype=np.float32)})
