# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mii_zmq.worker.watchdog import MAX_TURN_S, WARM_UP_STEPS, Watchdog

WARM = WARM_UP_STEPS + 1


class Watch:
    """A watchdog in time that passes in turns."""

    def __init__(self, step_timeout_s: float = 3.0) -> None:
        self.watchdog = Watchdog(step_timeout_s)
        self.now = 100.0
        self.watchdog.tick(self.now, False)

    def wait(self, seconds: float, *, has_requests: bool = False) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.watchdog.tick(self.now, has_requests)

    def report(self, step: int, *, is_busy: bool = True, has_rows: bool = False) -> None:
        self.watchdog.on_report(step, is_busy, has_rows, self.now)

    @property
    def state(self) -> str:
        return "hung" if self.watchdog.is_hung else "stalled" if self.watchdog.is_stalled else "fine"


def test_a_step_in_flight_for_too_long_is_first_stalled_then_hung():
    watch = Watch()
    watch.report(WARM)
    watch.wait(1.0)
    assert watch.state == "fine"
    watch.wait(2.0)
    assert watch.state == "stalled"
    watch.wait(0.5)
    assert watch.state == "hung"


def test_an_engine_that_gets_on_is_fine_again():
    watch = Watch()
    watch.report(WARM)
    watch.wait(2.0)
    assert watch.state == "stalled"
    watch.report(WARM + 1)
    assert watch.state == "fine"


def test_reports_without_a_new_step_do_not_help_a_busy_engine():
    watch = Watch()
    watch.report(WARM)
    for _ in range(7):
        watch.wait(0.5)
        watch.report(WARM)
    assert watch.state == "hung"
    watch.report(WARM, has_rows=True)
    assert watch.state == "fine"


@pytest.mark.parametrize(("step_timeout_s", "limit_s"), [(0.5, 3.0), (5.0, 5.0), (30.0, 10.0)])
def test_an_idle_engine_must_report(step_timeout_s: float, limit_s: float):
    watch = Watch(step_timeout_s)
    watch.report(0, is_busy=False)
    watch.wait(limit_s)
    assert watch.state == "stalled"
    watch.report(0, is_busy=False)
    assert watch.state == "fine"
    watch.wait(limit_s + 0.5)
    assert watch.state == "hung"


def test_the_first_steps_may_take_longer():
    watch = Watch()
    watch.report(1)
    watch.wait(1.5)
    assert watch.state == "stalled", "but nobody vouches for the engine meanwhile"
    watch.wait(12.5)
    assert watch.state == "stalled"
    watch.wait(1.5)
    assert watch.state == "hung"


def test_what_the_engine_was_given_counts_from_then_on():
    watch = Watch()
    watch.report(WARM, is_busy=False)
    watch.wait(2.75)
    assert watch.state == "stalled"
    watch.wait(0.25, has_requests=True)
    assert watch.state == "fine"
    # A report from before the request came says idle; the step on it may take its time all the same.
    watch.report(WARM, is_busy=False)
    watch.wait(2.75, has_requests=True)
    assert watch.state == "stalled"
    watch.wait(0.5, has_requests=True)
    assert watch.state == "hung"


def test_an_engine_with_long_steps_may_take_long():
    watch = Watch()
    for step in range(WARM, WARM + 50):
        watch.report(step)
        watch.wait(1.0)
    watch.report(WARM + 50)
    watch.wait(3.25)
    assert watch.state == "fine"
    watch.wait(6.5)
    assert watch.state == "stalled"
    watch.wait(0.5)
    assert watch.state == "hung"


def test_a_single_long_step_does_not_make_the_watch_lenient():
    watch = Watch()
    for step in range(WARM, WARM + 250):
        watch.report(step)
        watch.wait(2.5 if step == WARM + 100 else 0.25)
    assert watch.watchdog.limit_s == 3.0


def test_steps_between_two_reports_share_the_time():
    watch = Watch()
    for step in range(WARM, WARM + 100, 10):
        watch.report(step)
        watch.wait(4.0)
    assert watch.watchdog.limit_s == pytest.approx(4.0)


def test_time_in_which_the_watch_did_not_run_hardly_counts():
    watch = Watch()
    watch.report(WARM)
    watch.wait(0.5)
    watch.now += 3600
    watch.watchdog.tick(watch.now, has_requests=False)
    assert watch.watchdog.stuck_s == pytest.approx(0.25 + MAX_TURN_S)
    watch.report(WARM + 1)
    assert watch.watchdog.limit_s < 60
