# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mii_zmq.errors import InternalError
from mii_zmq.worker.queues import Queues, SequenceQueue
from mii_zmq.worker.sequence import Sequence, SequenceState, make_sequence
from tests.engine_driver import make_limits, make_request


def make(number: int = 0, now: float = 0.0, max_new_tokens: int = 4) -> Sequence:
    return make_sequence(make_request(number, 3, max_new_tokens), make_limits(), now, number)


def test_queue_keeps_order_and_refuses_to_remove_strangers():
    queue = SequenceQueue(lambda sequence: sequence.order_key)
    sequences = [make(now=float(now)) for now in (3, 1, 2)]
    for sequence in sequences:
        queue.add(sequence)
    assert [sequence.arrival for sequence in queue] == [1.0, 2.0, 3.0]
    queue.remove(sequences[2])
    assert [sequence.arrival for sequence in queue] == [1.0, 3.0]
    with pytest.raises(InternalError, match="not in the queue"):
        queue.remove(sequences[2])
    assert len(queue) == 2
    assert queue[0] is sequences[1]


def test_a_sequence_is_in_one_place_at_a_time():
    queues, sequence = Queues(), make()
    queues.wait(sequence)
    queues.check([sequence])
    queues.start(sequence)
    assert (list(queues.waiting), list(queues.waiting_by_size), queues.running) == ([], [], [sequence])
    queues.check([sequence])
    sequence.num_in_flight = 1
    queues.end_prefill(sequence)
    assert (list(queues.prefilling), list(queues.decoding)) == ([], [sequence])
    queues.drain(sequence)
    assert (list(queues.decoding), queues.draining) == ([], {sequence})
    queues.check([sequence])
    queues.remove(sequence)
    queues.check([])


def test_a_prompt_with_one_output_token_drains_at_once():
    queues, sequence = Queues(), make(max_new_tokens=1)
    queues.wait(sequence)
    queues.start(sequence)
    sequence.num_in_flight = 1
    queues.end_prefill(sequence)
    assert queues.draining == {sequence}


def test_sequences_are_removed_from_wherever_they_are():
    queues, parked, waiting, prefilling = Queues(), make(1), make(2), make(3)
    queues.parked.add(parked)
    for sequence in (waiting, prefilling):
        queues.wait(sequence)
    queues.start(prefilling)
    queues.check([parked, waiting, prefilling])
    for sequence in (parked, waiting, prefilling):
        queues.remove(sequence)
    queues.check([])
    assert not prefilling.in_prefill


def test_check_finds_what_is_lost_or_misplaced():
    queues, sequence = Queues(), make()
    queues.wait(sequence)
    with pytest.raises(InternalError, match="the queues and the table of sequences differ"):
        queues.check([])
    sequence.state = SequenceState.RUNNING
    with pytest.raises(InternalError, match="sequence 0 is running in the wrong queue"):
        queues.check([sequence])
    queues.waiting_by_size.clear()
    with pytest.raises(InternalError, match="two waiting queues"):
        queues.check([sequence])
    queues.clear()
    queues.check([])
