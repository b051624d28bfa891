# SPDX-License-Identifier: Apache-2.0
"""An executor that runs every plan on all ranks of a group: rank 0 here, the others in processes of their own.

To the engine core it is an executor like any other. A step that fails on one rank leaves the ranks in different states,
so unlike with a single rank any such failure ends the group. Results are rank 0's; the others draw the same tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict

from mii_zmq.config import EngineConfig
from mii_zmq.errors import InternalError, MiiError
from mii_zmq.worker.fake_options import is_fake_model, make_fake_executor
from mii_zmq.worker.parallel import RankInfo
from mii_zmq.worker.plan import Executor, PendingStep, StepPlan, StepResult
from mii_zmq.worker.rank_group import RankGroup, Say


class RankedPendingStep:
    """A step that runs on all ranks; its result is rank 0's."""

    def __init__(self, step: int, local: PendingStep, group: RankGroup) -> None:
        self._step, self._local, self._group = step, local, group

    def done(self) -> bool:
        return self._local.done()

    def result(self) -> StepResult:
        """Raises what ended the group."""
        try:
            result = self._local.result()
        except Exception as error:
            raise _end(self._group, self._step, error) from error
        self._group.note_result(result)
        return result


class RankedExecutor:
    """Implements `plan.Executor`. Owns both."""

    def __init__(self, local: Executor, group: RankGroup) -> None:
        self.local = local
        self.group = group
        self.limits = local.limits

    def submit(self, plan: StepPlan) -> RankedPendingStep:
        """Raises what ended the group."""
        # The others first: they need longest to hear of it.
        self.group.send(plan)
        try:
            return RankedPendingStep(plan.step, self.local.submit(plan), self.group)
        except Exception as error:
            raise _end(self.group, plan.step, error) from error

    def close(self) -> None:
        self.local.close()
        self.group.close()


def load_ranked_executor(
    config: EngineConfig, say: Say, on_failure: Callable[[MiiError], None]
) -> tuple[RankedExecutor, str]:
    """Start the ranks, load all parts of the model side by side; returns the executor and a word about its memory.

    `on_failure` is called once if the group is lost, from any thread, also while loading.

    Raises:
        StartupError: the model cannot be served; one line says why.
    """
    memory_fd = _make_memory(config)
    try:
        group = RankGroup(config, memory_fd, on_failure)
        try:
            local, memory = _load_rank_0(config, group, memory_fd, say)
            group.wait_ready(local.limits, say)
        except BaseException as error:
            group.close()
            if group.failure is not None and error is not group.failure:
                raise group.failure from error
            raise
    finally:
        os.close(memory_fd)
    return RankedExecutor(local, group), memory


def _make_memory(config: EngineConfig) -> int:
    if is_fake_model(config.model):
        return os.memfd_create("mii_zmq-ranks", os.MFD_CLOEXEC)
    from mii_zmq.worker.memory_collectives import make_memory

    return make_memory(config.tensor_parallel)


def _load_rank_0(config: EngineConfig, group: RankGroup, memory_fd: int, say: Say) -> tuple[Executor, str]:
    if is_fake_model(config.model):
        fake = make_fake_executor(config)
        group.join({})
        return fake, "none"
    # Torch takes seconds to import: not for the test engine.
    from mii_zmq.worker.collectives import STEP_TIMEOUT_S, choose_backend, invite, open_collectives
    from mii_zmq.worker.loading import load_executor

    say("starting ranks", 0.0)
    invitation, listener = invite(choose_backend(config))
    group.join(asdict(invitation))
    rank = RankInfo(0, config.tensor_parallel)
    collectives = open_collectives(invitation, rank, config, memory_fd=memory_fd, listener=listener)
    group.abort, group.release = collectives.abort, collectives.close
    executor = load_executor(config, say, rank, collectives)
    collectives.set_timeout(STEP_TIMEOUT_S)
    return executor, f"{executor.bill} on rank 0 of {config.tensor_parallel}"


def _end(group: RankGroup, step: int, error: Exception) -> MiiError:
    text = " ".join(str(error).split())[:300]
    group.fail(InternalError(f"step {step} failed on rank 0: {type(error).__name__}: {text or 'no message'}"))
    return group.failure or InternalError("the group of ranks was closed")
