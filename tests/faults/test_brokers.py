# SPDX-License-Identifier: Apache-2.0
"""Brokers that die, and networks that fail between brokers and their peers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

from mii_zmq.client import AsyncClient
from mii_zmq.protocol import GenerateBody
from tests.faults.harness.baseline import GREEDY, ask
from tests.faults.harness.expectation import expect
from tests.faults.harness.fault_proxy import FaultProxy, Line
from tests.faults.harness.fleet import Fleet, wait_until
from tests.faults.harness.reader import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DETECT_S = 3.0
END_S = 20.0
"""For streams of a few seconds, after whatever disturbed them."""


def text_of(prompt: str, num_tokens: int) -> str:
    return expect(prompt, max_new_tokens=num_tokens, ignore_eos=True).text


def check_streams(streams: list[Stream], num_tokens: int) -> None:
    for index, stream in enumerate(streams):
        stream.end(END_S)
        assert (stream.error, stream.is_done) == (None, True)
        assert stream.text == text_of(f"stream {index}", num_tokens)


def start_streams(url: str, count: int, num_tokens: int) -> list[Stream]:
    streams = [Stream(url, f"stream {index}", num_tokens) for index in range(count)]
    for stream in streams:
        stream.wait_for(3)
    return streams


async def test_a_broker_is_killed_and_started_again(fleet: Fleet) -> None:
    """Row 12: groups register again in time; streams and whole answers of gateways and of client libraries complete."""
    client = AsyncClient(fleet.client_endpoints)
    try:
        await client.connect(10)
        body = GenerateBody(prompt="whole", params={"max_new_tokens": 300, **GREEDY})
        whole = client.generate("m", body, stream=False)
        streamed = client.generate("m", body, stream=True)
        streams = start_streams(fleet.url(), 6, 300)
        fleet.restart("broker 1")
        seconds = wait_until(lambda: len(fleet.group_states()) == 2, "both groups are registered")
        check_streams(streams, 300)
        assert (await whole.result()).text == (await streamed.result()).text == text_of("whole", 300)
    finally:
        await client.close()
    print(f"both groups were registered {seconds:.2f} s after the broker was back")


@pytest.mark.long
def test_a_stopped_broker_blames_nobody(fleet: Fleet) -> None:
    """Row 6, the broker's side: stopped for longer than all heartbeats, it goes on with everybody."""
    streams = start_streams(fleet.url(), 4, 500)
    pid = fleet.pids()["broker 1"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(pid, signal.SIGCONT)
    check_streams(streams, 500)


def proxied(fleet: Fleet, between: str, seed: int = 0) -> FaultProxy:
    """Start one broker, one group and one gateway, with a proxy between two of them."""
    fleet.add_broker()
    behind = fleet.client_endpoints if between == "gateway and broker" else fleet.worker_endpoints
    proxy = FaultProxy(behind[0], seed=seed)
    is_gateway = between == "gateway and broker"
    fleet.add_group("group 1", "fake:step_ms=4", brokers=None if is_gateway else [proxy.endpoint])
    fleet.add_gateway("gateway 1", brokers=[proxy.endpoint] if is_gateway else None)
    return proxy


WAYS: dict[str, Callable[[FaultProxy], list[Line]]] = {
    "both ways": lambda proxy: list(proxy.lines),
    "to the broker": lambda proxy: [proxy.to_server],
    "from the broker": lambda proxy: [proxy.to_client],
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("both ways", "waiting"),
        ("to the broker", "waiting"),
        ("to the broker", "lost"),
        ("both ways", "lost"),
        ("from the broker", "waiting"),
        ("from the broker", "lost"),
    ],
)
def test_a_partition_between_gateway_and_broker(new_fleet: Callable[..., Fleet], way: str, kind: str) -> None:
    """Row 24: for twice the detection time, bytes delayed or lost; afterwards every stream is complete, none double."""
    fleet = new_fleet()
    with proxied(fleet, "gateway and broker") as proxy:
        streams = start_streams(fleet.url(), 4, 700)
        for line in WAYS[way](proxy):
            line.is_paused, line.is_lossy = kind == "waiting", kind == "lost"
        wait_until(lambda: fleet.status()["num_unfinished"] == 0, "the broker has given the gateway up", 3 * DETECT_S)
        proxy.heal()
        check_streams(streams, 700)
        fleet.terminate("gateway 1")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["waiting", "lost"])
