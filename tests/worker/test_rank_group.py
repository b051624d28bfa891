# SPDX-License-Identifier: Apache-2.0
"""A group of ranks around the fake engine: rank 0 in this process, the others in real ones."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mii_zmq.config import EngineConfig
from mii_zmq.errors import ConfigError, InternalError, MiiError, StartupError
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.fake_faults import Faults
from mii_zmq.worker.fake_model import FakeModel
from mii_zmq.worker.fake_options import make_fake_executor
from mii_zmq.worker.plan import SamplingSpec, SequenceRequest
from mii_zmq.worker.rank_group import MAX_AHEAD, RankGroup
from mii_zmq.worker.ranked_executor import RankedExecutor, load_ranked_executor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("run_directory")]

PATIENCE_S = 60.0


class Group:
    """A core over a ranked executor, and what was said about its end."""

    def __init__(self, options: str, size: int, **deadlines: float) -> None:
        config = EngineConfig(model=f"fake:{options}", tensor_parallel=size)
        self.failures: queue.SimpleQueue[MiiError] = queue.SimpleQueue()
        memory_fd = os.memfd_create("test", os.MFD_CLOEXEC)
        self.ranks = RankGroup(config, memory_fd, self.failures.put, **deadlines)
        os.close(memory_fd)
        self.local = make_fake_executor(config)
        try:
            self.ranks.join({})
            self.ranks.wait_ready(self.local.limits)
        except BaseException:
            self.ranks.close()
            raise
        self.executor = RankedExecutor(self.local, self.ranks)
        self.core = EngineCore(self.executor)

    def generate(self, seq_id: int = 1, max_new_tokens: int = 30) -> list[int]:
        """Run one request to its end."""
        self.core.add(request(seq_id, max_new_tokens))
        found: list[int] = []
        while True:
            for output in self.core.step():
                found += output.token_ids
                if output.finish_reason is not None:
                    assert output.finish_reason == "length", output
                    return found

    def run_until_failure(self) -> MiiError:
        """Keep the group busy until it ends."""
        self.core.add(request(1, 4000))
        with contextlib.suppress(MiiError):
            while self.ranks.failure is None:
                self.core.step()
        return self.failures.get(timeout=PATIENCE_S)


def request(seq_id: int, max_new_tokens: int) -> SequenceRequest:
    return SequenceRequest(seq_id, list(b"hello %d" % seq_id), max_new_tokens, SamplingSpec())


@contextlib.contextmanager
def group(options: str = "step_ms=1", size: int = 2, **deadlines: float) -> Iterator[Group]:
    made = Group(options, size, **deadlines)
    try:
        yield made
    finally:
        made.executor.close()
        assert not any(is_running(pid) for pid in made.ranks.pids)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_ranks_run_what_rank_0_runs(run_directory: Path) -> None:
    with group(size=3) as made:
        assert list(run_directory.iterdir()) == [], "a killed group could not delete it"
        for seq_id in range(1, 6):
            assert made.generate(seq_id) == FakeModel().generate(request(seq_id, 30))
        assert made.failures.empty()
        assert made.local.violations == []


def test_many_sequences_with_preemption_draw_alike() -> None:
    """A pool far too small for all: plans carry frees, copies and recomputation."""
    with group("num_blocks=12,block_size=4,token_budget=16,max_sequences=6") as made:
        requests = [request(seq_id, 20) for seq_id in range(1, 13)]
        for item in requests:
            made.core.add(item)
        found: dict[int, list[int]] = {item.seq_id: [] for item in requests}
        while made.core.has_work:
            for output in made.core.step():
                found[output.seq_id] += output.token_ids
        assert found == {item.seq_id: FakeModel().generate(item) for item in requests}
        assert made.core.stats().num_preemptions > 0
        assert made.ranks.failure is None


def test_a_killed_rank_ends_the_group_at_once() -> None:
    with group(size=3) as made:
        made.generate()
        threading.Timer(0.05, os.kill, (made.ranks.pids[1], signal.SIGKILL)).start()
        assert "rank 2 was killed by SIGKILL" in made.run_until_failure().message
        assert made.failures.empty()
        with pytest.raises(InternalError, match="SIGKILL"):
            made.executor.submit(None)  # type: ignore[arg-type]


def test_a_rank_that_dies_while_idle_is_noticed() -> None:
    with group() as made:
        os.kill(made.ranks.pids[0], signal.SIGKILL)
        assert "SIGKILL" in made.failures.get(timeout=PATIENCE_S).message


def test_a_stopped_rank_is_silent() -> None:
    with group(silence_s=2.0) as made:
        made.generate()
        os.kill(made.ranks.pids[0], signal.SIGSTOP)
        assert "rank 1 has been silent for 2 s" in made.failures.get(timeout=PATIENCE_S).message


def test_a_slow_rank_is_late() -> None:
    with group("rank_step_ms=60000", late_s=0.3) as made:
        assert "rank 1 has not finished step 1 for 0.3 s" in made.run_until_failure().message


def test_rank_0_does_not_run_away_from_the_others() -> None:
    with group("rank_step_ms=30") as made:
        made.core.add(request(1, 40))
        while made.core.has_work:
            made.core.step()
            assert made.core.stats().step <= made.ranks._slowest_step() + MAX_AHEAD + 1


def test_ranks_that_draw_other_tokens_are_found() -> None:
    with group("rank_alphabet=digits") as made:
        assert "rank 1 drew other tokens than rank 0 in step 1" in made.run_until_failure().message
        assert made.core.stats().step <= MAX_AHEAD + 2


def test_a_step_that_fails_on_rank_0_ends_the_group() -> None:
    with group() as made:
        made.local.faults = Faults(steps={3: ValueError("boom")})
        assert "step 3 failed on rank 0: ValueError: boom" in made.run_until_failure().message


def test_other_limits_are_refused() -> None:
    with pytest.raises(StartupError, match="rank 1 came up with num_blocks 7 instead of 9; set these explicitly"):
        Group("num_blocks=9,rank_num_blocks=7", 2)


def test_a_rank_that_cannot_load_says_why() -> None:
    with pytest.raises(StartupError, match="rank 1: option step_ms of the fake model is 'soon'"):
        Group("rank_step_ms=soon", 2)


def test_loading_together(run_directory: Path) -> None:
    said: list[Any] = []
    config = EngineConfig(model="fake:", tensor_parallel=2)
    executor, memory = load_ranked_executor(config, lambda *words: said.append(words), said.append)
    pids = executor.group.pids
    assert memory == "none"
    executor.close()
    assert not any(is_running(pid) for pid in pids)
    with pytest.raises(ConfigError, match="colour"):
        load_ranked_executor(replace(config, model="fake:colour=red"), lambda *words: None, said.append)
    assert list(run_directory.iterdir()) == []
