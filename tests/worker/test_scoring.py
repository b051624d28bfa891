# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompts and of output tokens out of the running engine, against transformers' own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from mii_zmq.config import EngineConfig
from mii_zmq.errors import InvalidRequest
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.loading import load_executor
from mii_zmq.worker.plan import SamplingSpec, SequenceOutput, SequenceRequest, TokenLogprobs
from tests.engine_driver import make_driver, make_request

VOCAB = 89


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    directory = tmp_path_factory.mktemp("scored")
    model.save_pretrained(directory)
    model.directory = directory
    return model


@pytest.fixture
def core(reference: Any, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    """Small chunks over a small pool (`num_blocks` by parameter)."""
    settings: dict[str, Any] = {"token_budget": 24, "block_size": 8, "num_blocks": getattr(request, "param", 64)}
    executor = load_executor(EngineConfig(model=str(Path(reference.directory)), device="cpu", **settings))
    core = EngineCore(executor, model="scored", prefix_cache=True)
    yield core
    core.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def outputs_of(core: EngineCore, *requests: SequenceRequest) -> dict[int, list[SequenceOutput]]:
    for request in requests:
        core.add(request)
    found: dict[int, list[SequenceOutput]] = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None
            found.setdefault(output.seq_id, []).append(output)
    return found


def run(core: EngineCore, *requests: SequenceRequest) -> dict[int, list[list[TokenLogprobs] | None]]:
    found = outputs_of(core, *requests)
    return {seq_id: [output.prompt_scores for output in outputs] for seq_id, outputs in found.items()}


def check(
    reference: Any, tokens: list[int], scores: list[TokenLogprobs] | None, first: int = 1, width: int = 0
) -> None:
    """`scores` are those of the tokens from index `first` on."""
    assert scores is not None
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0, first - 1 : -1].log_softmax(-1)
    assert len(scores) == len(wanted) == len(tokens) - first
    chosen = wanted.gather(1, torch.tensor(tokens[first:])[:, None])
    found = torch.tensor([score.logprob for score in scores])
    torch.testing.assert_close(found, chosen[:, 0], rtol=1e-4, atol=1e-4)
    assert [score.rank for score in scores] == ((wanted > chosen).sum(-1) + 1).tolist()
    top = wanted.topk(width)
    assert [list(score.top_ids) for score in scores] == top.indices.tolist()
    for score, values in zip(scores, top.values, strict=True):
        torch.testing.assert_close(torch.tensor(score.top_logprobs), values, rtol=1e-4, atol=1e-4)


def test_scores_of_chunked_prompts_among_others(reference: Any, core: EngineCore) -> None:
    prompts = [prompt_of(length, length) for length in (1, 2, 8, 60, 31)]
    requests = [make_request(i, prompt, 3, score_prompt=True) for i, prompt in enumerate(prompts)]
    found = run(core, *requests, make_request(9, prompt_of(20), 12))
    for i, prompt in enumerate(prompts):
        first, *rest = found[i]
        check(reference, prompt, first)
        assert rest == [None, None]
    assert found[9] == [None] * 12


def test_a_cached_prompt_is_scored_all_the_same(reference: Any, core: EngineCore) -> None:
    prompt = prompt_of(50)
    run(core, make_request(1, prompt, 2))
    found = run(core, make_request(2, prompt, 2, score_prompt=True), make_request(3, prompt, 2, score_prompt=True))
    check(reference, prompt, found[2][0])
    check(reference, prompt, found[3][0])


@pytest.mark.parametrize("core", [10], indirect=True)
def test_a_preempted_sequence_is_scored_once(reference: Any, core: EngineCore) -> None:
    prompts = [prompt_of(30, seed) for seed in range(3)]
    found = run(core, *(make_request(i, prompt, 30, score_prompt=True) for i, prompt in enumerate(prompts)))
    assert core.stats().num_preemptions > 0
    for i, prompt in enumerate(prompts):
        check(reference, prompt, found[i][0])
        assert found[i][1:] == [None] * 29


def test_output_tokens_are_measured_by_the_models_own_logits(reference: Any, core: EngineCore) -> None:
    """Whatever sampling makes of them, and beside rows that ask for nothing."""
    specs = [
        SamplingSpec(num_logprobs=3),
        SamplingSpec(num_logprobs=0, seed=1, temperature=0.7, top_k=9),
        SamplingSpec(),
        SamplingSpec(num_logprobs=5, repetition_penalty=1.5, logit_bias=((7, 50.0),), num_prompt_logprobs=2),
        SamplingSpec(num_logprobs=1, seed=2, temperature=2.0, allowed_token_ids=(3, 5, 8)),
    ]
    prompts = [prompt_of(length, length) for length in (40, 3, 17, 30, 9)]
    requests = [
        make_request(i, prompt, 8, sampling=spec, score_prompt=spec.num_prompt_logprobs > 0)
        for i, (prompt, spec) in enumerate(zip(prompts, specs, strict=True))
    ]
    found = outputs_of(core, *requests)
    for i, (prompt, spec) in enumerate(zip(prompts, specs, strict=True)):
        drawn = [token_id for output in found[i] for token_id in output.token_ids]
        assert len(drawn) == 8
        if spec.num_logprobs is None:
            assert all(output.logprobs is None for output in found[i])
            continue
        scores = [score for output in found[i] for score in output.logprobs or ()]
        check(reference, [*prompt, *drawn], scores, first=len(prompt), width=spec.num_logprobs)
    check(reference, prompts[3], found[3][0].prompt_scores, width=2)
    assert set(found[4][-1].token_ids) <= {3, 5, 8}


@pytest.mark.parametrize("core", [10], indirect=True)
def test_every_token_of_a_preempted_sequence_is_measured_once(reference: Any, core: EngineCore) -> None:
    prompts = [prompt_of(30, seed) for seed in range(3)]
    spec = SamplingSpec(num_logprobs=1)
    found = outputs_of(core, *(make_request(i, prompt, 30, sampling=spec) for i, prompt in enumerate(prompts)))
    assert core.stats().num_preemptions > 0
    for i, prompt in enumerate(prompts):
        drawn = [token_id for output in found[i] for token_id in output.token_ids]
        scores = [score for output in found[i] for score in output.logprobs or ()]
        check(reference, [*prompt, *drawn], scores, first=30, width=1)


def test_an_engine_that_cannot_score_says_so() -> None:
    driver = make_driver()
    with pytest.raises(InvalidRequest, match="score_prompt"):
        driver.core.add(make_request(1, [1, 2], score_prompt=True))
