# SPDX-License-Identifier: Apache-2.0
"""RESET_PREFIX_CACHE: to all groups of a deployment, and one answer that says who has done it."""

from __future__ import annotations

from typing import Any

import pytest

from mii_zmq.broker.prefix_resets import MAX_RESETS, TIMEOUT_S
from mii_zmq.protocol import PrefixCacheReset, Verb, encode, parse_header
from tests.broker.bench import Bench, address, request_id

NUMBER = 70


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    for index, name in enumerate("vw", 1):
        bench.ready(name, incarnation=index)
    bench.ready("other", incarnation=9, deployment="n")
    return bench


def ask(bench: Bench, number: int = NUMBER, deployment: str = "m", client: Any = "c") -> None:
    bench.client(client, Verb.RESET_PREFIX_CACHE, number, {"deployment": deployment})


def done(bench: Bench, name: str, number: int = NUMBER) -> None:
    bench.worker(name, encode(Verb.RESET_PREFIX_CACHE, request_id(number)))


def answer(bench: Bench, client: Any = "c") -> PrefixCacheReset:
    message = bench.last(client)
    assert (message.verb, message.request_id) == (Verb.RESET_PREFIX_CACHE, request_id(NUMBER))
    return parse_header(message, PrefixCacheReset)


def test_all_groups_are_asked_and_waited_for(bench: Bench) -> None:
    ask(bench)
    assert bench.verbs("v", NUMBER) == bench.verbs("w", NUMBER) == ["RESET_PREFIX_CACHE"]
    assert "RESET_PREFIX_CACHE" not in bench.verbs("other")
    done(bench, "w")
    done(bench, "w")
    assert bench.verbs("c") == []
    done(bench, "v")
    assert answer(bench) == PrefixCacheReset(done=["v", "w"])
    done(bench, "v")
    assert len(bench.verbs("c")) == 1
    assert len(bench.state.resets) == 0


def test_a_group_that_dies_is_named(bench: Bench) -> None:
    ask(bench)
    done(bench, "v")
    bench.perform(bench.state.worker_gone(address("w"), bench.now))
    found = answer(bench)
    assert found.done == ["v"]
    assert "connection closed" in found.failed["w"]


def test_a_group_on_a_new_connection_is_named(bench: Bench) -> None:
    ask(bench)
    done(bench, "v")
    bench.ready("w2", "w", incarnation=2)
    assert answer(bench).failed == {"w": "the group's connection broke"}


def test_a_group_that_refuses_is_named(bench: Bench) -> None:
    """So does one that does not know the verb."""
    ask(bench)
    done(bench, "v")
    bench.worker("w", encode(Verb.ERROR, request_id(NUMBER), {"code": "protocol", "message": "unknown verb 0x1a"}))
    assert answer(bench).failed == {"w": "unknown verb 0x1a"}
    assert bench.state.counters.dropped_rows == 0


def test_a_silent_group_is_named_after_a_while(bench: Bench) -> None:
    ask(bench, client=(b"req", b""))
    done(bench, "v")
    bench.advance(TIMEOUT_S - 0.5, heartbeats=("v", "other"))
    bench.heartbeat("w", incarnation=2)
    assert len(bench.state.resets) == 0, "a dead group is not waited for"


def test_a_group_that_lives_but_does_not_answer(bench: Bench) -> None:
    ask(bench)
    done(bench, "v")
    for _ in range(int(10 * TIMEOUT_S) + 2):
        bench.now += 0.1
        bench.heartbeat("v")
        bench.heartbeat("w", incarnation=2)
        bench.perform(bench.state.tick(bench.now))
    assert answer(bench).failed == {"w": "it did not answer within 10 s"}
    done(bench, "w")
    assert bench.verbs("c").count("RESET_PREFIX_CACHE") == 1


def test_a_client_that_leaves_is_forgotten(bench: Bench) -> None:
    ask(bench)
    bench.perform(bench.state.client_gone(address("c"), bench.now))
    assert len(bench.state.resets) == 0
    done(bench, "v")
    assert bench.verbs("c") == []


def test_what_cannot_be_asked(bench: Bench) -> None:
    ask(bench, deployment="nobody")
    assert bench.error("c")["code"] == "unknown_deployment"
    for name in "vw":
        bench.perform(bench.state.worker_gone(address(name), bench.now))
    ask(bench)
    assert bench.error("c")["code"] == "no_workers"


def test_resets_are_bounded(bench: Bench) -> None:
    for number in range(MAX_RESETS):
        ask(bench, 1000 + number)
    ask(bench)
    assert bench.error("c")["code"] == "overloaded"
    ask(bench, 1000)
    assert bench.error("c")["code"] == "overloaded"
