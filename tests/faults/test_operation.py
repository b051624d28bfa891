# SPDX-License-Identifier: Apache-2.0
"""Overload, health, metrics and rolling restarts: what an operator relies on."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mii_zmq.client import AsyncClient, BackgroundLoop
from mii_zmq.errors import MiiError
from mii_zmq.protocol import GenerateBody
from tests.faults.harness.baseline import GREEDY, ask, resident_kb
from tests.faults.harness.expectation import expect
from tests.faults.harness.fleet import FAST_HEARTBEATS, Fleet, wait_until
from tests.faults.harness.history import History
from tests.faults.harness.load import Load
from tests.faults.harness.mayhem import send
from tests.faults.harness.reader import Stream, open_post, read_response
from tests.stack import http

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def text_of(prompt: str, num_tokens: int) -> str:
    return expect(prompt, max_new_tokens=num_tokens, ignore_eos=True).text


def test_a_full_queue_refuses_at_once(new_fleet: Callable[..., Fleet]) -> None:
    """Row 44: what is beyond the bound gets Retry-After without delay; what was accepted is finished."""
    fleet = new_fleet(broker_options=[*FAST_HEARTBEATS, "--max-queued-requests", "8"])
    # So slow that those who come late, on a busy machine, find the first ones still there.
    fleet.start(model="fake:step_ms=10,max_sequences=4", groups=1)

    def post(index: int) -> tuple[int, dict[str, str], bytes, float]:
        peer = open_post(fleet.url(), "/mii/m", {"prompts": f"r {index}", "max_new_tokens": 100, **GREEDY})
        started = time.monotonic()
        status, headers, body = read_response(peer)
        peer.close()
        return status, headers, body, time.monotonic() - started

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(post, range(40)))
    for index, (status, _, body, _) in enumerate(answers):
        if status == 200:
            assert json.loads(body)[0]["generated_text"] == text_of(f"r {index}", 100)
    refused = [answer for answer in answers if answer[0] != 200]
    assert 5 < len(refused) <= 28, "four run and eight wait"
    for status, headers, body, _ in refused:
        assert status in (429, 503), body
        assert int(headers["retry-after"]) >= 1
    print(f"median of the refusals {1000 * statistics.median(seconds for *_, seconds in refused):.1f} ms")


@pytest.mark.long
async def test_one_tenant_cannot_push_the_others_aside(new_fleet: Callable[..., Fleet]) -> None:
    """Row 45."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=2,max_sequences=4", groups=1)
    flood = AsyncClient(fleet.client_endpoints)
    other = AsyncClient(fleet.client_endpoints)
    body = GenerateBody(prompt="tenant", params={"max_new_tokens": 20, **GREEDY})

    async def measure() -> float:
        times = []
        for _ in range(10):
            started = time.monotonic()
            await other.generate("m", body, stream=False, tenant="quiet").result()
            times.append(time.monotonic() - started)
        return sorted(times)[8]

    try:
        await flood.connect(10)
        await other.connect(10)
        alone_s = await measure()
        crowd = [flood.generate("m", body, stream=False, tenant="loud") for _ in range(400)]
        together_s = await measure()
        for generation in crowd:
            generation.cancel()
        print(f"alone {alone_s:.3f} s, beside a flood {together_s:.3f} s")
        # It waits for a place in the batch, but for one request's time only.
        assert together_s < 2 * alone_s + 0.1
    finally:
        await flood.close()
        await other.close()


@pytest.mark.long
def test_readiness_follows_the_engine_that_dies(new_fleet: Callable[..., Fleet]) -> None:
    """Row 68: the gateway's own process is well all the time, and says so on another path."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=4", groups=1)
    send(fleet.pids()["group 1 engine"], signal.SIGKILL)
    seconds = wait_until(lambda: http(fleet.url() + "/health/ready?deployment=m")[0] == 503, "it is not ready", 5.0)
    print(f"not ready after {seconds:.2f} s")
    assert http(fleet.url() + "/health/live")[0] == 200
    fleet.revive()


@pytest.mark.long
def test_readiness_follows_the_engine_that_hangs(new_fleet: Callable[..., Fleet]) -> None:
    """Row 68: everything answers, but the loop that computes does not move."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=4", groups=1, options=["--step-timeout-s=3"])
    pid = fleet.pids()["group 1 engine"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: http(fleet.url() + "/health/ready?deployment=m")[0] == 503, "it is not ready", 5.0)
    finally:
        send(pid, signal.SIGCONT)
        fleet.revive()


