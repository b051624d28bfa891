# SPDX-License-Identifier: Apache-2.0
"""Which grammar is compiled next. Pure: keys and times in, keys out.

Tenants take turns, so that one with many slow grammars delays only its own, and within a tenant who came first is
first. Some grammars take seconds, and most take less than a moment, which nobody knows before. So there is one place
more beside those in turn, for trials: the shortest text that has had none is compiled there, for a moment at most.
If that was enough, it did not have to wait for others' seconds; otherwise it waits for its turn, at the place that it
has kept, so that nobody waits longer for others' trials.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class CompileQueue(Generic[K]):
    """Keys from when they come until they end; each is here once."""

    def __init__(self, max_running: int, trial_s: float) -> None:
        """`max_running`: at the same time, beside the trial."""
        self.max_running, self._trial_s = max_running, trial_s
        self._running: set[K] = set()
        self._tenants: dict[K, str] = {}
        """Of those in line."""
        self._line: OrderedDict[str, dict[K, int]] = OrderedDict()
        """By tenant, in the order of turns: keys in the order in which they came, with their sizes."""
        self._untried: OrderedDict[str, dict[K, int]] = OrderedDict()
        """Those of them that have had no trial, with tenants in the order of turns at that."""
        self.trial: K | None = None
        """Is tried now; it stands in line as well."""
        self._trial_until = 0.0

    @property
    def deadline(self) -> float | None:
        """When the trial is over, if there is one."""
        return None if self.trial is None else self._trial_until

    def add(self, tenant: str, key: K, size: int) -> None:
        """Behind the tenant's others; a tenant that has none gets the last turn. `size`: of its text."""
        self._tenants[key] = tenant
        self._line.setdefault(tenant, {})[key] = size
        self._untried.setdefault(tenant, {})[key] = size

    def next(self, now: float) -> K | None:
        """A key to be started now; None: nothing more. A trial whose turn has come goes on without its limit."""
        while self._line and len(self._running) < self.max_running:
            tenant, keys = self._line.popitem(last=False)
            key = next(iter(keys))
            self._line[tenant] = keys
            self._leave_line(key)
            self._running.add(key)
            if key != self.trial:
                return key
            self.trial = None
        if self.trial is None and self._untried:
            tenant, keys = self._untried.popitem(last=False)
            key = min(keys, key=keys.__getitem__)
            self._untried[tenant] = keys
            self._take_out(self._untried, tenant, key)
            self.trial, self._trial_until = key, now + self._trial_s
            return key
        return None

    def overdue(self, now: float) -> K | None:
        """The key whose trial has to be stopped now, if it is time."""
        if self.trial is None or now < self._trial_until:
            return None
        key, self.trial = self.trial, None
        return key

    def end(self, key: K) -> None:
        """It is compiled, refused or not wanted any more, wherever it was."""
        self._running.discard(key)
        if key in self._tenants:
            self._leave_line(key)
        if key == self.trial:
            self.trial = None

    def _leave_line(self, key: K) -> None:
        tenant = self._tenants.pop(key)
        self._take_out(self._line, tenant, key)
        self._take_out(self._untried, tenant, key)

    @staticmethod
    def _take_out(lines: OrderedDict[str, dict[K, int]], tenant: str, key: K) -> None:
        keys = lines.get(tenant)
        if keys is not None:
            keys.pop(key, None)
            if not keys:
                del lines[tenant]
