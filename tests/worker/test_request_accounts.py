# SPDX-License-Identifier: Apache-2.0
"""What an actor remembers of its requests: spans from the engine's and its own times, histograms, lines in the log."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from mii_zmq.errors import WorkerLost
from mii_zmq.protocol import Verb
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.engine_channel import StepReport
from mii_zmq.worker.request_spans import RequestSpans
from tests.engine_driver import make_driver, make_limits, make_request
from tests.span_reader import Memory, SeenSpan
from tests.worker.actor_harness import NO_LOAD, Harness, row

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x_request_id": "mine"}


class Traced:
    def __init__(self) -> None:
        self.memory = Memory()
        self.harness = Harness(spans=RequestSpans(self.memory.tracing, "g", "d"))

    def root(self) -> SeenSpan:
        (root,) = self.memory.trees()
        return root


@pytest.fixture
async def traced() -> Any:
    made = Traced()
    yield made
    made.harness.actor.close("test over")


async def test_all_phases_of_a_request(traced: Traced) -> None:
    harness = traced.harness
    harness.generate(max_new_tokens=3, header=HEADER)
    seq_id = (await harness.added()).seq_id
    begun = time.monotonic()
    harness.step(row(seq_id, "a", cached=4, timing=(begun, 0)))
    harness.step(row(seq_id, "b"))
    harness.step(row(seq_id, "c", "length", timing=(begun, 2)))
    root = traced.root()
    phases = ["mii.worker.tokenize", "mii.engine.queue", "mii.engine.prefill", "mii.engine.decode"]
    assert root.names() == ["mii.worker.request", phases]
    root.check_times()
    assert (root.trace_id, root.parent_id, root.is_error) == (TRACE, PARENT, False)
    assert root.attributes == {
        "mii.group": "g",
        "mii.deployment": "d",
        "mii.request_id": "mine",
        "mii.seq_id": seq_id,
        "mii.prompt_tokens": 5,
        "mii.cached_tokens": 4,
        "mii.output_tokens": 3,
        "mii.num_preemptions": 2,
        "mii.finish_reason": "length",
    }
    assert root.events == [("first token", {})]
    assert root.one("mii.engine.prefill").attributes == {"mii.prompt_tokens": 5, "mii.cached_tokens": 4}


async def test_errors_and_requests_that_never_reach_the_engine(traced: Traced) -> None:
    harness = traced.harness
    harness.generate(1, temperature=-1.0, header=HEADER)
    assert (await harness.link.take(Verb.ERROR)).header["code"] == "invalid_request"
    root = traced.root()
    assert root.names() == ["mii.worker.request", ["mii.worker.tokenize"]]
    assert (root.is_error, root.attributes["error.type"]) == (True, "invalid_request")


async def test_request_that_waits_in_the_engine_and_is_cancelled(traced: Traced) -> None:
    harness = traced.harness
    request_id = harness.generate(header=HEADER)
    seq_id = (await harness.added()).seq_id
    harness.send(Verb.CANCEL, request_id)
    harness.step(row(seq_id, "", "cancelled", timing=(0.0, 0)))
    root = traced.root()
    assert root.names() == ["mii.worker.request", ["mii.worker.tokenize", "mii.engine.queue"]]
    assert root.attributes["error.type"] == "cancelled"


async def test_what_is_not_traced_leaves_no_span(traced: Traced) -> None:
    harness = traced.harness
    harness.generate(header={"traceparent": HEADER["traceparent"][:-1] + "0"})
    harness.step(row((await harness.added()).seq_id, "a", "length"))
    assert traced.memory.spans() == []


async def test_heartbeat_has_histograms(traced: Traced) -> None:
    harness = traced.harness
    harness.generate(max_new_tokens=3)
    seq_id = (await harness.added()).seq_id
    begun = time.monotonic() - 0.2
    harness.step(row(seq_id, "a", timing=(begun, 0)))
    harness.step(row(seq_id, "b"))
    harness.step(row(seq_id, "c", "length", timing=(begun, 0)))
    core: EngineCore = make_driver().core
    core.times.plan.observe(0.003)
    harness.actor.on_step(StepReport(2, (), NO_LOAD, times=core.times.values()))
    heartbeat = harness.actor.heartbeat()
    assert heartbeat is not None
    counts = {name: sum(found.counts) for name, found in heartbeat.histograms.items()}
    assert counts == {
        "step_plan": 1, "step_submit": 0, "step_wait": 0, "step_finish": 0,
        "tokenize": 1, "queue": 1, "prefill": 1, "decode": 1, "inference": 1, "per_token": 1,
    }  # fmt: skip
    assert 0.2 <= heartbeat.histograms["prefill"].total <= heartbeat.histograms["inference"].total < 60
    assert all(len(found.counts) == len(found.bounds) + 1 for found in heartbeat.histograms.values())


async def test_log_says_how_requests_ended(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="mii_zmq.worker")
    harness = traced.harness
    harness.generate(1, prompt="open sesame", header=HEADER)
    harness.step(row((await harness.added()).seq_id, "a", "length"))
    harness.generate(2, prompt="open sesame", temperature=-1.0)
    await harness.link.take(Verb.TOKENS)
    await harness.link.take(Verb.FINAL)
    await harness.link.take(Verb.ERROR)
    harness.generate(3)
    error = WorkerLost("all gone").to_wire()
    harness.step(row((await harness.added()).seq_id, "", "error", error=error))
    records = [record for record in caplog.records if record.name == "mii_zmq.worker.request_accounts"]
    assert [(record.levelname, record.getMessage()) for record in records] == [
        ("DEBUG", "request mine ended with length, 11+1 tokens"),
        ("DEBUG", f"request {2:032x} ended with invalid_request, 0+0 tokens"),
        ("INFO", f"request {3:032x} ended with worker_lost, 5+0 tokens: all gone"),
    ]
    assert vars(records[0])["facts"] == {"request_id": "mine", "trace_id": TRACE}


def test_engine_says_when_it_began_and_how_often_it_began_anew() -> None:
    driver = make_driver(make_limits(num_blocks=20, max_sequences=4, token_budget=64))
    driver.clock.now = 5.0
    timings: dict[int, list[tuple[float, int]]] = {}
    driver.add(*(make_request(seq_id, 20, max_new_tokens=40) for seq_id in range(4)))
    while driver.core.has_work:
        for output in driver.core.step():
            if output.timing is not None:
                timings.setdefault(output.seq_id, []).append(output.timing)
    assert timings.keys() == {0, 1, 2, 3}
    assert all(len(found) == 2 and found[0][0] == found[1][0] == 5.0 for found in timings.values())
    assert sum(found[-1][1] for found in timings.values()) == driver.core.stats().num_preemptions > 0
    times = driver.core.times
    num_steps = driver.core.stats().step
    assert [sum(h.counts) for h in (times.plan, times.submit, times.wait, times.finish)] == [num_steps] * 4
