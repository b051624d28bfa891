# SPDX-License-Identifier: Apache-2.0
"""Rank 0's hold on the other ranks of its group: starts them, sends them every plan, and sees them die or stall.

The ranks are one failure unit. A rank is lost when it dies, fails, is silent, falls behind, or draws other tokens than
rank 0; then `on_failure` is called once, from whichever thread found it: an engine process ends there and then,
since its own step may be waiting for the lost rank. Where `on_failure` returns (in the user's process), the remaining
ranks are killed and the exchange between ranks is aborted, so that the step under way fails. Ranks die with the thread
that made this object. Knows no tensors.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from mii_zmq import transport
from mii_zmq.command_line import to_arguments
from mii_zmq.config import EngineConfig
from mii_zmq.errors import InternalError, MiiError, StartupError
from mii_zmq.process import Child, describe_exit, spawn
from mii_zmq.worker.plan import EngineLimits, StepPlan, StepResult
from mii_zmq.worker.plan_channel import encode_invitation, encode_plan, result_digest

SILENCE_S = 10.0
"""A rank beats twice a second whatever it does; one that is silent for so long hangs."""
LATE_S = 10.0
"""A rank that has not finished a step so long after rank 0 did has fallen behind for good."""
MAX_AHEAD = 8
"""Steps that rank 0 may plan beyond what the slowest rank has finished: what it has drawn since is soon compared."""
CONNECT_POLL_S = 0.005
EXIT_CODE_WAIT_S = 1.0
TURN_S = 0.1
MAX_TURN_S = 0.5
"""Time counts against a rank only while the watch itself runs: a machine that slept, or a group that was stopped as a
whole, is no fault of a rank."""

log = logging.getLogger(__name__)
Say = Callable[[str, float], None]


@dataclass(slots=True, eq=False)
class _Rank:
    number: int
    child: Child
    channel: transport.BlockingSocket
    unread: bytes = b""
    has_joined: bool = False
    limits: dict[str, Any] | None = None
    """What it announced when it was ready."""
    progress: tuple[str, float] = ("starting", 0.0)
    done_step: int = 0
    digests: dict[int, int] = field(default_factory=dict)
    """Of steps that rank 0 has not finished yet."""
    silent_s: float = 0.0
    late_s: float = 0.0


class RankGroup:
    """Ranks 1 to n - 1. All methods belong to the thread that made it, except `fail`."""

    def __init__(
        self,
        config: EngineConfig,
        memory_fd: int,
        on_failure: Callable[[MiiError], None],
        *,
        silence_s: float = SILENCE_S,
        late_s: float = LATE_S,
    ) -> None:
        """Starts the ranks, which inherit `memory_fd`; they wait for `join`."""
        self.failure: MiiError | None = None
        self.abort: Callable[[], None] = lambda: None
        """Makes a step under way fail; set by whoever opens the exchange between the ranks."""
        self.release: Callable[[], None] = lambda: None
        """Ends that exchange for good; likewise."""
        self._on_failure = on_failure
        self._silence_s, self._late_s = silence_s, late_s
        self._changed = threading.Condition()
        self._is_serving = self._is_closing = False
        self._done_step = 0
        self._digests: dict[int, int] = {}
        """Of rank 0's steps that some rank has not finished yet."""
        self._context = transport.make_context()
        self._ranks: list[_Rank] = []
        self._watch = threading.Thread(target=self._run_watch, name="rank-watch", daemon=True)
        try:
            for number in range(1, config.tensor_parallel):
                self._ranks.append(self._start(config, number, memory_fd))
        except BaseException:
            self.close()
            raise
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        return [rank.child.pid for rank in self._ranks]

    def join(self, invitation: dict[str, Any]) -> None:
        """Let the ranks join and load; returns when all of them are about to join."""
        frames = encode_invitation(invitation)
        for rank in self._ranks:
            # It connects when it has started; if it never does, it dies, and that ends the waiting.
            while not rank.channel.try_send(frames):
                with self._changed:
                    if self.failure is not None:
                        raise self.failure
                    self._changed.wait(CONNECT_POLL_S)
        self._wait(lambda rank: rank.has_joined, None)

    def wait_ready(self, limits: EngineLimits, say: Say | None = None) -> None:
        """Wait until all ranks are loaded, with the same `limits` as rank 0.

        Raises:
            StartupError: they are not the same.
            MiiError: a rank failed.
        """
        self._wait(lambda rank: rank.limits is not None, say)
        for rank in self._ranks:
            own = json.loads(json.dumps(asdict(limits)))
            differing = [name for name in own if rank.limits is not None and rank.limits.get(name) != own[name]]
            if rank.limits is not None and differing:
                shown = ", ".join(f"{name} {rank.limits.get(name)} instead of {own[name]}" for name in differing)
                raise StartupError(f"rank {rank.number} came up with {shown}; set these explicitly")
        self._is_serving = True

    def send(self, plan: StepPlan) -> None:
        """Give every rank the plan. Raises what ended the group."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or plan.step - self._slowest_step() <= MAX_AHEAD)
            if self.failure is not None:
                raise self.failure
        frames = encode_plan(plan)
        for rank in self._ranks:
            if not rank.channel.try_send(frames):
                with self._changed:
                    # The watch has a better reason, in a moment.
                    self._changed.wait_for(lambda: self.failure is not None, EXIT_CODE_WAIT_S)
                self.fail(InternalError(f"rank {rank.number} takes no plans"))

    def note_result(self, result: StepResult) -> None:
        """Rank 0 has finished a step. Raises InternalError when a rank drew other tokens in it."""
        digest = result_digest(result)
        with self._changed:
            self._done_step = result.step
            self._digests[result.step] = digest
            differing = [rank.number for rank in self._ranks if rank.digests.pop(result.step, digest) != digest]
            self._forget_digests()
        if differing:
            self._diverge(differing[0], result.step)
        if self.failure is not None:
            raise self.failure

    def fail(self, error: MiiError) -> None:
        """End the group, from any thread; the first reason counts."""
        with self._changed:
            if self._is_closing or self.failure is not None:
                return
            self.failure = error
            self._changed.notify_all()
        log.error("%s; the group ends", error.message)
        self._on_failure(error)
        self._kill()
        self.abort()

    def close(self) -> None:
        """End the ranks and wait until they are gone. Idempotent."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
        self.release()
        self._kill()
        if self._watch.is_alive() and self._watch is not threading.current_thread():
            self._watch.join()
        for rank in self._ranks:
            rank.child.kill()
            rank.channel.close(linger_ms=0)
        transport.close_context(self._context)

    def _start(self, config: EngineConfig, number: int, memory_fd: int) -> _Rank:
        pair, endpoint = transport.bind_pair(self._context)
        channel = transport.BlockingSocket(pair)
        arguments = [f"--endpoint={endpoint}", f"--rank={number}", f"--memory-fd={memory_fd}", *to_arguments(config)]
        try:
            child = spawn("mii_zmq.worker.rank_process", arguments, f"rank {number}", pass_fds=(memory_fd,))
        except BaseException:
            channel.close(linger_ms=0)
            raise
        return _Rank(number, child, channel)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.child.is_alive:
                rank.child.process.kill()

    def _wait(self, is_done: Callable[[_Rank], bool], say: Say | None) -> None:
        """Until it holds for every rank; meanwhile tells how far the slowest is."""
        while True:
            with self._changed:
                if self.failure is not None:
                    raise self.failure
                left = [rank for rank in self._ranks if not is_done(rank)]
                if not left:
                    return
                text, fraction = min((rank.progress for rank in left), key=lambda progress: progress[1])
                number = left[0].number
                if say is None:
                    self._changed.wait()
                    continue
                self._changed.wait(1.0)
            say(f"waiting for rank {number}: {text}", fraction)

    def _run_watch(self) -> None:
        try:
            self._watch_ranks()
        except Exception as error:
            log.exception("the watch over the ranks failed")
            self.fail(InternalError(f"the watch over the ranks failed: {type(error).__name__}: {error}"))

    def _watch_ranks(self) -> None:
        by_fd = {rank.child.announce_fd: rank for rank in self._ranks}
        poll = select.poll()
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        last = time.monotonic()
        while not self._is_closing and self.failure is None:
            readable = poll.poll(int(1000 * TURN_S))
            now = time.monotonic()
            elapsed_s, last = min(now - last, MAX_TURN_S), now
            for fd, _ in readable:
                self._read(by_fd[fd])
            if self._is_serving:
                self._check_pace(elapsed_s)

    def _read(self, rank: _Rank) -> None:
        data = os.read(rank.child.announce_fd, 65536)
        if not data:
            self._on_exit(rank)
            return
        rank.silent_s = 0.0
        *lines, rank.unread = (rank.unread + data).split(b"\n")
        self._take(rank, [json.loads(line) for line in lines])

    def _on_exit(self, rank: _Rank) -> None:
        deadline = time.monotonic() + EXIT_CODE_WAIT_S
        while rank.child.is_alive and time.monotonic() < deadline:
            time.sleep(0.002)
        kind = InternalError if self._is_serving else StartupError
        self.fail(kind(f"rank {rank.number} {describe_exit(rank.child)}; its log lines above say more"))

    def _take(self, rank: _Rank, announcements: Iterable[dict[str, Any]]) -> None:
        """Announcements of a rank, in order."""
        for announcement in announcements:
            if "done" in announcement:
                self._on_done(rank, announcement["done"], announcement["digest"])
            elif "error" in announcement:
                kind = InternalError if self._is_serving else StartupError
                self.fail(kind(f"rank {rank.number}: {announcement['error']}"))
            else:
                with self._changed:
                    rank.has_joined |= "joined" in announcement
                    rank.limits = announcement.get("limits", rank.limits)
                    if "progress" in announcement:
                        rank.progress = announcement["progress"], announcement["fraction"]
                    self._changed.notify_all()

    def _on_done(self, rank: _Rank, step: int, digest: int) -> None:
        with self._changed:
            rank.done_step, rank.late_s = step, 0.0
            own = self._digests.get(step)
            if own is None:
                rank.digests[step] = digest
            self._forget_digests()
            self._changed.notify_all()
        if own is not None and own != digest:
            self._diverge(rank.number, step)

    def _slowest_step(self) -> int:
        return min(rank.done_step for rank in self._ranks)

    def _forget_digests(self) -> None:
        slowest = self._slowest_step()
        for step in [step for step in self._digests if step <= slowest]:
            del self._digests[step]

    def _diverge(self, number: int, step: int) -> None:
        self.fail(InternalError(f"rank {number} drew other tokens than rank 0 in step {step}; the ranks diverged"))

    def _check_pace(self, elapsed_s: float) -> None:
        for rank in self._ranks:
            rank.silent_s += elapsed_s
            if rank.silent_s > self._silence_s:
                self.fail(InternalError(f"rank {rank.number} has been silent for {self._silence_s:g} s"))
            # Behind by one step is normal; what counts is not getting on.
            rank.late_s = rank.late_s + elapsed_s if rank.done_step < self._done_step else 0.0
            if rank.late_s > self._late_s:
                self.fail(
                    InternalError(
                        f"rank {rank.number} has not finished step {rank.done_step + 1} for {self._late_s:g} s, and "
                        f"rank 0 has finished step {self._done_step}"
                    )
                )
