# SPDX-License-Identifier: Apache-2.0
"""The forks that compile grammars now, as `compile_queue` says; for the grammar process's loop."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable

from mii_zmq.errors import MiiError, ServiceError
from mii_zmq.worker.compile_queue import CompileQueue
from mii_zmq.worker.grammar_cache import Key
from mii_zmq.worker.grammar_compiler import Compilation
from mii_zmq.worker.grammar_follower import Vocabulary

MAX_RUNNING = 2
"""At the same time; others wait in line."""
TRIAL_S = 0.5
"""For which one more is tried beside them: enough for what is not exceptional, also beside two that use all cores."""

log = logging.getLogger(__name__)


class Compilations:
    """Those that run and those in line."""

    def __init__(
        self, vocabulary_of: Callable[[str], Vocabulary], channel_fd: int, *, timeout_s: float, memory_mb: int,
        trial_s: float = TRIAL_S,
    ) -> None:  # fmt: skip
        """`vocabulary_of`: by kind of grammar. `channel_fd`: the process's own, which no fork may keep open."""
        self._vocabulary_of, self._channel_fd = vocabulary_of, channel_fd
        self._timeout_s, self._memory_mb = timeout_s, memory_mb
        self._queue: CompileQueue[Key] = CompileQueue(MAX_RUNNING, trial_s)
        self._running: dict[Key, Compilation] = {}

    def add(self, tenant: str, key: Key) -> None:
        """A grammar that is not here."""
        self._queue.add(tenant, key, len(key[1]))

    def register(self, poll: select.poll) -> float | None:
        """Have `poll` wait for what happens; until this time on the clock `time.monotonic` at most."""
        for compilation in self._running.values():
            poll.register(compilation.fileno(), select.POLLIN)
        deadlines = [compilation.deadline for compilation in self._running.values()]
        if self._queue.deadline is not None:
            deadlines.append(self._queue.deadline)
        return min(deadlines, default=None)

    def advance(self, is_wanted: Callable[[Key], bool]) -> list[tuple[Key, str | MiiError | None]]:
        """Take what compilations have come to and start the next ones.

        Returns:
            Grammars that are here no more: compiled in the library's JSON form, or why they are not. None: nobody
            wanted it any more when its turn came. A ServiceError says nothing of the grammar.
        """
        outcomes: list[tuple[Key, str | MiiError | None]] = []
        for key, compilation in list(self._running.items()):
            outcome = compilation.outcome()
            if outcome is not None:
                del self._running[key]
                self._queue.end(key)
                outcomes.append((key, outcome))
        # A trial whose turn has come is not overdue.
        self._start(is_wanted, outcomes)
        if (stopped := self._queue.overdue(time.monotonic())) is not None:
            self._running.pop(stopped).kill()
            self._start(is_wanted, outcomes)
        return outcomes

    def close(self) -> None:
        """End all that run."""
        while self._running:
            self._running.popitem()[1].kill()

    def _start(self, is_wanted: Callable[[Key], bool], outcomes: list[tuple[Key, str | MiiError | None]]) -> None:
        while (key := self._queue.next(time.monotonic())) is not None:
            if not is_wanted(key):
                self._queue.end(key)
                outcomes.append((key, None))
                continue
            try:
                self._running[key] = Compilation(
                    self._vocabulary_of(key[0]), *key, timeout_s=self._timeout_s, memory_mb=self._memory_mb,
                    inherited=(self._channel_fd, *(other.fileno() for other in self._running.values())),
                )  # fmt: skip
            except OSError as error:
                log.error("no process to compile a grammar in: %s", error)
                self._queue.end(key)
                reason = "structured_output: this worker has no process to compile the grammar in; try again"
                outcomes.append((key, ServiceError(reason)))
