# SPDX-License-Identifier: Apache-2.0
"""Drives an EngineCore around the fake executor and checks what must hold after every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.fake import FakeExecutor, FakePendingStep
from mii_zmq.worker.fake_model import EOS_TOKEN_ID, VOCAB_SIZE, FakeModel
from mii_zmq.worker.plan import EngineLimits, SamplingSpec, SequenceRequest, StepPlan


def make_limits(**fields: Any) -> EngineLimits:
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 512,
        "num_blocks": 64,
        "block_size": 4,
        "max_sequences": 8,
        "token_budget": 32,
        "eos_token_ids": (EOS_TOKEN_ID,),
    }
    return EngineLimits(**{**values, **fields})


def make_request(seq_id: int, prompt: list[int] | int, max_new_tokens: int = 4, **fields: Any) -> SequenceRequest:
    """`prompt` as a number: that many tokens that depend on `seq_id`."""
    if isinstance(prompt, int):
        prompt = [(seq_id * 31 + position * 7) % 256 for position in range(prompt)]
    fields.setdefault("sampling", SamplingSpec(stop_token_ids=(EOS_TOKEN_ID,)))
    return SequenceRequest(seq_id, prompt, max_new_tokens, **fields)


class Clock:
    """Monotonic seconds that move only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class RecordingExecutor(FakeExecutor):
    """Keeps every plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> FakePendingStep:
        pending = super().submit(plan)
        self.plans.append(plan)
        return pending


@dataclass
class Driver:
    """An engine, the requests it was given, and what came back."""

    core: EngineCore
    executor: RecordingExecutor
    clock: Clock
    requests: dict[int, SequenceRequest] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str | None] = field(default_factory=dict)
    num_cached_tokens: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0

    def add(self, *requests: SequenceRequest) -> None:
        for request in requests:
            self.core.add(request)
            self.requests[request.seq_id] = request
            self.outputs[request.seq_id] = []

    def step(self) -> None:
        for output in self.core.step():
            assert output.seq_id not in self.reasons, f"sequence {output.seq_id} goes on after its end"
            if not self.outputs[output.seq_id]:
                self.num_cached_tokens[output.seq_id] = output.num_cached_tokens
            self.outputs[output.seq_id] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[output.seq_id] = output.finish_reason
                self.errors[output.seq_id] = output.error
        self.num_steps += 1
        self.core.scheduler.check()

    def run(self, max_steps: int = 20_000) -> None:
        """Until idle; then nothing may be left anywhere."""
        while self.core.has_work:
            self.step()
            assert self.num_steps < max_steps, f"no end after {max_steps} steps: {self.core.stats()}"
        assert self.executor.violations == []
        assert self.reasons.keys() == self.requests.keys()
        stats = self.core.stats()
        assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.num_outstanding_tokens == 0

    def check_outputs(self) -> None:
        """Completed sequences equal their solo run, others a beginning of it."""
        for seq_id, request in self.requests.items():
            expected = self.executor.model.generate(request)
            found = self.outputs[seq_id]
            if self.reasons[seq_id] in ("stop", "length"):
                assert found == expected
                all_tokens = request.resumed_token_ids + found
                is_stop = bool(all_tokens) and all_tokens[-1] in request.sampling.stop_token_ids
                assert self.reasons[seq_id] == ("stop" if is_stop else "length")
            else:
                assert found == expected[: len(found)]


def make_driver(limits: EngineLimits | None = None, model: FakeModel | None = None, **core_options: Any) -> Driver:
    clock = Clock()
    executor = RecordingExecutor(limits or make_limits(), model, clock=clock)
    return Driver(EngineCore(executor, model="test", clock=clock, **core_options), executor, clock)
