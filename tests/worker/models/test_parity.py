# SPDX-License-Identifier: Apache-2.0
"""Every family against transformers in float32: whole prompts, chunks, decodes, ragged mixes, past the window."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from mii_zmq import kernels
from mii_zmq.config import EngineConfig
from mii_zmq.worker.executor import load_executor
from mii_zmq.worker.plan import NewSequence, SamplingSpec, StepPlan, StepRow
from tests.worker.models.checkpoints import CONFIGS, VOCAB, max_relative_difference
from tests.worker.models.conftest import Checkpoints
from tests.worker.models.decoder_driver import DecoderDriver

TOLERANCE = 1e-4


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V]."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_prompt_then_decodes(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    driver = DecoderDriver(directory)
    tokens = prompt(47)
    expected = expected_logits(model, tokens)
    steps = [driver.step([(0, tokens[:40])])] + [driver.step([(0, [token])]) for token in tokens[40:]]
    for position, logits in zip(range(39, 47), steps, strict=True):
        assert logits is not None
        assert max_relative_difference(logits[0], expected[position]) <= TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_chunked_prompt(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    driver = DecoderDriver(directory)
    tokens = prompt(45)
    expected = expected_logits(model, tokens)
    end = 0
    for size in (1, 9, 2, 16, 8, 7, 2):
        logits = driver.step([(3, tokens[end : end + size])])
        end += size
        assert logits is not None
        assert max_relative_difference(logits[0], expected[end - 1]) <= TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_mix_of_chunks_and_decodes(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    driver = DecoderDriver(directory)
    histories = {slot: prompt(length, slot) for slot, length in enumerate((31, 3, 50, 17, 8))}
    expected = {slot: expected_logits(model, tokens) for slot, tokens in histories.items()}
    ends = dict.fromkeys(histories, 0)
    sizes = ((5, 1, 30, 16, 7), (1, 1, 9, 0, 1), (20, 1, 1, 1, 0), (1, 0, 10, 0, 0))
    for step_sizes in sizes:
        parts = []
        for slot, size in enumerate(step_sizes):
            if size:
                parts.append((slot, histories[slot][ends[slot] : ends[slot] + size]))
                ends[slot] += size
        logits = driver.step(parts)
        assert logits is not None
        for row, (slot, _) in enumerate(parts):
            assert max_relative_difference(logits[row], expected[slot][ends[slot] - 1]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prompt_longer_than_one_piece(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    tokens = prompt(230)
    expected = expected_logits(model, tokens)
    whole = DecoderDriver(directory).step([(0, tokens)])
    driver = DecoderDriver(directory, block_size=16)
    assert driver.step([(0, tokens[:21])], sample=False) is None
    chunked = driver.step([(0, tokens[21:])])
    for logits in (whole, chunked):
        assert logits is not None
        assert max_relative_difference(logits[0], expected[-1]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen3", "opt"])
def test_the_oracle_table_agrees(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    driver = DecoderDriver(directory, ops=kernels.REFERENCE, dtype=torch.float32)
    tokens = prompt(20)
    logits = driver.step([(0, tokens)])
    assert logits is not None
    assert max_relative_difference(logits[0], expected_logits(model, tokens)[-1]) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
def test_bfloat16_stays_near(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    driver = DecoderDriver(directory, dtype=torch.bfloat16)
    tokens = prompt(30)
    expected = expected_logits(model, tokens)
    first, second = driver.step([(0, tokens[:29])]), driver.step([(0, tokens[29:])])
    assert first is not None
    assert second is not None
    assert max_relative_difference(first[0].float(), expected[-2]) < 0.1
    assert max_relative_difference(second[0].float(), expected[-1]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "opt"])
def test_greedy_tokens_through_the_executor(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    tokens = prompt(33)
    expected = model.generate(
        torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 33:].tolist()
    executor = load_executor(EngineConfig(model=str(directory), block_size=16, num_blocks=8, max_sequences=3))
    try:
        blocks = [5, 2, 7, 0]
        first = StepPlan(1, [StepRow(2, 0, 20, False)], [NewSequence(2, tokens, 33, blocks, SamplingSpec())])
        pending = [executor.submit(first), executor.submit(StepPlan(2, [StepRow(2, 20, 13, True)]))]
        # Every step is handed in before any result is read: drawn ids feed the next step without the host.
        pending += [executor.submit(StepPlan(3 + i, [StepRow(2, 33 + i, 1, True)])) for i in range(23)]
        drawn = [token for step in pending for token in step.result().token_ids]
    finally:
        executor.close()
    assert drawn == expected


def test_limits_and_bill(checkpoints: Checkpoints) -> None:
    directory, model = checkpoints("llama")
    messages: list[tuple[str, float]] = []
    executor = load_executor(
        EngineConfig(model=str(directory), block_size=16, max_sequences=4),
        lambda text, share: messages.append((text, share)),
    )
    executor.close()
    limits = executor.limits
    assert (limits.vocab_size, limits.max_model_len, limits.token_budget) == (VOCAB, 256, 512)
    assert limits.num_blocks == 4 * 256 // 16, "never more blocks than the slots can use"
    assert limits.eos_token_ids == (2,)
    assert executor.bill.num_tokens == limits.num_blocks * 16
    assert executor.bill.kv_bytes == limits.num_blocks * 3 * 2 * 2 * 16 * 8 * 4
    assert executor.bill.weight_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert messages[-1] == ("ready", 1.0)
