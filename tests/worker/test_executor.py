# SPDX-License-Identifier: Apache-2.0
"""The executor around a fake model that computes from what the pool and the batch hold, so that every effect of a
plan can be read off its logits.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError, InternalError, NumericError
from mii_zmq.kernels import KvLayer
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.executor import ModelExecutor
from mii_zmq.worker.kv_pool import BlockShape, KvPool
from mii_zmq.worker.loading import available_memory, load_executor
from mii_zmq.worker.memory_bill import MemoryBill
from mii_zmq.worker.models.decoder import ForwardBatch
from mii_zmq.worker.plan import EngineLimits, NewSequence, SamplingSpec, SequenceRequest, StepPlan, StepRow
from mii_zmq.worker.sampler import Sampler

VOCAB = 97
BLOCK = 4
CPU = torch.device("cpu")


class SummingModel:
    """Writes each token's id into its KV cell; its next token is the sum of the sequence's cells, modulo VOCAB."""

    def __init__(self) -> None:
        self.poisoned: set[int] = set()
        """Token ids whose sequences get NaN logits."""
        self.error: Exception | None = None
        self.bane: set[int] = set()
        """Token ids that make the step raise which computes them."""
        self.max_tokens = 1000
        """Tokens of a step that fit into memory."""
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, batch: ForwardBatch, kv_layers: Sequence[KvLayer]) -> torch.Tensor | None:
        assert self.gate.wait(30)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if self.bane & set(batch.token_ids.tolist()):
            raise IndexError("a token that the model cannot take")
        if len(batch.token_ids) > self.max_tokens:
            raise torch.OutOfMemoryError("too many tokens")
        cells = kv_layers[0].cells
        values = batch.token_ids.float()[:, None, None, None].expand(-1, 2, 1, 2)
        cells[batch.mapping.block_ids, batch.mapping.offsets] = values
        if batch.logit_rows is None:
            return None
        wanted = set(batch.logit_rows.tolist())
        logits = []
        layout = batch.layout
        for row in range(layout.num_rows):
            if int(layout.query_start_loc[row + 1]) - 1 not in wanted:
                continue
            ids = [
                int(cells[layout.block_tables[row, p // BLOCK], p % BLOCK, 0, 0, 0])
                for p in range(layout.seq_lens[row])
            ]
            one = torch.zeros(VOCAB)
            one[sum(ids) % VOCAB] = 1.0
            logits.append(torch.full_like(one, float("nan")) if self.poisoned & set(ids) else one)
        return torch.stack(logits)


def expected(token_ids: list[int], count: int) -> list[int]:
    history = list(token_ids)
    for _ in range(count):
        history.append(sum(history) % VOCAB)
    return history[len(token_ids) :]


class Rig:
    """An executor over a SummingModel, with step numbers counted."""

    def __init__(self) -> None:
        self.model = SummingModel()
        self.pool = KvPool(np, BlockShape(1, 1, BLOCK, 2, torch.float32), 16)
        limits = EngineLimits(VOCAB, 32, 16, BLOCK, max_sequences=4, token_budget=16)
        bill = MemoryBill(0, self.pool.num_bytes, 16, 64)
        self.executor = ModelExecutor(self.model, self.pool, Sampler(4, VOCAB, CPU), limits, bill, num_threads=1)
        self.num_steps = 0

    def submit(self, rows=(), new=(), freed=(), copies=(), zeroed=()):  # type: ignore[no-untyped-def]
        self.num_steps += 1
        parts = [list(part) for part in (rows, new, freed, copies, zeroed)]
        return self.executor.submit(StepPlan(self.num_steps, *parts))


def new(slot: int, token_ids: list[int], block_ids: list[int]) -> NewSequence:
    return NewSequence(slot, token_ids, len(token_ids), block_ids, SamplingSpec())


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="mii_zmq.worker")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.model.gate.set()
    rig.executor.close()


def test_drawn_ids_feed_the_next_step_before_the_host_reads_them(rig: Rig) -> None:
    prompt = [3, 5, 7]
    rig.model.gate.clear()
    pending = [rig.submit([StepRow(1, 0, 3, True)], [new(1, prompt, [6])])]
    pending += [rig.submit([StepRow(1, 3, 1, True)])]
    pending += [rig.submit([StepRow(1, 4, 1, True, [2])])]
    assert not any(step.done() for step in pending), "submit returns before the step has run"
    rig.model.gate.set()
    assert [token for step in pending for token in step.result().token_ids] == expected(prompt, 3)


def test_results_come_in_the_plans_row_order(rig: Rig) -> None:
    prompts = {0: list(range(9)), 1: [4], 2: [8, 8, 8], 3: [1] * 5}
    blocks = {0: [0, 1, 2], 1: [3], 2: [4], 3: [5, 6]}
    rig.submit([StepRow(0, 0, 8, False), StepRow(3, 0, 4, False)], [new(s, prompts[s], blocks[s]) for s in (0, 3)])
    rows = [StepRow(2, 0, 3, True), StepRow(0, 8, 1, True), StepRow(1, 0, 1, True), StepRow(3, 4, 1, False)]
    result = rig.submit(rows, [new(slot, prompts[slot], blocks[slot]) for slot in (1, 2)]).result()
    assert result.token_ids == [expected(prompts[slot], 1)[0] for slot in (2, 0, 1)]
    assert result.failed == {}


def test_a_reused_slot_remembers_nothing(rig: Rig) -> None:
    rig.submit([StepRow(0, 0, 6, True)], [new(0, [9] * 6, [1, 2])])
    rig.submit([StepRow(0, 6, 1, True)])
    first = rig.submit([StepRow(0, 0, 2, True)], [new(0, [5, 6], [3])], freed=[0])
    second = rig.submit([StepRow(0, 2, 1, True)])
    assert first.result().token_ids + second.result().token_ids == expected([5, 6], 2)


def test_copy_on_write_leaves_the_source_alone(rig: Rig) -> None:
    prompt = [2, 4, 6, 8, 10, 12]
    rig.submit([StepRow(0, 0, 6, True)], [new(0, prompt, [1, 2])])
    # A second sequence shares the full block and copies the partial one, then both go on.
    twin = rig.submit(
        [StepRow(0, 6, 1, True), StepRow(1, 5, 2, True)], [new(1, [*prompt, 40], [1, 9])], copies=[(2, 9)]
    )
    assert twin.result().token_ids == [expected(prompt, 2)[1], expected([*prompt, 40], 1)[0]]
    assert rig.pool.slab[2, 0, 0, 0, :, 0].tolist()[:2] == [10.0, 12.0]


def test_a_failing_step_raises_and_the_next_ones_run(rig: Rig) -> None:
    rig.submit([StepRow(0, 0, 2, True)], [new(0, [1, 2], [0])]).result()
    rig.model.error = RuntimeError("out of luck")
    # The failed step's changes to the tables hold: the scheduler has made them too.
    failed = rig.submit([StepRow(0, 2, 1, True), StepRow(1, 0, 3, True)], [new(1, [7, 7, 7], [4])])
    with pytest.raises(RuntimeError, match="out of luck"):
        failed.result()
    again = rig.submit([StepRow(1, 0, 3, True)])
    assert again.result().token_ids == expected([7, 7, 7], 1)
    fresh = rig.submit([StepRow(0, 0, 2, True)], [new(0, [3, 4], [0])], freed=[0])
    assert fresh.result().token_ids == expected([3, 4], 1)


def test_non_finite_logits_fail_their_row_only(rig: Rig) -> None:
    rig.model.poisoned = {13}
    rows = [StepRow(0, 0, 2, True), StepRow(1, 0, 2, True), StepRow(2, 0, 2, True)]
    result = rig.submit(rows, [new(0, [1, 2], [0]), new(1, [13, 2], [1]), new(2, [3, 4], [2])]).result()
    assert list(result.failed) == [1]
    assert "not finite" in result.failed[1]
    assert (result.token_ids[0], result.token_ids[2]) == (3, 7)


def test_a_block_begun_anew_holds_nothing_of_its_former_owner(rig: Rig) -> None:
    rig.pool.slab.fill_(float("nan"))
    rig.submit([StepRow(0, 0, 5, True)], [new(0, [1, 2, 3, 4, 5], [7, 8])]).result()
    assert rig.pool.slab[[7, 8]].isfinite().all()
    assert rig.pool.slab[8, 0, 0, 0, 1:].eq(0).all()


def test_zeroed_blocks_hold_nothing_before_they_are_copied_or_written(rig: Rig) -> None:
    rig.pool.slab.fill_(float("nan"))
    rows = [StepRow(0, 0, 2, True)]
    rig.submit(rows, [new(0, [1, 2], [0])], zeroed=[3, 4], copies=[(3, 5)]).result()
    assert rig.pool.slab[[3, 4, 5]].eq(0).all()
    assert rig.pool.slab[6].isnan().all()


OVERFLOWING = SamplingSpec(seed=2**70, temperature=1.0)
"""Accepted when it is installed, but no tensor can hold it."""


@pytest.mark.parametrize("how", ["install", "prepare"])
def test_sampling_options_that_cannot_be_applied_fail_their_row_only(how: str, rig: Rig) -> None:
    bad = new(1, [4, 5], [1])
    if how == "install":
        bad = NewSequence(1, [4, VOCAB + 1], 1, [1], SamplingSpec(presence_penalty=1.0))
    else:
        bad.sampling = OVERFLOWING
    rows = [StepRow(0, 0, 2, True), StepRow(1, 0, 2, True), StepRow(2, 0, 2, True)]
    first = rig.submit(rows, [new(0, [1, 2], [0]), bad, new(2, [3, 4], [2])])
    second = rig.submit([StepRow(slot, 2, 1, True) for slot in range(3)])
    for step, result in enumerate((first.result(), second.result())):
        assert list(result.failed) == [1]
        assert "the sampling options cannot be applied: " in result.failed[1]
        assert (result.token_ids[0], result.token_ids[2]) == (expected([1, 2], 2)[step], expected([3, 4], 2)[step])
    fresh = rig.submit([StepRow(1, 0, 2, True)], [new(1, [4, 5], [1])], freed=[1]).result()
    assert (fresh.token_ids, fresh.failed) == (expected([4, 5], 1), {})


@pytest.fixture
def core(rig: Rig) -> EngineCore:
    return EngineCore(rig.executor)


def run(core: EngineCore, prompts: dict[int, list[int]], **fields: Any) -> tuple[dict[int, list[int]], dict[int, Any]]:
    """Token ids and errors of requests for four tokens each."""
    for seq_id, prompt in prompts.items():
        core.add(SequenceRequest(seq_id, prompt, 4, **fields.get(str(seq_id), {})))
    outputs: dict[int, list[int]] = {seq_id: [] for seq_id in prompts}
    errors: dict[int, Any] = {}
    while core.has_work:
        for output in core.step():
            outputs[output.seq_id] += output.token_ids
            if output.error is not None:
                errors[output.seq_id] = output.error
        core.scheduler.check()
    assert core.stats().num_used_blocks == 0
    return outputs, errors


PROMPTS = {1: [1, 2, 3], 2: [4, 5, 6, 7, 8], 3: [9, 10, 11], 4: [12, 13, 14]}


def test_a_request_that_the_model_cannot_take_ends_alone(rig: Rig, core: EngineCore) -> None:
    rig.model.bane = {10}
    outputs, errors = run(core, PROMPTS)
    assert list(errors) == [3]
    assert "IndexError: a token that the model cannot take" in str(errors[3])
    assert outputs == {seq_id: expected(prompt, 4) if seq_id != 3 else [] for seq_id, prompt in PROMPTS.items()}


def test_a_request_whose_options_overflow_ends_alone(core: EngineCore) -> None:
    outputs, errors = run(core, PROMPTS, **{"2": {"sampling": OVERFLOWING}})
    assert list(errors) == [2]
    assert outputs == {seq_id: expected(prompt, 4) if seq_id != 2 else [] for seq_id, prompt in PROMPTS.items()}
    assert core.stats().num_failed_steps == 0


def test_steps_that_do_not_fit_into_memory_are_made_smaller(rig: Rig, core: EngineCore) -> None:
    rig.model.max_tokens = 2
    outputs, errors = run(core, PROMPTS)
    assert errors == {}
    assert outputs == {seq_id: expected(prompt, 4) for seq_id, prompt in PROMPTS.items()}


def test_a_request_without_finite_logits_leaves_nothing_behind(rig: Rig, core: EngineCore) -> None:
    rig.model.poisoned = {13}
    prompts = {**PROMPTS, 5: [13, 14, 15, 16, 17, 18]}
    outputs, errors = run(core, prompts)
    assert list(errors) == [4, 5]
    assert all(isinstance(error, NumericError) for error in errors.values())
    assert all(outputs[seq_id] == expected(prompts[seq_id], 4) for seq_id in (1, 2, 3))
    rig.model.poisoned = set()
    assert run(core, {10 + seq_id: prompt for seq_id, prompt in prompts.items()})[1] == {}


def test_a_plan_without_rows_only_frees(rig: Rig) -> None:
    rig.submit([StepRow(0, 0, 2, True)], [new(0, [1, 2], [0])])
    result = rig.submit(freed=[0]).result()
    assert (result.step, result.token_ids, result.failed) == (2, [], {})


def test_a_gap_in_the_plans_is_refused(rig: Rig) -> None:
    rig.submit().result()
    with pytest.raises(InternalError, match="step 5 follows step 1"):
        rig.executor.submit(StepPlan(5, [])).result()


def test_an_unknown_device_is_refused_at_load(tmp_path) -> None:  # type: ignore[no-untyped-def]
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="cuda"):
        load_executor(EngineConfig(model=str(tmp_path), device="cuda"))


def test_deterministic_mode_is_refused_on_a_cpu(tmp_path) -> None:  # type: ignore[no-untyped-def]
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(
        json.dumps({**shape, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 99}), "utf-8"
    )
    with pytest.raises(ConfigError, match="in float32 on cpu results depend on the batch"):
        load_executor(EngineConfig(model=str(tmp_path), device="cpu", deterministic=True))


def test_available_memory_is_plausible() -> None:
    assert 0 < available_memory() < 2**50
