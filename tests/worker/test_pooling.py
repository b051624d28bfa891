# SPDX-License-Identifier: Apache-2.0
"""Embeddings out of the running engine: prompts whose hidden states are pooled, against transformers' own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from mii_zmq.config import EngineConfig
from mii_zmq.errors import InvalidRequest, NumericError, PromptTooLong
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.loading import load_executor
from mii_zmq.worker.plan import NOT_FINITE, SamplingSpec, SequenceOutput, SequenceRequest
from tests.engine_driver import Driver, make_driver, make_limits, make_request

pytestmark = pytest.mark.slow

VOCAB = 89
KINDS = ("last", "mean", "first")


def llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip


def projected_opt() -> OPTConfig:
    """The states of a model that projects them before its head are narrower than its layers."""
    return OPTConfig(
        vocab_size=VOCAB, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, init_std=0.3, do_layer_norm_before=False,
        eos_token_id=None, dropout=0.0,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[llama, projected_opt])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(request.param()).eval()
    directory = tmp_path_factory.mktemp("pooled")
    model.save_pretrained(directory)
    model.directory = directory
    return model


@pytest.fixture
def core(reference: Any, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    """Small chunks over a small pool (`num_blocks` by parameter)."""
    settings: dict[str, Any] = {"token_budget": 24, "block_size": 8, "num_blocks": getattr(request, "param", 64)}
    executor = load_executor(EngineConfig(model=str(Path(reference.directory)), device="cpu", **settings))
    core = EngineCore(executor, model="pooled", prefix_cache=True)
    yield core
    core.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def pooled_request(seq_id: int, prompt: list[int], pooling: str = "last") -> SequenceRequest:
    return make_request(seq_id, prompt, 0, sampling=SamplingSpec(pooling=pooling))


def run(core: EngineCore, *requests: SequenceRequest) -> dict[int, list[SequenceOutput]]:
    for request in requests:
        core.add(request)
    found: dict[int, list[SequenceOutput]] = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            found.setdefault(output.seq_id, []).append(output)
        core.scheduler.check()
    return found


def vector(outputs: list[SequenceOutput]) -> np.ndarray:
    (output,) = outputs
    assert (output.token_ids, output.finish_reason) == ([], "stop")
    assert output.pooled is not None
    return np.frombuffer(output.pooled, "<f4")


def expected(reference: Any, prompt: list[int], pooling: str) -> np.ndarray:
    with torch.inference_mode():
        states = reference.base_model(torch.tensor([prompt])).last_hidden_state[0]
    chosen = {"last": states[-1], "first": states[0], "mean": states.mean(0)}[pooling]
    return chosen.numpy()


def check(reference: Any, prompt: list[int], pooling: str, outputs: list[SequenceOutput]) -> None:
    np.testing.assert_allclose(vector(outputs), expected(reference, prompt, pooling), rtol=1e-3, atol=1e-4)


def test_prompts_in_chunks_among_others(reference: Any, core: EngineCore) -> None:
    prompts = [prompt_of(length, length) for length in (1, 2, 8, 60, 31, 25, 24)]
    requests = [pooled_request(i, prompt, KINDS[i % 3]) for i, prompt in enumerate(prompts)]
    more = [pooled_request(10 + i, prompt, KINDS[(i + 1) % 3]) for i, prompt in enumerate(prompts)]
    found = run(core, *requests, make_request(99, prompt_of(20), 12), *more)
    for i, prompt in enumerate(prompts):
        check(reference, prompt, KINDS[i % 3], found[i])
        check(reference, prompt, KINDS[(i + 1) % 3], found[10 + i])
    assert len(found[99]) == 12
    assert core.stats().num_used_blocks == 0


def test_a_generating_neighbour_is_not_changed(core: EngineCore) -> None:
    generating = make_request(1, prompt_of(30), 10)
    alone = [output.token_ids for output in run(core, generating)[1]]
    core.scheduler.reset_prefix_cache()
    both = run(core, make_request(2, prompt_of(30), 10), pooled_request(3, prompt_of(40, 3), "mean"))
    assert [output.token_ids for output in both[2]] == alone


def test_only_the_last_tokens_vector_may_use_what_is_cached(reference: Any, core: EngineCore) -> None:
    prompt = prompt_of(50)
    run(core, make_request(1, prompt, 2))
    for seq_id, pooling in enumerate(KINDS, 10):
        (output,) = run(core, pooled_request(seq_id, prompt, pooling))[seq_id]
        check(reference, prompt, pooling, [output])
        assert (output.num_cached_tokens > 0) == (pooling == "last")
    whole_blocks = prompt_of(48)
    run(core, pooled_request(20, whole_blocks, "mean"))
    (output,) = run(core, pooled_request(21, whole_blocks, "last"))[21]
    assert output.num_cached_tokens == 47
    check(reference, whole_blocks, "last", [output])


@pytest.mark.parametrize("core", [17], indirect=True)
def test_preempted_prompts_come_to_the_same(reference: Any, core: EngineCore) -> None:
    """Decodes take the blocks of half computed prompts."""
    lengths = (70, 90, 80)
    requests = [make_request(i, prompt_of(20, i), 60) for i in range(2)]
    pooled = [pooled_request(10 + i, prompt_of(length, i), KINDS[i]) for i, length in enumerate(lengths)]
    found = run(core, *requests, *pooled)
    for i, length in enumerate(lengths):
        check(reference, prompt_of(length, i), KINDS[i], found[10 + i])
    assert core.stats().num_preemptions > 0


def test_a_prompt_may_fill_the_context(reference: Any, core: EngineCore) -> None:
    prompt = prompt_of(128)
    check(reference, prompt, "mean", run(core, pooled_request(1, prompt, "mean"))[1])
    with pytest.raises(PromptTooLong, match="holds 128"):
        core.add(pooled_request(2, prompt_of(129)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 3}, "no output tokens"),
        ({"sampling": SamplingSpec(pooling="sum")}, "allowed: last, mean, first"),
        ({"resumed_token_ids": [1]}, "no output tokens"),
        ({"prompt_token_ids": []}, "no tokens"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    driver = make_driver(make_limits(hidden_size=8))
    values: dict[str, Any] = {"sampling": SamplingSpec(pooling="last"), "prompt_token_ids": [1], "max_new_tokens": 0}
    with pytest.raises(InvalidRequest, match=message):
        driver.core.add(SequenceRequest(1, **{**values, **fields}))


def test_an_engine_without_hidden_states_says_so() -> None:
    with pytest.raises(InvalidRequest, match="cannot embed"):
        make_driver().core.add(pooled_request(1, [1, 2]))


def fake_driver(**limits: Any) -> Driver:
    return make_driver(make_limits(hidden_size=8, **limits))


def run_fake(driver: Driver, cancelled: Sequence[int] = (), after: int = 0) -> dict[int, SequenceOutput]:
    """The ends of all sequences; some are cancelled after so many steps."""
    ends: dict[int, SequenceOutput] = {}
    for number in itertools.count():
        if number == after:
            driver.core.cancel(cancelled)
        if not driver.core.has_work:
            break
        for output in driver.core.step():
            assert output.seq_id not in ends
            if output.finish_reason is not None:
                ends[output.seq_id] = output
        driver.core.scheduler.check()
    assert driver.executor.violations == []
    assert driver.core.stats().num_used_blocks == driver.core.stats().num_outstanding_tokens == 0
    return ends


@pytest.mark.parametrize("seed", range(8))
def test_any_mix_over_a_small_pool(seed: int) -> None:
    """Shared prefixes, preemption, cancelling and failing steps, with the strictest reader of plans."""
    draw = random.Random(seed)
    driver = fake_driver(num_blocks=24, token_budget=draw.choice([5, 16, 32]))
    driver.executor.faults.steps[6] = RuntimeError("made up")
    prefix = [draw.randrange(256) for _ in range(20)]
    requests = []
    for seq_id in range(24):
        prompt = prefix[: draw.randrange(20)] + [draw.randrange(256) for _ in range(draw.randint(1, 40))]
        kind = draw.choice(["", *KINDS])
        requests.append(
            pooled_request(seq_id, prompt, kind) if kind else make_request(seq_id, prompt, draw.randint(1, 20))
        )
    for request in requests:
        driver.core.add(request)
    cancelled = draw.sample(range(24), 6)
    ends = run_fake(driver, cancelled, after=4)
    assert ends.keys() == set(range(24))
    for request in requests:
        end, pooling = ends[request.seq_id], request.sampling.pooling
        if end.finish_reason == "cancelled":
            assert request.seq_id in cancelled
            assert end.pooled is None
        elif pooling:
            assert end.pooled == driver.executor.model.pool(request.prompt_token_ids, pooling, 8)
    assert "cancelled" in {end.finish_reason for end in ends.values()}


def test_numbers_that_are_not_finite_end_the_request_alone() -> None:
    driver = fake_driver()
    driver.executor.faults.rows[1] = {0: NOT_FINITE}
    driver.core.add(pooled_request(1, [1, 2, 3]))
    driver.core.add(pooled_request(2, [4, 5, 6]))
    ends = run_fake(driver)
    assert isinstance(ends[1].error, NumericError)
    assert ends[2].pooled == driver.executor.model.pool([4, 5, 6], "last", 8)


def test_cancelled_between_two_chunks() -> None:
    driver = fake_driver(token_budget=4)
    driver.core.add(pooled_request(1, list(range(20)), "mean"))
    driver.core.step()
    driver.core.step()
    driver.core.cancel([1])
    ends = run_fake(driver)
    assert (ends[1].finish_reason, ends[1].pooled) == ("cancelled", None)
