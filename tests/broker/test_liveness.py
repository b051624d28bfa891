# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from mii_zmq.broker.liveness import Liveness, without


def test_overdue_comes_before_dead() -> None:
    liveness = Liveness(0.5, 6)
    assert not liveness.is_overdue(10.0, 10.5)
    assert liveness.is_overdue(10.0, 10.8)
    assert not liveness.is_dead(10.0, 13.0)
    assert liveness.is_dead(10.0, 13.1)


def test_own_stalls_are_noticed() -> None:
    liveness = Liveness(0.5, 6)
    assert [liveness.stall_s(now) for now in (100.0, 100.1, 101.0, 102.5, 102.6)] == [0.0, 0.0, 0.0, 1.5, 0.0]


def test_a_stall_does_not_count() -> None:
    assert without(60.0, 100.0, 161.0) == 160.0
    assert without(60.0, 160.5, 161.0) == 161.0, "heard after the stall"
    assert without(60.0, 170.0, 161.0) == 170.0, "counted from later on"