@pytest.mark.parametrize("way", WAYS)
def test_a_partition_between_broker_and_group(new_fleet: Callable[..., Fleet], way: str, kind: str) -> None:
    """Row 24: the group counts as dead, another one goes on with its streams, and nothing comes twice when it heals."""
    fleet = new_fleet()
    with proxied(fleet, "broker and group") as proxy:
        streams = start_streams(fleet.url(), 4, 700)
        fleet.add_group("group 2", "fake:step_ms=4")
        for line in WAYS[way](proxy):
            line.is_paused, line.is_lossy = kind == "waiting", kind == "lost"
        seconds = wait_until(lambda: "group 1" not in fleet.group_states(), "the group counts as dead", 3 * DETECT_S)
        print(f"the group counted as dead after {seconds:.2f} s")
        for stream in streams:
            # With one way open, the group may have finished all of it before.
            stream.wait_for(min(700, len(stream.texts) + 2))
        proxy.heal()
        check_streams(streams, 700)
        wait_until(lambda: "group 1" in fleet.group_states(), "the group is back")
        fleet.terminate("group 1")


@pytest.mark.long
@pytest.mark.parametrize("between", ["gateway and broker", "broker and group"])
def test_delay_and_jitter_kill_nobody(new_fleet: Callable[..., Fleet], rng: random.Random, between: str) -> None:
    """Row 25."""
    fleet = new_fleet()
    with proxied(fleet, between, seed=rng.getrandbits(32)) as proxy:
        for line in proxy.lines:
            line.delay_s, line.jitter_s = 0.2, 0.2
        streams = start_streams(fleet.url(), 4, 300)
        check_streams(streams, 300)
        time.sleep(2.0)
        counters = fleet.status()["counters"]
        assert (counters["groups_lost"], counters["clients_lost"], counters["retries"]) == (0, 0, 0)
        proxy.heal()
        fleet.terminate("gateway 1")
        fleet.terminate("group 1")


@pytest.mark.long
def test_a_dead_group_behind_a_half_open_connection_is_noticed(new_fleet: Callable[..., Fleet]) -> None:
    """Row 26: no end of the connection ever arrives; the heartbeats tell."""
    fleet = new_fleet()
    with proxied(fleet, "broker and group") as proxy:
        stream = Stream(fleet.url(), "row 26", 300)
        stream.wait_for(3)
        fleet.add_group("group 2", "fake:step_ms=4")
        proxy.is_half_open = True
        fleet.kill("group 1")
        seconds = wait_until(lambda: "group 1" not in fleet.group_states(), "the group counts as dead")
        assert seconds < DETECT_S
        stream.end()
        assert (stream.error, stream.text) == (None, text_of("row 26", 300))
        proxy.heal()


@pytest.mark.long
def test_loss_of_one_of_two_brokers_costs_no_stream(new_fleet: Callable[..., Fleet]) -> None:
    """Gateways and clients hold a list: they go on at the other broker at once, though the first never comes back."""
    fleet = new_fleet()
    fleet.start(model="fake:step_ms=4", groups=2, brokers=2)
    streams = start_streams(fleet.url(), 6, 1000)
    fleet.kill("broker 1")
    check_streams(streams, 1000)
    assert ask(fleet, "new", 5) == text_of("new", 5)
    fleet.spawn("broker 1")
    fleet.wait_ready("broker 1")
    wait_until(lambda: fleet.is_serving(2), "both brokers serve")
