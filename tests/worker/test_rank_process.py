# SPDX-License-Identifier: Apache-2.0
"""The process of a further rank, with the test in the place of rank 0."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from mii_zmq import transport
from mii_zmq.process import Child, spawn
from mii_zmq.worker.plan import NewSequence, SamplingSpec, StepPlan, StepResult, StepRow
from mii_zmq.worker.plan_channel import encode_invitation, encode_plan, result_digest
from tests.worker.scripted_broker import open_context

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0


class RankZero:
    """The sending end, and the rank at the other."""

    def __init__(self, channel: transport.BlockingSocket, child: Child) -> None:
        self.channel = channel
        self.child = child
        self._announcements = child.announcements(PATIENCE_S)

    def send(self, plan: StepPlan) -> None:
        self.channel.send(encode_plan(plan))

    def next(self) -> dict[str, Any]:
        """The next announcement other than a beat."""
        return next(item for item in self._announcements if "beat" not in item)

    def is_silent(self) -> bool:
        return next(self._announcements, None) is None


@contextlib.contextmanager
def rank_process(*arguments: str) -> Iterator[RankZero]:
    memory_fd = os.memfd_create("test", os.MFD_CLOEXEC)
    with open_context() as context:
        pair, endpoint = transport.bind_pair(context)
        channel = transport.BlockingSocket(pair)
        options = [f"--endpoint={endpoint}", "--rank=1", f"--memory-fd={memory_fd}", "--tensor-parallel=2", *arguments]
        child = spawn("mii_zmq.worker.rank_process", options, "rank 1", pass_fds=(memory_fd,))
        os.close(memory_fd)
        try:
            yield RankZero(channel, child)
        finally:
            child.kill()
            channel.close(0)


def first_plan() -> StepPlan:
    new = NewSequence(0, list(b"hello"), 5, [3], SamplingSpec())
    return StepPlan(1, [StepRow(0, 0, 5, True)], new=[new])


def join(rank: RankZero) -> dict[str, Any]:
    rank.channel.send(encode_invitation({}))
    assert rank.next() == {"joined": True}
    return rank.next()


def test_runs_plans_and_acknowledges_them() -> None:
    with rank_process("--model=fake:num_blocks=8") as rank:
        ready = join(rank)
        assert ready["ready"]
        assert ready["limits"]["num_blocks"] == 8
        rank.send(first_plan())
        first = rank.next()
        assert first["done"] == 1
        # The token that it drew is known only to the executor; its digest is that of some single token.
        assert first["digest"] in {result_digest(StepResult(1, [token_id])) for token_id in range(257)}
        for step in (2, 3, 4):
            rank.send(StepPlan(step, [StepRow(0, 3 + step, 1, True)]))
        assert [rank.next()["done"] for _ in range(3)] == [2, 3, 4]
        rank.send(StepPlan(5, [], freed_slots=[0]))
        assert "step 5" in rank.next()["error"], "the fake engine refuses an empty step"
        assert rank.child.process.wait(PATIENCE_S) == 1


@pytest.mark.parametrize("step", [1, 3])
def test_a_gap_or_a_repetition_is_fatal(step: int) -> None:
    with rank_process("--model=fake:") as rank:
        join(rank)
        rank.send(first_plan())
        assert rank.next()["done"] == 1
        rank.send(StepPlan(step, [StepRow(0, 5, 1, True)]))
        assert f"plan {step} follows plan 1" in rank.next()["error"]
        assert rank.child.process.wait(PATIENCE_S) == 1


def test_what_cannot_be_loaded_is_told() -> None:
    with rank_process("--model=fake:rank_step_ms=soon") as rank:
        assert "step_ms of the fake model is 'soon'" in join(rank)["error"]
        assert rank.child.process.wait(PATIENCE_S) == 1


def test_garbage_ends_the_rank() -> None:
    with rank_process("--model=fake:") as rank:
        join(rank)
        rank.channel.send([b"P", b"\xc1"])
        assert "does not decode" in rank.next()["error"]
        assert rank.child.process.wait(PATIENCE_S) == 1


def test_beats_while_idle_and_while_a_step_runs() -> None:
    with rank_process("--model=fake:step_ms=2500") as rank:
        join(rank)
        announcements = rank.child.announcements(PATIENCE_S)
        assert next(announcements) == {"beat": True}
        rank.send(first_plan())
        seen = [next(announcements)]
        while "done" not in seen[-1]:
            seen.append(next(announcements))
        assert seen.count({"beat": True}) >= 2


def test_dies_with_rank_0() -> None:
    with rank_process("--model=fake:") as rank:
        join(rank)
        rank.child.close()
        assert rank.child.process.wait(PATIENCE_S) == 1