def test_metrics_under_load(fleet: Fleet) -> None:
    """Row 69: read in no time, and no word of a client is ever a label."""
    streams = [Stream(fleet.url(), f"secretword {index}", 400) for index in range(16)]
    http(fleet.url() + "/mii/secretword", {"prompts": "x"})
    http(fleet.url() + "/secretword", {"prompts": "x"})
    http(fleet.url() + "/v1/completions", {"model": "secretword", "prompt": "x", "user": "secretword"})
    times, page = [], b""
    for _ in range(20):
        started = time.monotonic()
        status, page = http(fleet.url() + "/metrics")
        times.append(time.monotonic() - started)
        assert status == 200
    for index, stream in enumerate(streams):
        stream.end()
        assert stream.text == text_of(f"secretword {index}", 400)
    assert b"secretword" not in page
    print(f"median {1000 * statistics.median(times):.1f} ms")


@pytest.mark.long
def test_a_rolling_restart_fails_no_request(new_fleet: Callable[..., Fleet], rng: random.Random) -> None:
    """Row 17: three groups, two brokers and two gateways, each told to end and started again, one after the other,
    behind clients that retry connections only."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=2", groups=3, brokers=2, gateways=2)
    history = History()
    urls = [fleet.url(name) for name in fleet.gateways]
    load = Load(history, "m", urls, fleet.client_endpoints, rng.getrandbits(32), max_tokens=150, think_s=0.02)
    loop = BackgroundLoop("load")
    failures: list[BaseException] = []

    def drive() -> None:
        try:
            loop.run(load.run({"http_stream": 4, "http_whole": 4, "zmq_stream": 3, "zmq_whole": 3}))
        except (MiiError, OSError) as error:
            failures.append(error)

    driver = threading.Thread(target=drive)
    driver.start()
    try:
        for name in [*fleet.groups, *fleet.brokers, *fleet.gateways]:
            time.sleep(1.0)
            assert fleet.terminate(name) == 0, name
            fleet.revive()
        time.sleep(1.0)
    finally:
        load.is_stopping = True
        driver.join(60)
        loop.close()
    verdict = history.check()
    print(verdict.as_dict(), verdict.messages)
    assert (failures, history.unfinished(), verdict.violations, verdict.errors) == ([], [], [], {})
    assert verdict.num_complete == verdict.num_requests > 100


@pytest.mark.long
def test_a_short_soak(new_fleet: Callable[..., Fleet], rng: random.Random) -> None:
    """Row 51, in small (scripts/soak.py is the large one): mixed requests with cancels, and memory stays."""
    fleet = new_fleet()
    # A small pool: its cache is full, and grows no more, before the first sample is taken.
    fleet.start(model="fake:num_blocks=256", groups=1)
    history = History()
    load = Load(
        history, "m", [fleet.url()], fleet.client_endpoints, rng.getrandbits(32), max_tokens=40, cancel_share=0.2
    )
    loop = BackgroundLoop("load")
    driver = threading.Thread(
        target=lambda: loop.run(load.run({"http_stream": 4, "http_whole": 4, "zmq_stream": 8, "zmq_whole": 8}))
    )
    driver.start()
    samples: list[tuple[int, dict[str, Any]]] = []
    try:
        for count in (1500, 4500):
            wait_until(lambda: len(history) >= count, f"{count} requests were sent", 120, 0.05)  # noqa: B023
            samples.append((len(history), {role: resident_kb(pid) for role, pid in fleet.pids().items()}))
    finally:
        load.is_stopping = True
        driver.join(60)
        loop.close()
    verdict = history.check()
    assert verdict.violations == []
    assert set(verdict.errors) <= {"error: cancelled by the client"}
    thousands = (samples[1][0] - samples[0][0]) / 1000
    growth = {role: (samples[1][1][role] - samples[0][1][role]) / thousands for role in samples[0][1]}
    print(f"growth in kB per 1,000 requests: {growth}; {load.num_cancelled} were cancelled")
    assert all(value < 1000 for value in growth.values()), growth
    assert ask(fleet, "after", 3) == text_of("after", 3)
