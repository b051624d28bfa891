# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from mii_zmq.broker.liveness import Liveness


def test_overdue_comes_before_dead() -> None:
    liveness = Liveness(0.5, 6)
    assert not liveness.is_overdue(10.0, 10.5)
    assert liveness.is_overdue(10.0, 10.8)
    assert not liveness.is_dead(10.0, 13.0)
    assert liveness.is_dead(10.0, 13.1)


def test_own_stalls_are_noticed() -> None:
    liveness = Liveness(0.5, 6)
    assert [liveness.was_stalled(now) for now in (100.0, 100.1, 101.0, 102.5, 102.6)] == [
        False,
        False,
        False,
        True,
        False,
    ]
