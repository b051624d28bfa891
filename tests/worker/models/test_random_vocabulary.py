# SPDX-License-Identifier: Apache-2.0
"""Random models say nothing but text, however the sampler is set and whichever rank holds the rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mii_zmq.config import EngineConfig
from mii_zmq.errors import CheckpointError, ConfigError
from mii_zmq.tokenizer import FakeTokenizer, load_tokenizer
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.loading import load_executor
from mii_zmq.worker.models.demo_model import resolve_model
from mii_zmq.worker.models.random_vocabulary import PENALTY, keep_to, readable_ids
from mii_zmq.worker.models.random_weights import SHAPES, random_weights
from mii_zmq.worker.models.shard import Shard
from mii_zmq.worker.parallel import RankInfo
from mii_zmq.worker.plan import SamplingSpec, SequenceRequest
from tests.tiny_tokenizers import byte_level, metaspace_decoder

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "num_blocks": 64, "num_threads": 1}


def test_special_tokens_and_pieces_of_characters_are_no_text() -> None:
    tokenizer = byte_level()
    ids = set(readable_ids(tokenizer, 10_000))
    assert ids.isdisjoint(tokenizer.all_special_ids)
    assert not any("\ufffd" in tokenizer.decode([token_id]) for token_id in ids)
    assert len(ids) > 200
    assert max(readable_ids(tokenizer, 100)) < 100
    assert readable_ids(FakeTokenizer(), 1000) == list(range(128))
    slow = readable_ids(metaspace_decoder(), 10_000)
    assert not any("\ufffd" in metaspace_decoder().decode([token_id]) for token_id in slow)


def test_a_tokenizer_without_text() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.all_special_ids = frozenset(range(300))
    with pytest.raises(ConfigError, match="no token below 50"):
        readable_ids(tokenizer, 50)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SamplingSpec(), SamplingSpec(seed=1, temperature=2.0)], ids=["greedy", "hot"])
def test_only_text_is_drawn(spec: SamplingSpec, tmp_path: Path) -> None:
    byte_level()._backend.save(str(tmp_path / "tokenizer.json"))
    executor = load_executor(EngineConfig(model="random:tiny", tokenizer=str(tmp_path), **SETTINGS))
    core = EngineCore(executor)
    prompts = [[token_id, 300, 5] for token_id in range(0, 400, 25)]
    for index, prompt in enumerate(prompts):
        core.add(SequenceRequest(index, prompt, 24, replace(spec, seed=index)))
    drawn: list[int] = []
    while core.has_work:
        drawn += [token_id for output in core.step() for token_id in output.token_ids]
    core.close()
    assert len(drawn) == 24 * len(prompts)
    assert set(drawn) <= set(readable_ids(load_tokenizer(str(tmp_path)), 1024))
    assert len(set(drawn)) > 20


@pytest.mark.parametrize("name", ["tiny", "tied", "moe"])
def test_every_rank_marks_its_own_rows(name: str) -> None:
    config = SHAPES["tiny"]
    if name == "tied":
        config = replace(config, tie_word_embeddings=True)
    if name == "moe":
        moe = SHAPES["8x7B-16"].moe
        assert moe is not None
        config = replace(
            config, spec=SHAPES["8x7B-16"].spec, moe=replace(moe, intermediate_size=64, layers=(True,) * 2)
        )
    kept = [0, 7, 600]
    is_forbidden = []
    for rank in range(2):
        shard = Shard.of(config, RankInfo(rank, 2))
        weights = random_weights(config, torch.float32, CPU, shard=shard)
        keep_to(weights, shard, kept)
        for layer in weights.layers:
            # Nothing but the embedding writes to the channel.
            assert not layer.out.weight[0].any()
            assert layer.down is None or not layer.down.weight[0].any()
            assert layer.moe is None or not layer.moe.down[:, 0].any()
        rows = weights.embed if weights.head is None else weights.head.weight
        is_forbidden.append(rows[:, 0] == -PENALTY)
    forbidden = is_forbidden[0] if name == "tied" else torch.cat(is_forbidden)
    assert forbidden.shape == (config.vocab_size,)
    assert torch.nonzero(~forbidden).flatten().tolist() == kept


def test_a_random_model_needs_a_tokenizer() -> None:
    assert resolve_model("random:8B") == "random:8B"
    with pytest.raises(CheckpointError, match="'random:8B' is a shape .* --tokenizer"):
        load_tokenizer("random:8B")
