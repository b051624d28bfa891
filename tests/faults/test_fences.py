# SPDX-License-Identifier: Apache-2.0
"""What one request does to a step must not reach the others: marked prompts make the fake engine fail on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.harness.expectation import expect
from tests.faults.harness.fleet import Fleet, wait_until
from tests.faults.harness.reader import Stream
from tests.stack import http

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ON_PURPOSE = "made up by a test"


def text_of(prompt: str, num_tokens: int) -> str:
    return expect(prompt, max_new_tokens=num_tokens, ignore_eos=True).text


def start_bystanders(fleet: Fleet, num_tokens: int = 300) -> Callable[[], None]:
    """Streams on every group; what is returned checks them."""
    streams = [Stream(fleet.url(), f"bystander {index}", num_tokens) for index in range(8)]
    for stream in streams:
        stream.wait_for(2)

    def check() -> None:
        for index, stream in enumerate(streams):
            stream.end()
            assert (stream.error, stream.text) == (None, text_of(f"bystander {index}", num_tokens))

    return check


def complain(fleet: Fleet, prompt: str, num_tokens: int = 50) -> dict[str, Any]:
    """The error object that a request ends with; asserts that it is one."""
    status, body = http(
        fleet.url() + "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "stream": False}
    )
    assert status >= 400, body
    return {"status": status, **json.loads(body)["error"]}


def counters(fleet: Fleet) -> tuple[int, int]:
    found = fleet.status()["counters"]
    return found["groups_lost"], found["clients_lost"]


@pytest.mark.allowed_log(ON_PURPOSE)
def test_one_request_without_finite_logits_and_one_that_raises(new_fleet: Callable[..., Fleet]) -> None:
    """Rows 41 and 43: each ends with an error of its own, the others do not notice, and what shares their prefix is
    served as if they had never been there."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=4,block_size=16,nan_on=NAN,nan_after=3,raise_on=BUG,raise_after=3", groups=1)
    check_bystanders = start_bystanders(fleet)
    prefix = "a long beginning that both of them have in common, over several blocks of the cache: "
    numeric = complain(fleet, prefix + "NAN")
    assert (numeric["status"], numeric["code"]) == (500, "numeric_error")
    bug = complain(fleet, prefix + "BUG")
    assert (bug["status"], bug["code"]) == (500, "internal")
    clean = Stream(fleet.url(), prefix + "fine", 50).end()
    assert (clean.error, clean.text) == (None, text_of(prefix + "fine", 50))
    check_bystanders()
    assert counters(fleet) == (0, 0)


@pytest.mark.allowed_log(ON_PURPOSE)
def test_steps_that_do_not_fit_into_memory(new_fleet: Callable[..., Fleet]) -> None:
    """Row 37: smaller ones are tried, and everything is served."""
    fleet = new_fleet()
    fleet.start(model="fake:oom_above=100", groups=1)
    check_bystanders = start_bystanders(fleet)
    long = Stream(fleet.url(), "memory " * 500, 20).end()
    assert (long.error, long.text) == (None, text_of("memory " * 500, 20))
    check_bystanders()
    assert counters(fleet) == (0, 0)


@pytest.mark.long
@pytest.mark.allowed_log(ON_PURPOSE)
@pytest.mark.parametrize(
    "fault",
    ["lose_on=BANE,lose_after=3", "rank_raise_at=30", "hang_on=BANE,hang_after=3"],
    ids=lambda f: f.split("_")[0],
)
def test_a_device_is_lost_or_hangs(new_fleet: Callable[..., Fleet], fault: str) -> None:
    """Rows 7, 11 and 38: the group is ended and started again; its streams go on on the other one meanwhile."""
    fleet = new_fleet()
    fleet.add_broker()
    options = ["--tensor-parallel=2", "--step-timeout-s=1"]
    fleet.add_group("group 1", f"fake:step_ms=10,{fault}", *options)
    fleet.add_gateway()
    trigger = Stream(fleet.url(), "the BANE of engines", 300)
    trigger.wait_for(2)
    fleet.add_group("group 2", "fake:step_ms=10", *options)
    wait_until(lambda: not fleet.is_alive("group 1"), "the group has ended", 30)
    trigger.end()
    assert (trigger.error, trigger.text) == (None, text_of("the BANE of engines", 300))
    fleet.revive()
