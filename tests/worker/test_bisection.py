# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from mii_zmq.worker.bisection import MAX_GUILTY, MAX_UNEXPLAINED, QUIET_STEPS, Bisection
from mii_zmq.worker.sequence import Sequence, SequenceState, make_sequence
from tests.engine_driver import make_limits, make_request

LIMITS = make_limits()


def make(count: int) -> list[Sequence]:
    return [make_sequence(make_request(seq_id, 8), LIMITS, 0.0, seq_id) for seq_id in range(count)]


def ends(*sequences: Sequence, at: int = 8) -> dict[Sequence, int]:
    return dict.fromkeys(sequences, at)


def search(bisection: Bisection, sequences: list[Sequence], culprits: set[int]) -> list[int]:
    """Play the engine until the bout is over; returns who was found, in order."""
    found = [item.seq_id for item in bisection.accuse(ends(*sequences))]
    for _ in range(10 * len(sequences)):
        if bisection.group is None:
            return found
        group = sorted(bisection.group, key=lambda item: item.seq_id)
        if culprits & {item.seq_id for item in group}:
            guilty = bisection.accuse(ends(*group))
            for item in guilty:
                item.state = SequenceState.FINISHED
            found += [item.seq_id for item in guilty]
        else:
            bisection.acquit(ends(*group, at=9))
    raise AssertionError("no end")


def test_every_set_of_culprits_is_found():
    for bits in range(1, 2**6 - 1):
        culprits = {number for number in range(6) if bits >> number & 1}
        bisection = Bisection()
        assert set(search(bisection, make(6), culprits)) == culprits
        assert not bisection.is_active
        assert not bisection.is_hopeless


def test_a_sequence_is_cleared_only_beyond_the_position_where_it_failed():
    bisection, sequences = Bisection(), make(2)
    bisection.accuse(ends(*sequences))
    first = bisection.group
    bisection.acquit(ends(*sequences[:1], at=8))
    assert bisection.group == first
    bisection.acquit(ends(*sequences[:1], at=9))
    assert bisection.group == frozenset(sequences[1:])


def test_members_without_a_row_in_the_failed_step_are_tried_by_themselves():
    bisection, sequences = Bisection(), make(8)
    bisection.accuse(ends(*sequences))
    assert bisection.group == frozenset(sequences[:4])
    bisection.accuse(ends(*sequences[:2]))
    groups = []
    while (group := bisection.group) is not None:
        groups.append(sorted(item.seq_id for item in group))
        bisection.acquit(ends(*group, at=9))
    assert groups == [[0], [1], [2, 3], [4, 5, 6, 7]]


def test_who_ends_otherwise_drops_out():
    bisection, sequences = Bisection(), make(2)
    bisection.accuse(ends(*sequences))
    for item in sequences:
        item.state = SequenceState.FINISHED
    bisection.drop_finished()
    assert not bisection.is_active


def test_bouts_that_clear_everybody_are_counted_until_a_quiet_time():
    bisection = Bisection()
    for _ in range(MAX_UNEXPLAINED - 1):
        assert search(bisection, make(3), set()) == []
    for _ in range(QUIET_STEPS):
        bisection.note_good_step()
    for _ in range(MAX_UNEXPLAINED):
        assert not bisection.is_hopeless
        search(bisection, make(3), set())
    assert bisection.is_hopeless


def test_one_culprit_after_the_other_without_a_good_step_is_the_devices_fault():
    bisection = Bisection()
    for _ in range(MAX_GUILTY):
        assert not bisection.is_hopeless
        assert search(bisection, make(1), {0}) == [0]
    assert bisection.is_hopeless
