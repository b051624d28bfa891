# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of fallback families that are incomplete, damaged or in a refused format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from mii_zmq.errors import CheckpointError, ModelUnsupported, StartupError
from tests.worker.models.checkpoints import max_relative_difference
from tests.worker.models.fallback_checkpoints import FallbackDriver, load, make_config, save_random

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def reference(tmp_path: Path) -> PreTrainedModel:
    return save_random(make_config("granite", num_hidden_layers=1), tmp_path)


def change(directory: Path, edit: Callable[[Tensors], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


NORM = "model.norm.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda t: t.pop(NORM), CheckpointError, f"lacks 1 tensors, e.g. {NORM}"),
        (
            lambda t: t.update({"model.extra.weight": t[NORM].clone()}),
            CheckpointError,
            "does not have, e.g. model.extra.weight",
        ),
        (
            lambda t: t.update({GATE: t[GATE][:40]}),
            CheckpointError,
            r"gate_proj.weight has the shape \[40, 48\], .* implies \[80, 48\]",
        ),
        (lambda t: t.update({GATE: t[GATE].to(torch.int8)}), ModelUnsupported, "dtype I8; quantized"),
    ],
)
def test_a_wrong_tensor_is_refused(
    edit: Callable[[Tensors], object],
    error: type[StartupError],
    message: str,
    reference: PreTrainedModel,
    tmp_path: Path,
) -> None:
    change(tmp_path, edit)
    with pytest.raises(error, match=message) as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)


def test_pickles_are_refused_even_where_the_config_names_them(reference: PreTrainedModel, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (open, (str(mark), "w"))

    torch.save({NORM: Evil()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["transformers_weights"] = "pytorch_model.bin"
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="pickled weights only"):
        load(tmp_path)
    assert not mark.exists()


def test_a_cut_file_is_refused(reference: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="download it again"):
        load(tmp_path)


def test_an_adapter_beside_the_model_is_not_applied(reference: PreTrainedModel, tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "somewhere/else", "r": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    check_logits(reference, tmp_path)


def test_shards_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    model = save_random(make_config("starcoder2"), tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    check_logits(model, tmp_path)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shards[1].name}"):
        load(tmp_path)


def check_logits(reference: PreTrainedModel, directory: Path) -> None:
    tokens = list(range(5, 30))
    logits = FallbackDriver(*load(directory)).step([(0, tokens)])
    assert logits is not None
    with torch.inference_mode():
        assert max_relative_difference(logits[0], reference(torch.tensor([tokens])).logits[0, -1]) <= 1e-4
