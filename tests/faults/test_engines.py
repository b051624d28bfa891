# SPDX-License-Identifier: Apache-2.0
"""Requests that an engine cannot hold, that kill it, or that come too late for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mii_zmq.client import AsyncClient
from mii_zmq.errors import DeadlineExceeded
from mii_zmq.protocol import GenerateBody
from tests.faults.harness.baseline import GREEDY
from tests.faults.harness.expectation import expect
from tests.faults.harness.fleet import Fleet, wait_until
from tests.faults.harness.reader import Stream
from tests.stack import generate, http

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def text_of(prompt: str, num_tokens: int) -> str:
    return expect(prompt, max_new_tokens=num_tokens, ignore_eos=True).text


def test_fifty_long_requests_in_a_tiny_pool(new_fleet: Callable[..., Fleet]) -> None:
    """Row 39: they are preempted and computed again, all of them finish, and each text is what it is alone."""
    fleet = new_fleet()
    fleet.start(model="fake:num_blocks=40,block_size=16,max_model_len=512", groups=1)
    prompts = [f"{index} long " + "x" * (3 * index) for index in range(50)]

    def ask(prompt: str) -> str:
        return str(generate(fleet.url(), "m", prompt, max_new_tokens=150, **GREEDY)[0]["generated_text"])

    with ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(ask, prompts))
    assert texts == [text_of(prompt, 150) for prompt in prompts]
    wait_until(lambda: fleet.load("group 1", "used_blocks") == 0, "all blocks are free")
    assert fleet.load("group 1", "num_preemptions") > 0
    # Row 40, for the pool: 40 blocks of 16 tokens can never hold it.
    status, body = http(fleet.url() + "/mii/m", {"prompts": "y" * 511, "max_new_tokens": 200})
    assert (status, b"tokens" in body) == (400, True)


@pytest.mark.parametrize(("prompt_length", "num_tokens"), [(9000, 1), (8192, 1), (8000, 193), (1, 8192)])
def test_a_request_beyond_the_context_is_refused(fleet: Fleet, prompt_length: int, num_tokens: int) -> None:
    """Row 40: by both doors, with the name of the limit; the longest that fits is served."""
    prompt = "y" * prompt_length
    status, body = http(fleet.url() + "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": num_tokens})
    assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")
    status, body = http(fleet.url() + "/mii/m", {"prompts": prompt, "max_new_tokens": num_tokens})
    assert (status, b"8192" in body) == (400, True)


def test_the_longest_request_is_served(fleet: Fleet) -> None:
    """Row 40, from below."""
    (answer,) = generate(fleet.url(), "m", "y" * 8190, max_new_tokens=2, **GREEDY)
    assert answer["generated_length"] == 2


@pytest.mark.long
@pytest.mark.parametrize("options", ["exit_on=BANE", "exit_on=BANE,exit_after=5"], ids=["at once", "after 5 tokens"])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_poisonous_request(new_fleet: Callable[..., Fleet], options: str, is_streamed: bool) -> None:
    """Row 42: it may take a few groups down, but not its bystanders, and is refused for a while afterwards."""
    fleet = new_fleet()
    fleet.start(model=f"fake:step_ms=10,{options}", groups=3)
    bystanders = [Stream(fleet.url(), f"bystander {index}", 400) for index in range(10)]
    for stream in bystanders:
        stream.wait_for(2)
    crashes = 0

    def supervise() -> bool:
        nonlocal crashes
        for name in fleet.bury():
            crashes += 1
            fleet.spawn(name)
        for name in fleet.groups:
            fleet.poll_ready(name)
        return poison.done()

    def ask_poison() -> dict[str, Any]:
        body = {"model": "m", "prompt": "the BANE of engines", "max_tokens": 50, "stream": is_streamed}
        status, answer = http(fleet.url() + "/v1/completions", body)
        if status == 200:
            events = [line for line in answer.split(b"\n\n") if line]
            assert events[-1] != b"data: [DONE]"
            return dict(json.loads(events[-1].removeprefix(b"data: "))["error"])
        return {"status": status, **json.loads(answer)["error"]}

    with ThreadPoolExecutor(1) as pool:
        poison = pool.submit(ask_poison)
        wait_until(supervise, "the poisonous request has ended", 120)
        answer = poison.result()
    print(f"{crashes} groups crashed; {answer}")
    assert answer["code"] == "poison_request"
    assert answer.get("status", 500) == 500
    assert crashes <= 3
    fleet.revive()
    lost = fleet.status()["counters"]["groups_lost"]
    again = ask_poison()
    assert (again["code"], again["status"]) == ("poison_request", 500)
    assert fleet.status()["counters"]["groups_lost"] == lost
    for index, stream in enumerate(bystanders):
        stream.end()
        assert (stream.error, stream.text) == (None, text_of(f"bystander {index}", 400))


@pytest.mark.long
async def test_a_deadline_shorter_than_the_queue(new_fleet: Callable[..., Fleet]) -> None:
    """Row 46: ended in time, and the engine never computed anything for it."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=5,max_sequences=1", groups=1)
    client = AsyncClient(fleet.client_endpoints)
    try:
        await client.connect(10)
        params = {"max_new_tokens": 200, **GREEDY}
        running = [
            client.generate("m", GenerateBody(prompt=f"running {index}", params=params), stream=False)
            for index in range(3)
        ]
        late = client.generate("m", GenerateBody(prompt="late " * 100, params=params), stream=False, deadline_s=0.3)
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await late.result()
        assert time.monotonic() - started < 1.5
        for index, generation in enumerate(running):
            assert (await generation.result()).text == text_of(f"running {index}", 200)
    finally:
        await client.close()
    wait_until(lambda: fleet.load("group 1", "running") == 0, "the engine is idle")
    prompt_tokens = sum(len(f"running {index}") for index in range(3))
    wait_until(lambda: fleet.load("group 1", "prompt_tokens") >= prompt_tokens, "the last report has come")
    assert fleet.load("group 1", "prompt_tokens") == prompt_tokens
