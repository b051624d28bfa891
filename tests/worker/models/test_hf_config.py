# SPDX-License-Identifier: Apache-2.0
"""config.json is understood completely or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.archs import ARCHITECTURES
from mii_zmq.worker.models.hf_config import load_model_config
from mii_zmq.worker.models.spec import MlpKind, ModelConfig, PositionKind, Role
from tests.worker.models.checkpoints import CONFIGS
from tests.worker.models.conftest import Checkpoints

SMOL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {}}, "transformers_version": "4.42.3", "use_cache": True,
    "vocab_size": 49152,
}  # fmt: skip


def load(directory: Path, raw: dict[str, Any], **files: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(raw))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return load_model_config(directory)


def test_a_published_llama_config(tmp_path: Path) -> None:
    config = load(tmp_path, SMOL)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.rope is not None
    assert (config.rope.kind, config.rope.theta) == ("default", 100000.0)
    assert (config.dtype, config.tie_word_embeddings, config.eos_token_ids) == ("bfloat16", True, (2,))
    assert config.windows == (None,) * 30


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_is_understood(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    config = load_model_config(directory)
    assert config.vocab_size == model.config.vocab_size
    assert config.num_heads == model.config.num_attention_heads
    assert len(config.windows) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported are LlamaForCausalLM"),
        ({"architectures": []}, "None"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_act": "mish"}, "mish"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_key_value_heads": 4}, "9 heads cannot be shared by 4"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "not a multiple"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"sliding_window": 4096}, "sliding_window"),
    ],
)
def test_settings_that_would_change_the_text_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        load(tmp_path, {**SMOL, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
    ],
)
def test_malformed_numbers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, {**SMOL, **changes})


@pytest.mark.parametrize("content", ["", "{", "[1]", '"x"'])
def test_malformed_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model_config(tmp_path)


def test_auto_map_is_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    load(tmp_path, {**SMOL, "auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    assert not marker.exists()


def test_opt_350m_is_refused(tmp_path: Path) -> None:
    opt = {**CONFIGS["opt"].to_dict(), "architectures": ["OPTForCausalLM"]}
    load(tmp_path, opt)
    with pytest.raises(ModelUnsupported, match="OPT-350m"):
        load(tmp_path, {**opt, "do_layer_norm_before": False})
    with pytest.raises(ModelUnsupported, match="OPT-350m"):
        load(tmp_path, {**opt, "word_embed_proj_dim": 24})


QWEN2 = {key: value for key, value in SMOL.items() if key not in ("attention_bias", "mlp_bias", "is_llama_config")}
QWEN2["architectures"] = ["Qwen2ForCausalLM"]
QWEN2["num_hidden_layers"] = 4


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2}, (None,) * 4),
        ({"sliding_window": 64}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, (None, None, None, 64)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
    ],
)
def test_windows_by_layer(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert load(tmp_path, {**QWEN2, **changes}).windows == windows


def test_windows_of_mistral(tmp_path: Path) -> None:
    mistral = {**QWEN2, "architectures": ["MistralForCausalLM"]}
    assert load(tmp_path, {**mistral, "sliding_window": 32}).windows == (32,) * 4
    assert load(tmp_path, {**mistral, "sliding_window": None}).windows == (None,) * 4
    assert load(tmp_path, mistral).windows == (4096,) * 4, "the published default"


def test_end_ids_are_merged_from_all_files(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        SMOL,
        generation_config={"eos_token_id": [7, 5, 99999]},
        tokenizer_config={"eos_token": "<end>"},
        tokenizer={"added_tokens": [{"id": 0, "content": "<pad>"}, {"id": 11, "content": "<end>"}]},
    )
    assert config.eos_token_ids == (7, 5, 2, 11)


def test_end_id_from_the_decoder_table(tmp_path: Path) -> None:
    raw = {**SMOL, "eos_token_id": None}
    tokenizer = {"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"3": {"content": "</s>"}}}
    assert load(tmp_path, raw, tokenizer_config=tokenizer).eos_token_ids == (3,)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_spec_names_the_roles_it_needs(architecture: str) -> None:
    spec = ARCHITECTURES[architecture]
    needed = {Role.EMBED, Role.FINAL_NORM, Role.HEAD, Role.ATTN_NORM, Role.Q, Role.K, Role.V, Role.O, Role.MLP_NORM}
    needed |= {Role.UP, Role.DOWN}
    needed |= {Role.GATE} if spec.mlp is MlpKind.GATED else set()
    needed |= {Role.Q_NORM, Role.K_NORM} if spec.qk_norm else set()
    needed |= {Role.POSITIONS} if spec.position is PositionKind.LEARNED else set()
    assert set(spec.names) == needed
    assert len(set(spec.names.values())) == len(spec.names)
