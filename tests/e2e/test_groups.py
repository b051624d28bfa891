# SPDX-License-Identifier: Apache-2.0
"""Worker groups come and go under a running broker and gateway; the fake engine makes every text known in advance."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.harness.expectation import expect
from tests.stack import Stack, generate, stream_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAST = "fake:step_ms=4"
SLOW = "fake:step_ms=400"
PARAMS = {"ignore_eos": True, "do_sample": False}


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack(broker_options=["--heartbeat-ms", "100", "--liveness", "10"])
    try:
        yield stack
    finally:
        stack.close()


def ask(stack: Stack, prompt: str, num_tokens: int) -> str:
    return str(generate(stack.url, "m", prompt, max_new_tokens=num_tokens, **PARAMS)[0]["generated_text"])


def expected(prompt: str, num_tokens: int) -> str:
    return expect(prompt, max_new_tokens=num_tokens, **PARAMS).text


def load_of(stack: Stack, name: str, counter: str) -> int:
    """As the broker knows it; 0 for a group that it does not know at the moment."""
    return int(stack.groups_status().get(name, {"load": {}})["load"].get(counter, 0))


def outstanding(stack: Stack, name: str) -> int:
    return load_of(stack, name, "running")


def has_generated(stack: Stack, name: str) -> bool:
    """It got work: unlike the work itself, the counter cannot be missed between two looks."""
    return load_of(stack, name, "generated_tokens") > 0


def test_third_group_takes_load_and_idle_one_may_die(stack: Stack) -> None:
    stack.start_group("one", FAST)
    stack.start_group("two", FAST)
    stack.start_gateway()
    prompts = [f"prompt {i}" for i in range(24)]
    stack.start_group("three", FAST)
    with ThreadPoolExecutor(24) as pool:
        work = [pool.submit(ask, stack, prompt, 300) for prompt in prompts]
        stack.wait_for(lambda: has_generated(stack, "three"))
        assert [future.result() for future in work] == [expected(prompt, 300) for prompt in prompts]
    stack.wait_for(lambda: stack.used_blocks() == 0)
    stack.groups["two"].kill()
    with ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(lambda prompt: ask(stack, prompt, 40), prompts))
    assert texts == [expected(prompt, 40) for prompt in prompts]
    stack.wait_for(lambda: set(stack.group_states()) == {"one", "three"})


def test_group_that_dies_before_the_first_token_loses_nothing(stack: Stack) -> None:
    stack.start_group("doomed", SLOW)
    stack.start_gateway()
    with ThreadPoolExecutor(8) as pool:
        work: list[Future[str]] = [pool.submit(ask, stack, f"p{i}", 20) for i in range(8)]
        stack.wait_for(lambda: outstanding(stack, "doomed") > 0)
        stack.start_group("heir", FAST)
        stack.groups["doomed"].kill()
        texts = [future.result() for future in work]
    assert texts == [expected(f"p{i}", 20) for i in range(8)]


def test_drained_group_finishes_its_work(stack: Stack) -> None:
    stack.start_group("leaving", FAST)
    stack.start_group("staying", FAST)
    stack.start_gateway()
    with ThreadPoolExecutor(16) as pool:
        work = [pool.submit(ask, stack, f"p{i}", 300) for i in range(16)]
        stack.wait_for(lambda: has_generated(stack, "leaving"))
        stack.groups["leaving"].process.terminate()
        late = [pool.submit(ask, stack, f"q{i}", 20) for i in range(16)]
        assert all(len(future.result()) >= 300 for future in work)
        assert all(future.result() for future in late)
    assert stack.groups["leaving"].process.wait(60) == 0
    stack.wait_for(lambda: set(stack.group_states()) == {"staying"})


def test_killed_engine_loses_no_new_request(stack: Stack) -> None:
    """Short requests keep coming while one of two engines dies: each is tried elsewhere, none is refused."""
    stack.start_group("doomed", "fake:step_ms=1")
    stack.start_group("heir", "fake:step_ms=1")
    stack.start_gateway()
    engine_pid = stack.groups_status()["doomed"]["info"]["engine_pid"]
    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(ask, stack, f"p{i}", 1) for i in range(200)]
        work[50].result()
        os.kill(engine_pid, signal.SIGKILL)
        assert all(len(future.result()) == 1 for future in work)


def test_stalled_gateway_goes_on_with_its_requests(stack: Stack) -> None:
    """It misses its heartbeats, is given up and its requests are cancelled; awake again, it continues each of them."""
    stack.start_group("g", "fake:step_ms=20")
    stack.start_gateway()
    assert stack.gateway is not None
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(ask, stack, "hello", 150) for _ in range(4)]
        stack.wait_for(lambda: outstanding(stack, "g") > 0)
        stack.gateway.process.send_signal(signal.SIGSTOP)
        stack.wait_for(lambda: outstanding(stack, "g") == 0)
        stack.gateway.process.send_signal(signal.SIGCONT)
        assert [future.result() for future in work] == [expected("hello", 150)] * 4


def test_new_requests_wait_for_a_restarted_broker(stack: Stack) -> None:
    stack.start_group("g", FAST)
    stack.start_gateway()
    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(ask, stack, f"p{i}", 5) for i in range(150)]
        work[30].result()
        stack.broker.kill()
        stack.start_broker()
        assert all(len(future.result()) == 5 for future in work)


def test_vanished_clients_free_their_blocks(stack: Stack) -> None:
    stack.start_group("g", "fake:step_ms=20,num_blocks=4096")
    stack.start_gateway()
    gone = threading.Barrier(51)

    def read_three(index: int) -> None:
        body = {"prompts": f"client {index}", "max_new_tokens": 2000, **PARAMS}
        events = stream_events(stack.url, "/mii/m", body)
        for _ in range(3):
            next(events)
        gone.wait(120)
        events.close()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=read_three, args=(index,)) for index in range(50)]
    for thread in threads:
        thread.start()
    gone.wait(120)
    for thread in threads:
        thread.join()
    seconds = stack.wait_for(lambda: stack.used_blocks() == 0, 30)
    print(f"all blocks were free {seconds:.2f} s after the last client had gone")
    assert generate(stack.url, "m", "after", max_new_tokens=5, **PARAMS)[0]["generated_length"] == 5


def test_stream_equals_unstreamed_and_has_one_event_per_token(stack: Stack) -> None:
    stack.start_group("g", FAST)
    stack.start_gateway()
    body: dict[str, Any] = {"prompts": "hello", "max_new_tokens": 100, **PARAMS}
    events = list(stream_events(stack.url, "/mii/m", body))
    assert "".join(event["generated_text"] for event in events) == ask(stack, "hello", 100)
    assert sum(bool(event["generated_text"]) for event in events) == 100, json.dumps(events[:3])
