# SPDX-License-Identifier: Apache-2.0
"""Families without a spec against transformers' own run: whole prompts, chunks, decodes, ragged mixes, past windows;
and whole engines on such models."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from mii_zmq import kernels
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.executor import ModelExecutor
from mii_zmq.worker.kv_pool import BlockShape, KvPool
from mii_zmq.worker.memory_bill import MemoryBill
from mii_zmq.worker.models.fallback import FallbackModel, _gives_states, load_fallback
from mii_zmq.worker.models.model_facts import ModelFacts
from mii_zmq.worker.plan import EngineLimits, SamplingSpec, SequenceRequest
from mii_zmq.worker.sampler import Sampler
from tests.worker.models.checkpoints import max_relative_difference
from tests.worker.models.fallback_checkpoints import (
    CPU,
    FAMILIES,
    VOCAB,
    FallbackDriver,
    load,
    make_config,
    save_random,
)

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Loaded:
    directory: Path
    reference: PreTrainedModel
    model: FallbackModel
    facts: ModelFacts

    def driver(self, block_size: int = 8) -> FallbackDriver:
        return FallbackDriver(self.model, self.facts, block_size)

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), V]."""
        logits: torch.Tensor = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        found = self.reference.generate(
            torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return found[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    made: dict[str, Loaded] = {}

    def get(family: str) -> Loaded:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            reference = save_random(make_config(family), directory)
            made[family] = Loaded(directory, reference, *load(directory))
        return made[family]

    return get


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_prompt_then_decodes(family: str, loaded: Callable[[str], Loaded]) -> None:
    model = loaded(family)
    driver, tokens = model.driver(), prompt(47)
    expected = model.expected(tokens)
    steps = [driver.step([(0, tokens[:40])])] + [driver.step([(0, [token])]) for token in tokens[40:]]
    for position, logits in zip(range(39, 47), steps, strict=True):
        assert logits is not None
        assert max_relative_difference(logits[0], expected[position]) <= TOLERANCE
        assert int(logits[0].argmax()) == int(expected[position].argmax())


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prompt(family: str, loaded: Callable[[str], Loaded]) -> None:
    model = loaded(family)
    driver, tokens = model.driver(), prompt(45)
    expected = model.expected(tokens)
    end = 0
    for size in (1, 9, 2, 16, 8, 7, 2):
        logits = driver.step([(3, tokens[end : end + size])])
        end += size
        assert logits is not None
        assert max_relative_difference(logits[0], expected[end - 1]) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_mix_of_chunks_and_decodes(family: str, loaded: Callable[[str], Loaded]) -> None:
    model = loaded(family)
    driver = model.driver()
    histories = {slot: prompt(length, slot) for slot, length in enumerate((31, 3, 50, 17, 8))}
    expected = {slot: model.expected(tokens) for slot, tokens in histories.items()}
    ends = dict.fromkeys(histories, 0)
    for step_sizes in ((5, 1, 30, 16, 7), (1, 1, 9, 0, 1), (20, 1, 1, 1, 0), (1, 0, 10, 0, 0)):
        parts = []
        for slot, size in enumerate(step_sizes):
            if size:
                parts.append((slot, histories[slot][ends[slot] : ends[slot] + size]))
                ends[slot] += size
        logits = driver.step(parts)
        assert logits is not None
        for row, (slot, _) in enumerate(parts):
            assert max_relative_difference(logits[row], expected[slot][ends[slot] - 1]) <= TOLERANCE


def test_the_windows_are_seen(loaded: Callable[[str], Loaded]) -> None:
    """The parity tests cross windows only if the models have some."""
    windows = {family: [shape.window for _, _, shape in loaded(family).model._layers.values()] for family in FAMILIES}
    assert windows.pop("starcoder2") == [13, 13, 13]
    assert windows.pop("smollm3") == [11, None, 11]
    assert {window for found in windows.values() for window in found} == {None}


def test_a_step_without_wanted_logits_writes_the_cache(loaded: Callable[[str], Loaded]) -> None:
    model, tokens = loaded("granite"), prompt(30)
    driver = model.driver()
    assert driver.step([(0, tokens[:20])], sample=False) is None
    logits = driver.step([(0, tokens[20:])])
    assert logits is not None
    assert max_relative_difference(logits[0], model.expected(tokens)[-1]) <= TOLERANCE


def test_sdpa_of_transformers_agrees_too(loaded: Callable[[str], Loaded]) -> None:
    model, tokens = loaded("starcoder2"), prompt(40)
    reference = type(model.reference).from_pretrained(model.directory, attn_implementation="sdpa", dtype=torch.float32)
    logits = model.driver().step([(0, tokens)])
    assert logits is not None
    with torch.inference_mode():
        assert max_relative_difference(logits[0], reference(torch.tensor([tokens])).logits[0, -1]) <= TOLERANCE


def test_facts_and_weight_bytes(loaded: Callable[[str], Loaded]) -> None:
    model = loaded("cohere")
    assert model.facts == ModelFacts("cohere", VOCAB, 3, 2, 8, 256, "float32", (2,))
    assert model.model.weight_bytes == sum(parameter.nbytes for parameter in model.reference.parameters())
    assert loaded("glm4").facts.head_dim == 16


@pytest.mark.parametrize("family", ["glm4", "starcoder2"])
def test_bfloat16_stays_near(family: str, loaded: Callable[[str], Loaded]) -> None:
    model, tokens = loaded(family), prompt(30)
    driver = FallbackDriver(*load(model.directory, torch.bfloat16), dtype=torch.bfloat16)
    expected = model.expected(tokens)
    for part, position in ((tokens[:29], -2), (tokens[29:], -1)):
        logits = driver.step([(0, part)])
        assert logits is not None
        assert max_relative_difference(logits[0].float(), expected[position]) < 0.1


def test_models_in_two_threads_do_not_meet(loaded: Callable[[str], Loaded]) -> None:
    """Both run at once, in the same steps; each must answer as it does alone."""
    models = [loaded("starcoder2"), loaded("smollm3")]
    meeting = threading.Barrier(2, timeout=30)
    differences: list[float] = []

    def run(model: Loaded, seed: int) -> None:
        driver, tokens = model.driver(), prompt(60, seed)
        expected = model.expected(tokens)
        for begin in range(0, 60, 5):
            meeting.wait()
            logits = driver.step([(seed, tokens[begin : begin + 5])])
            assert logits is not None
            differences.append(max_relative_difference(logits[0], expected[begin + 4]))

    threads = [threading.Thread(target=run, args=(model, seed)) for seed, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(differences) == 24
    assert max(differences) <= TOLERANCE


def make_engine(model: Loaded, num_blocks: int, block_size: int = 4) -> EngineCore:
    facts = model.facts
    block = BlockShape(facts.num_layers, facts.num_kv_heads, block_size, facts.head_dim, torch.float32)
    pool = KvPool(np, block, num_blocks)
    limits = EngineLimits(
        facts.vocab_size, facts.max_position_embeddings, num_blocks, block_size, max_sequences=6, token_budget=16,
        hidden_size=model.model.state_size,
    )  # fmt: skip
    bill = MemoryBill(model.model.weight_bytes, pool.num_bytes, num_blocks, num_blocks * block_size)
    sampler = Sampler(6, facts.vocab_size, CPU)
    return EngineCore(ModelExecutor(model.model, pool, sampler, limits, bill, num_threads=1))


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "preempts"), [(64, False), (14, True)])
@pytest.mark.parametrize("family", ["starcoder2", "nemotron"])
def test_engine_gives_the_greedy_tokens(
    family: str, num_blocks: int, preempts: bool, loaded: Callable[[str], Loaded]
) -> None:
    model = loaded(family)
    engine = make_engine(model, num_blocks)
    prompts = {seq_id: prompt(length, seq_id) for seq_id, length in enumerate((21, 5, 13, 1, 9))}
    found: dict[int, list[int]] = {seq_id: [] for seq_id in prompts}
    try:
        for seq_id, tokens in prompts.items():
            engine.add(SequenceRequest(seq_id, tokens, 16, sampling=SamplingSpec(temperature=0.0)))
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                found[output.seq_id] += output.token_ids
        assert (engine.stats().num_preemptions > 0) == preempts
    finally:
        engine.close()
    assert found == {seq_id: model.greedy(tokens, 16) for seq_id, tokens in prompts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_gives_the_hidden_states_that_the_head_reads(family: str, loaded: Callable[[str], Loaded]) -> None:
    """In chunks, beside a sequence that generates."""
    model = loaded(family)
    engine = make_engine(model, 64)
    prompts = {seq_id: prompt(length, seq_id) for seq_id, length in enumerate((21, 5, 13))}
    poolings = ("mean", "last", "first")
    engine.add(SequenceRequest(9, prompt(9, 9), 6, sampling=SamplingSpec(temperature=0.0)))
    found: dict[int, torch.Tensor] = {}
    drawn: list[int] = []
    try:
        for seq_id, tokens in prompts.items():
            engine.add(SequenceRequest(seq_id, tokens, 0, sampling=SamplingSpec(pooling=poolings[seq_id])))
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                drawn += output.token_ids
                if output.pooled is not None:
                    found[output.seq_id] = torch.from_numpy(np.frombuffer(output.pooled, "<f4").copy())
    finally:
        engine.close()
    assert drawn == model.greedy(prompt(9, 9), 6)
    for seq_id, tokens in prompts.items():
        with torch.inference_mode():
            states = model.reference.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        wanted = {"last": states[-1], "first": states[0], "mean": states.mean(0)}[poolings[seq_id]]
        assert max_relative_difference(found[seq_id], wanted) < TOLERANCE


def test_a_model_that_does_not_show_what_its_head_reads_gives_no_embeddings(
    loaded: Callable[[str], Loaded],
) -> None:
    model = loaded("starcoder2")

    class Hidden(type(model.reference)):  # type: ignore[misc]
        """Its head is not the one that it names."""

        def get_output_embeddings(self) -> torch.nn.Module:
            return torch.nn.Linear(7, 5)

    checked = load_fallback(model.directory, torch.float32, CPU, kernels.for_device(CPU))[0]
    assert checked.state_size == model.reference.config.hidden_size
    checked._model.__class__ = Hidden
    fresh = FallbackModel(checked._model, {}, kernels.for_device(CPU), CPU, torch.float32)
    fresh._layers = checked._layers
    assert fresh.state_size == 7
    assert not _gives_states(fresh, model.facts, torch.tensor(prompt(21)), torch.float32)
    assert _gives_states(checked, model.facts, torch.tensor(prompt(21)), torch.float32)


def test_loading_says_how_far_it_is_and_nothing_else(
    loaded: Callable[[str], Loaded], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("granite")
    said: list[tuple[str, float]] = []
    level = hf_logging.get_verbosity()
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        load_fallback(
            model.directory, torch.float32, CPU, kernels.for_device(CPU), lambda text, share: said.append((text, share))
        )
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert caplog.records == []
    assert hf_logging.get_verbosity() == level
    shares = [share for text, share in said if text == "loading weights"]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert said[-1] == ("checking the model", 0.0)
