# SPDX-License-Identifier: Apache-2.0
"""Which sequence makes steps fail: those of a failed step run again in ever smaller groups until it is known.

A sequence is cleared when it has got beyond the position at which it failed, and is guilty when it failed twice on its
own while others did well, or while all others did so too. Every accusation halves a group or counts against one
sequence, so a bout ends. Pure: runs nothing; the scheduler lets nobody but `group` run and reports what happens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from mii_zmq.worker.sequence import Sequence

MAX_FAILURES_ALONE = 2
"""The first one may have been chance."""
MAX_UNEXPLAINED = 3
"""Bouts in turn that cleared everybody say that the device is to blame."""
MAX_GUILTY = 3
"""So many sequences in turn that fail, without one good step of anybody, say so too."""
QUIET_STEPS = 100
"""Good steps after which an unexplained bout is forgotten."""


class Bisection:
    """One bout after the other; in between `group` is None and everybody may run."""

    def __init__(self) -> None:
        self._num_unexplained = 0
        self._num_guilty = 0
        """Since the last good step."""
        self._groups: deque[list[Sequence]] = deque()
        """The first one runs now."""
        self._targets: dict[Sequence, int] = {}
        """Position up to which a sequence was to be computed when it failed."""
        self._failures_alone: Counter[Sequence] = Counter()
        self._has_good_step = self._has_culprit = False
        self._num_quiet_steps = 0

    @property
    def is_active(self) -> bool:
        return bool(self._groups)

    @property
    def is_hopeless(self) -> bool:
        """It does not seem to be the sequences that make steps fail."""
        return self._num_unexplained >= MAX_UNEXPLAINED or self._num_guilty >= MAX_GUILTY

    @property
    def group(self) -> frozenset[Sequence] | None:
        """Who may run; None: everybody."""
        return frozenset(self._groups[0]) if self._groups else None

    def accuse(self, ends: dict[Sequence, int]) -> list[Sequence]:
        """A step with rows of these failed, each of which was to end at that position. Returns who is guilty."""
        for sequence, end in ends.items():
            self._targets[sequence] = max(end, self._targets.get(sequence, 0))
        self._keep(lambda sequence: sequence not in ends)
        accused = list(ends)
        if len(accused) > 1:
            middle = len(accused) // 2
            self._groups.extendleft((accused[middle:], accused[:middle]))
            return []
        guilty = [sequence for sequence in accused if self._is_guilty(sequence)]
        if guilty:
            self._has_culprit = True
            if not self._has_good_step:
                self._num_guilty += 1
        elif accused:
            self._groups.append(accused)
        self._end_if_done()
        return guilty

    def acquit(self, ends: dict[Sequence, int]) -> None:
        """A step with rows of these went well, each of which ended at that position."""
        self._has_good_step = True
        self._num_guilty = 0
        self._keep(lambda sequence: ends.get(sequence, 0) <= self._targets[sequence])
        self._end_if_done()

    def drop_finished(self) -> None:
        """Members may have been cancelled."""
        self._keep(lambda sequence: True)
        self._end_if_done()

    def note_good_step(self) -> None:
        """A step between two bouts went well."""
        self._num_guilty = 0
        self._num_quiet_steps += 1
        if self._num_quiet_steps >= QUIET_STEPS:
            self._num_quiet_steps = self._num_unexplained = 0

    def reset(self) -> None:
        """Forget the bout."""
        self._groups.clear()
        self._end_bout()

    def _is_guilty(self, sequence: Sequence) -> bool:
        self._failures_alone[sequence] += 1
        if self._failures_alone[sequence] < MAX_FAILURES_ALONE:
            return False
        return self._has_good_step or all(
            self._failures_alone[other] >= MAX_FAILURES_ALONE for group in self._groups for other in group
        )

    def _keep(self, is_kept: Callable[[Sequence], bool]) -> None:
        groups = [[s for s in group if not s.is_finished and is_kept(s)] for group in self._groups]
        self._groups = deque(group for group in groups if group)

    def _end_if_done(self) -> None:
        if not self._groups and self._targets:
            self._num_unexplained = 0 if self._has_culprit else self._num_unexplained + 1
            self._end_bout()

    def _end_bout(self) -> None:
        self._targets.clear()
        self._failures_alone.clear()
        self._has_good_step = self._has_culprit = False
        self._num_quiet_steps = 0
