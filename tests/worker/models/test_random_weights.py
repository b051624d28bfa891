# SPDX-License-Identifier: Apache-2.0
"""Random weights have the shapes that loaded ones have, and ranks agree on what they hold whole."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError
from mii_zmq.worker.loading import load_executor
from mii_zmq.worker.models.hf_config import load_model_config
from mii_zmq.worker.models.random_weights import SHAPES, random_weights, shape_config
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.models.weights import load_weights
from mii_zmq.worker.parallel import RankInfo
from tests.worker.models.checkpoints import CONFIGS
from tests.worker.models.conftest import Checkpoints

CPU = torch.device("cpu")


def described(part: Any) -> Any:
    """The structure of weights: shapes and dtypes in place of tensors."""
    if isinstance(part, Tensor):
        return (tuple(part.shape), part.dtype)
    if isinstance(part, list):
        return [described(item) for item in part]
    if is_dataclass(part):
        return {entry.name: described(getattr(part, entry.name)) for entry in fields(part)}
    return part


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_are_those_of_a_checkpoint(name: str, checkpoints: Checkpoints) -> None:
    directory: Path = checkpoints(name)[0]
    config = load_model_config(directory)
    for rank in (RankInfo(), RankInfo(1, 2)):
        made = random_weights(config, torch.bfloat16, CPU, shard=Shard.of(config, rank))
        loaded = load_weights(directory, config, torch.bfloat16, CPU, rank)
        assert described(made) == described(loaded)


def test_ranks_agree_on_what_is_whole(checkpoints: Checkpoints) -> None:
    config = load_model_config(checkpoints("qwen2_moe")[0])
    first, second = (random_weights(config, torch.float32, CPU, 3, Shard.of(config, RankInfo(r, 2))) for r in (0, 1))
    again = random_weights(config, torch.float32, CPU, 3, Shard.of(config, RankInfo(0, 2)))
    moe, other = first.layers[1].moe, second.layers[1].moe
    assert moe is not None
    assert other is not None
    assert torch.equal(first.embed, second.embed)
    assert torch.equal(moe.router, other.router)
    assert not torch.equal(first.layers[1].qkv.weight, second.layers[1].qkv.weight)
    assert torch.equal(first.layers[1].qkv.weight, again.layers[1].qkv.weight)
    assert not torch.equal(first.layers[0].qkv.weight, first.layers[1].qkv.weight)


@pytest.mark.parametrize(
    ("name", "billions"), [("0.6B", 0.6), ("8B", 8.0), ("70B", 70.6), ("8x7B-16", 23.5), ("30B-A3B", 30.5)]
)
def test_published_shapes(name: str, billions: float) -> None:
    config = shape_config(name)
    assert len(config.windows) == len(config.ropes) == config.num_layers
    hidden, width = config.hidden_size, config.intermediate_size
    layer = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim * hidden
    if config.moe is None:
        layer += 3 * width * hidden
    else:
        layer += config.moe.num_experts * (3 * config.moe.intermediate_size + 1) * hidden
    total = config.num_layers * layer + config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


def test_an_unknown_shape() -> None:
    with pytest.raises(ConfigError, match="9B.*known: 0.6B"):
        shape_config("9B")
    assert "tiny" in SHAPES


def test_a_shape_is_loaded_by_its_name() -> None:
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_blocks": 2, "num_threads": 1}
    executor = load_executor(EngineConfig(model="random:tiny", **settings))
    assert executor.limits.vocab_size == SHAPES["tiny"].vocab_size
    assert executor.limits.max_model_len == 64
    executor.close()
    with pytest.raises(ConfigError, match="no shape is called 'giant'"):
        load_executor(EngineConfig(model="random:giant", **settings))
