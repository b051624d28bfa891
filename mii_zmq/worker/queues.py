# SPDX-License-Identifier: Apache-2.0
"""Where every unfinished sequence stands, in order: waiting, parked, prefilling, decoding, draining or without a mask.

Moves sequences between those places and keeps `state` and `in_prefill` in step with them; a sequence is in exactly one
of them. Knows neither blocks nor budgets, and decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mii_zmq.errors import InternalError
from mii_zmq.worker.sequence import Sequence, SequenceState


class SequenceQueue:
    """Sequences sorted by a key that must not change while they are in it. O(log n) plus one memory move."""

    __slots__ = ("_items", "_key")

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        self._key = key
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Sequence:
        return self._items[index]

    def add(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, self._key(sequence), key=self._key)
        if index == len(self._items) or self._items[index] is not sequence:
            raise InternalError(f"sequence {sequence.seq_id} is not in the queue it should be in")
        del self._items[index]

    def clear(self) -> None:
        self._items.clear()


class Queues:
    """The sequences of one engine by what they are at."""

    def __init__(self) -> None:
        self.waiting = SequenceQueue(lambda sequence: sequence.order_key)
        self.waiting_by_size = SequenceQueue(lambda sequence: (sequence.num_expected_tokens, sequence.order_key))
        """The same sequences."""
        self.parked: set[Sequence] = set()
        """Preempted with a token in flight; they wait in line when it is known."""
        self.prefilling = SequenceQueue(lambda sequence: sequence.order_key)
        self.decoding = SequenceQueue(lambda sequence: sequence.order_key)
        self.draining: set[Sequence] = set()
        """Running with every token planned; they end when the last result is read."""
        self.held: set[Sequence] = set()
        """Waiting for the end of a restriction."""
        self.unmasked: set[Sequence] = set()
        """They wait in line when their mask is known."""
        self.awaiting = SequenceQueue(lambda sequence: sequence.order_key)
        """Running, with a grammar and their next token planned or known: they decode when the mask behind it is."""
        self._allowed: frozenset[Sequence] | None = None

    def restrict(self, allowed: frozenset[Sequence] | None) -> None:
        """Until further notice only these may start; None: everybody."""
        self._allowed = allowed
        sequences = [*self.waiting, *self.held]
        for queue in (self.waiting, self.waiting_by_size, self.held):
            queue.clear()
        for sequence in sequences:
            self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """In line, held, or until there is a mask; `num_expected_tokens` is set."""
        if sequence.lacks_mask:
            self.unmasked.add(sequence)
            return
        if self._allowed is not None and sequence not in self._allowed:
            self.held.add(sequence)
            return
        self.waiting.add(sequence)
        self.waiting_by_size.add(sequence)

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence got its place and starts on its known tokens."""
        self.waiting.remove(sequence)
        self.waiting_by_size.remove(sequence)
        sequence.state = SequenceState.RUNNING
        sequence.in_prefill = True
        self.prefilling.add(sequence)

    def end_prefill(self, sequence: Sequence) -> None:
        """All known tokens are planned, and so is the draw of the next one, if one is drawn, which `num_in_flight`
        counts."""
        self.prefilling.remove(sequence)
        sequence.in_prefill = False
        if sequence.num_tokens >= sequence.max_tokens:
            self.draining.add(sequence)
        elif sequence.has_grammar:
            sequence.is_awaiting_mask = True
            self.awaiting.add(sequence)
        else:
            self.decoding.add(sequence)

    def await_mask(self, sequence: Sequence) -> None:
        """A token of a decoding sequence with a grammar is planned."""
        self.decoding.remove(sequence)
        sequence.is_awaiting_mask = True
        self.awaiting.add(sequence)

    def end_await(self, sequence: Sequence) -> None:
        """The mask of a running sequence has come."""
        self.awaiting.remove(sequence)
        sequence.is_awaiting_mask = False
        self.decoding.add(sequence)

    def drain(self, sequence: Sequence) -> None:
        """The last token of a decoding sequence is planned."""
        self.decoding.remove(sequence)
        self.draining.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Out of wherever it is."""
        if sequence.state is SequenceState.WAITING:
            if sequence in self.parked:
                self.parked.remove(sequence)
            elif sequence in self.held:
                self.held.remove(sequence)
            elif sequence in self.unmasked:
                self.unmasked.remove(sequence)
            else:
                self.waiting.remove(sequence)
                self.waiting_by_size.remove(sequence)
        elif sequence in self.draining:
            self.draining.remove(sequence)
        elif sequence.is_awaiting_mask:
            self.awaiting.remove(sequence)
        else:
            (self.prefilling if sequence.in_prefill else self.decoding).remove(sequence)
        sequence.in_prefill = sequence.is_awaiting_mask = False

    def clear(self) -> None:
        for queue in (self.waiting, self.waiting_by_size, self.prefilling, self.decoding, self.awaiting):
            queue.clear()
        for members in (self.parked, self.draining, self.held, self.unmasked):
            members.clear()
        self._allowed = None

    @property
    def running(self) -> list[Sequence]:
        return [*self.prefilling, *self.decoding, *self.awaiting, *self.draining]

    @property
    def newest_running(self) -> Sequence:
        """The least urgent sequence that runs and has tokens left to plan; there must be one."""
        queues = [queue for queue in (self.decoding, self.prefilling, self.awaiting) if queue]
        return max((queue[-1] for queue in queues), key=lambda sequence: sequence.order_key)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Verify that these are the sequences and that each is in one place, the right one.

        Raises:
            InternalError: with the first violation found.
        """
        waiting, running = [*self.waiting, *self.parked, *self.held, *self.unmasked], self.running
        if Counter(waiting + running) != Counter(sequences):
            raise InternalError("the queues and the table of sequences differ")
        if set(self.waiting) != set(self.waiting_by_size):
            raise InternalError("the two waiting queues differ")
        for expected, members in ((SequenceState.WAITING, waiting), (SequenceState.RUNNING, running)):
            for sequence in members:
                if sequence.state is not expected or (expected is SequenceState.WAITING and sequence.block_ids):
                    raise InternalError(f"sequence {sequence.seq_id} is {sequence.state.value} in the wrong queue")
        for sequence in (*self.waiting, *self.held, *self.prefilling, *self.decoding):
            if sequence.lacks_mask:
                raise InternalError(f"sequence {sequence.seq_id} has no mask, yet may have its next token planned")
