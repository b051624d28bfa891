# SPDX-License-Identifier: Apache-2.0
"""ABORT: requests of any connection, by id, by name, or all of a tenant."""

from __future__ import annotations

from typing import Any

from mii_zmq.protocol import Aborted, Verb, encode, parse_header
from tests.broker.bench import Bench, request_id


def abort(bench: Bench, numbers: list[int] = [], client: Any = "aborter", **header: Any) -> Aborted:  # noqa: B006
    values = {"request_ids": [request_id(number) for number in numbers], **header}
    bench.client(client, Verb.ABORT, 99, values)
    message = bench.last(client)
    assert (message.verb, message.request_id) == (Verb.ABORT, request_id(99))
    return parse_header(message, Aborted)


def bench_of_one(**fields: Any) -> Bench:
    bench = Bench()
    bench.ready("w", **fields)
    return bench


def test_running_and_waiting_requests_end_at_their_own_connections() -> None:
    bench = bench_of_one(max_requests=1)
    bench.hello("c")
    bench.generate("c", 1)
    bench.generate("d", 2)
    found = abort(bench, [1, 2, 3])
    assert (found.num_requests, set(found.request_ids)) == (2, {request_id(1), request_id(2)})
    assert bench.verbs("c", 1)[-1] == bench.verbs("d", 2)[-1] == "ERROR"
    assert bench.error("c")["code"] == bench.error("d")["code"] == "cancelled"
    assert bench.verbs("w", 1)[-1] == "CANCEL"
    assert "GENERATE" not in bench.verbs("w", 2)
    assert bench.state.num_unfinished == 0
    assert abort(bench, [1, 2]).num_requests == 0


def test_names_find_every_request_that_bears_them() -> None:
    bench = bench_of_one()
    for number, name in ((1, "a"), (2, "a"), (3, "b"), (4, "")):
        bench.generate("c", number, x_request_id=name)
    found = abort(bench, names=["a", "nobody"])
    assert (found.num_requests, found.names, found.request_ids) == (2, ["a"], [])
    assert set(bench.state.requests.by_id) == {request_id(3), request_id(4)}


def test_only_the_tenant_s_own_are_touched() -> None:
    bench = bench_of_one()
    bench.generate("c", 1, tenant="t", x_request_id="a")
    bench.generate("c", 2, x_request_id="a")
    for header in ({"names": ["a"]}, {"everything": True}):
        assert abort(bench, [1], tenant="other", **header).num_requests == 0
    found = abort(bench, [1, 2], tenant="t", names=["a"])
    assert (found.num_requests, found.request_ids, found.names) == (1, [request_id(1)], ["a"])
    assert abort(bench, tenant="", everything=True).num_requests == 1
    assert bench.state.num_unfinished == 0


def test_a_request_between_two_groups_is_found() -> None:
    bench = bench_of_one()
    bench.generate("c", 1)
    bench.kill("w")
    bench.perform(bench.state.worker_gone((b"w",), bench.now))
    assert bench.state.num_unfinished == 1
    assert abort(bench, [1]).num_requests == 1
    assert bench.error("c")["code"] == "cancelled"


def test_a_req_socket_may_abort_and_be_aborted() -> None:
    bench = bench_of_one()
    one_shot, other = (b"r", b""), (b"s", b"")
    bench.generate(one_shot, 1, stream=False)
    assert abort(bench, [1], client=other).num_requests == 1
    assert bench.verbs(one_shot) == ["ERROR"]


def test_a_malformed_one_ends_nothing() -> None:
    bench = bench_of_one()
    bench.generate("c", 1)
    bench.client("d", Verb.ABORT, 99, {"request_ids": "all"})
    assert bench.error("d")["code"] == "protocol"
    assert bench.state.num_unfinished == 1


def test_what_a_worker_sends_afterwards_is_dropped() -> None:
    bench = bench_of_one()
    bench.generate("c", 1)
    abort(bench, [1])
    bench.worker("w", encode(Verb.ERROR, request_id(1), {"code": "cancelled", "message": ""}))
    assert bench.verbs("c", 1).count("ERROR") == 1


def test_what_is_no_name_ends_nothing() -> None:
    bench = bench_of_one()
    bench.generate("c", 1)
    bench.generate("c", 2, x_request_id="a b")
    found = abort(bench, names=["", "a b"])
    assert (found.num_requests, found.names) == (0, [])
    assert bench.state.num_unfinished == 2
