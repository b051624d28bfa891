# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints may run on transformers' code: each refusal is one clear line, and no code of theirs is run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from mii_zmq.errors import CheckpointError, ModelUnsupported
from mii_zmq.worker.models.fallback_config import fallback_facts, read_fallback_config
from mii_zmq.worker.models.model_facts import ModelFacts
from tests.worker.models.fallback_checkpoints import BASE, VOCAB, load, make_config, save_random

HYBRID = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_expand": 2}


def write(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_facts_of_a_config(tmp_path: Path) -> None:
    write(tmp_path, {**BASE, "model_type": "starcoder2", "dtype": "bfloat16", "sliding_window": 13})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 5000]}), encoding="utf-8")
    facts = fallback_facts(tmp_path)
    assert facts == ModelFacts("starcoder2", VOCAB, 3, 2, 8, 256, "bfloat16", (7, 2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "layers of the kind linear_attention"),
        ({"model_type": "xlstm"}, "xlstm keeps a recurrent state"),
        ({"model_type": "t5"}, "t5 is an encoder-decoder"),
        ({"model_type": "bart"}, "bart is an encoder-decoder"),
        ({"model_type": "vit"}, "no causal language model of the vit family"),
        ({"model_type": "jamba"}, "layers of the kind linear_attention"),
        ({"model_type": "bamba", **BASE, **HYBRID}, "layers of the kind linear_attention"),
        ({"model_type": "llama4_text"}, "layers of the kind chunked_attention"),
        ({"model_type": "fuyu"}, "only text models"),
        ({"model_type": "mpt"}, "does not use its attention interface"),
        ({"model_type": "granite", **BASE, "quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "granite", **BASE, "dtype": "float64"}, "dtype 'float64'"),
        ({"model_type": "granite", **BASE, "vocab_size": 0}, "vocab_size = 0"),
        ({"model_type": "gemma4_unified_text"}, "head_dim differs between the layers"),
        ({"model_type": "nobody_knows_this"}, f"transformers {transformers.__version__} does not know; a newer"),
        ({"model_type": ["granite"]}, "does not know"),
        ({"hidden_size": 4}, "model_type None"),
    ],
)
def test_what_cannot_run_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported) as refused:
        read_fallback_config(write(tmp_path, config))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read"),
        ("[]", "must hold a JSON object"),
        ('{"model_type": "granite", "hidden_size": "many"}', "is not a granite config.*hidden_size"),
        ('{"model_type": "granite", "rope_parameters": 7}', "is not a granite config"),
        ('{"model_type": "granite", "layers_block_type": 7}', "layers of the kinds 7"),
    ],
)
def test_broken_configs_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        read_fallback_config(tmp_path)


def plant_code(directory: Path) -> Path:
    """Modules that leave a mark when they are imported, under every name that auto_map gives them."""
    mark = directory / "was-run"
    for name in ("configuration_evil", "modeling_evil"):
        (directory / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    return mark


AUTO_MAP = {
    "AutoConfig": "configuration_evil.EvilConfig",
    "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
}


def test_code_of_an_unknown_family_is_not_run(tmp_path: Path) -> None:
    mark = plant_code(tmp_path)
    write(tmp_path, {**BASE, "model_type": "evil", "architectures": ["EvilForCausalLM"], "auto_map": AUTO_MAP})
    with pytest.raises(ModelUnsupported, match="'evil'.*auto_map names code in the checkpoint, which is never run"):
        load(tmp_path)
    assert not mark.exists()


def test_code_beside_a_known_family_is_not_run(tmp_path: Path) -> None:
    save_random(make_config("granite"), tmp_path)
    mark = plant_code(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    write(tmp_path, {**config, "auto_map": AUTO_MAP, "custom_pipelines": {"x": {"impl": "modeling_evil.Evil"}}})
    model, _ = load(tmp_path)
    assert type(model._model).__module__ == "transformers.models.granite.modeling_granite"
    assert not mark.exists()


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 256),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 256),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 256),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 64,
            },
            64,
        ),
    ],
)
def test_the_context_ends_where_the_scaling_depends_on_the_batch(
    rope: dict[str, Any], context: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, {**BASE, "model_type": "granite", "rope_parameters": rope})
    with caplog.at_level(logging.WARNING):
        assert fallback_facts(tmp_path).max_position_embeddings == context
    assert [("cut from 256 to 64" in record.getMessage()) for record in caplog.records] == [True] * (context < 256)


def test_unknown_keys_are_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {**BASE, "model_type": "granite", "rope_theta": 5000.0, "brand_new_thing": 3})
    with caplog.at_level(logging.INFO):
        fallback_facts(tmp_path)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["brand_new_thing"]
