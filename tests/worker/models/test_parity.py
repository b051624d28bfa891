# SPDX-License-Identifier: Apache-2.0
"""Every family and layout against transformers in float32: whole prompts, chunks, decodes, ragged mixes, two ranks.

The prompts are longer than the windows and than the lengths at which rotary scaling changes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from mii_zmq import kernels
from mii_zmq.config import EngineConfig
from mii_zmq.worker.loading import load_executor
from mii_zmq.worker.models.archs import ARCHITECTURES
from mii_zmq.worker.models.checkpoint_json import read_config
from mii_zmq.worker.parallel import RankInfo
from mii_zmq.worker.plan import NewSequence, SamplingSpec, StepPlan, StepRow
from tests.worker.models.checkpoints import BORDER, CONFIGS, VOCAB, max_relative_difference
from tests.worker.models.conftest import Checkpoints
from tests.worker.models.decoder_driver import DecoderDriver
from tests.worker.models.thread_collectives import ThreadCollectives, ThreadGroup

TOLERANCE = 1e-4
LENGTH_DEPENDENT = ("llama_dynamic_rope", "phi3_longrope")


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected_logits(model: PreTrainedModel, tokens: list[int], prompt_length: int | None = None) -> torch.Tensor:
    """[len(tokens), V], as `generate` sees them when the tokens behind the prompt come one by one."""
    kind = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type")
    length = len(tokens) if prompt_length is None else prompt_length
    if kind not in ("dynamic", "longrope") or length == len(tokens):
        _forget_lengths(model)
        return model(torch.tensor([tokens]), use_cache=False).logits[0]
    if kind == "longrope":
        # Past the border generate computes everything again, below it the cache holds what this computes.
        whole = [
            model(torch.tensor([tokens[:end]]), use_cache=False).logits[0] for end in range(length, len(tokens) + 1)
        ]
        return torch.cat([whole[0], *(logits[-1:] for logits in whole[1:])])
    _forget_lengths(model)
    output = model(torch.tensor([tokens[:length]]), use_cache=True)
    rows = [output.logits[0]]
    for token in tokens[length:]:
        output = model(torch.tensor([[token]]), use_cache=True, cache=output.cache)
        rows.append(output.logits[0])
    return torch.cat(rows)


def _forget_lengths(model: PreTrainedModel) -> None:
    """transformers keeps the frequencies of the longest sequence so far until it sees a short one."""
    model(torch.tensor([[3]]), use_cache=False)


def assert_near(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert actual is not None
    assert max_relative_difference(actual, expected) <= TOLERANCE
    assert int(actual.argmax()) == int(expected.argmax())


@pytest.mark.slow
def test_every_architecture_has_a_case(checkpoints: Checkpoints) -> None:
    assert {read_config(checkpoints(name)[0])["architectures"][0] for name in CONFIGS} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_prompt_then_decodes(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    driver = DecoderDriver(directory)
    tokens = prompt(BORDER + 8)
    expected = expected_logits(model, tokens, BORDER - 4)
    for end in range(BORDER - 4, BORDER + 9):
        begin = 0 if end == BORDER - 4 else end - 1
        logits = driver.step([(0, tokens[begin:end])])
        assert_near(None if logits is None else logits[0], expected[end - 1])


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_mix_of_chunks_and_decodes(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    driver = DecoderDriver(directory)
    prompts = {slot: prompt(length, slot) for slot, length in enumerate((31, 3, 50, 17, 8))}
    expected = {slot: expected_logits(model, tokens) for slot, tokens in prompts.items()}
    ends = dict.fromkeys(prompts, 0)
    sizes = ((5, 1, 30, 16, 7), (1, 1, 9, 0, 1), (20, 1, 1, 1, 0), (5, 0, 10, 0, 0))
    for step_sizes in sizes:
        parts = []
        for slot, size in enumerate(step_sizes):
            if size:
                parts.append((slot, prompts[slot][ends[slot] : ends[slot] + size]))
                ends[slot] += size
        logits = driver.step(parts, prompts=prompts)
        assert logits is not None
        for row, (slot, _) in enumerate(parts):
            assert_near(logits[row], expected[slot][ends[slot] - 1])


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    tokens, other = prompt(BORDER + 5), prompt(9)
    group = ThreadGroup(2)
    ranks = [DecoderDriver(directory, rank=RankInfo(r, 2), collectives=ThreadCollectives(group, r)) for r in (0, 1)]
    first = group.run(lambda rank: ranks[rank].step([(0, tokens[:-1]), (1, other[:4])], prompts={0: tokens, 1: other}))
    second = group.run(lambda rank: ranks[rank].step([(1, other[4:]), (0, tokens[-1:])]))
    expected, expected_other = expected_logits(model, tokens), expected_logits(model, other)
    for before, after in zip(first, second, strict=True):
        assert before is not None
        assert after is not None
        for actual, wanted in (
            (before[0], expected[-2]), (before[1], expected_other[3]), (after[0], expected_other[-1]),
            (after[1], expected[-1]),
        ):  # fmt: skip
            assert_near(actual, wanted)
    assert first[0] is not None
    assert torch.equal(first[0], first[1]), "all ranks hold the same logits"


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    tokens = prompt(BORDER - 3)
    _forget_lengths(model)
    expected = model.generate(
        torch.tensor([tokens]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    driver, drawn = DecoderDriver(directory), list(tokens)
    while len(drawn) < len(expected):
        logits = driver.step([(0, tokens if drawn == tokens else drawn[-1:])])
        assert logits is not None
        drawn.append(int(logits[0].argmax()))
    assert drawn == expected


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
@pytest.mark.parametrize("lengths", [(BORDER + 9, BORDER + 12), (BORDER, BORDER + 3), (BORDER - 1, BORDER + 1)])
def test_rotary_scaling_that_depends_on_the_length(
    name: str, lengths: tuple[int, int], checkpoints: Checkpoints
) -> None:
    directory, model = checkpoints(name)
    driver = DecoderDriver(directory)
    begun, end = lengths
    tokens = prompt(end)
    expected = expected_logits(model, tokens, begun)
    chunked = [driver.step([(5, tokens[:7])], prompts={5: tokens[:begun]}), driver.step([(5, tokens[7:begun])])]
    for logits, position in zip(chunked, (6, begun - 1), strict=True):
        assert_near(None if logits is None else logits[0], expected[position])
    for position in range(begun, end):
        logits = driver.step([(5, tokens[position : position + 1])])
        assert_near(None if logits is None else logits[0], expected[position])


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_names_of_old_checkpoints(name: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    directory, model = checkpoints(name)
    tensors = {
        key.removeprefix("transformer."): data for key, data in load_file(directory / "model.safetensors").items()
    }
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 4, 4) for layer in range(3) if name == "gpt2"}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(directory / "config.json", tmp_path)
    tokens = prompt(12)
    logits = DecoderDriver(tmp_path).step([(0, tokens)])
    assert_near(None if logits is None else logits[0], expected_logits(model, tokens)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "gemma2"])
def test_prompt_longer_than_one_piece(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    tokens = prompt(230)
    expected = expected_logits(model, tokens)
    whole = DecoderDriver(directory).step([(0, tokens)])
    driver = DecoderDriver(directory, block_size=16)
    assert driver.step([(0, tokens[:21])], sample=False) is None
    chunked = driver.step([(0, tokens[21:])])
    for logits in (whole, chunked):
        assert_near(None if logits is None else logits[0], expected[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen3", "opt", "bloom", "gemma2", "mixtral"])
def test_the_oracle_table_agrees(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    driver = DecoderDriver(directory, ops=kernels.REFERENCE, dtype=torch.float32)
    tokens = prompt(20)
    logits = driver.step([(0, tokens)])
    assert_near(None if logits is None else logits[0], expected_logits(model, tokens)[-1])


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "gemma3", "qwen2_moe"])
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
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "opt", "llama_dynamic_rope"])
def test_greedy_tokens_through_the_executor(name: str, checkpoints: Checkpoints) -> None:
    directory, model = checkpoints(name)
    tokens = prompt(33)
    _forget_lengths(model)
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


@pytest.mark.slow
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
