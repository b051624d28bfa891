# SPDX-License-Identifier: Apache-2.0
"""The state machine by example: what each event makes the broker send."""

from __future__ import annotations

import pytest

from mii_zmq.protocol import MAX_HEADER_BYTES, NO_ID, Verb, decode, encode, iterate_tokens, pack
from tests.broker.bench import Bench, packed, request_id, row

REQ = (b"req", b"")
GROUP_WAIT_S = 10.0


def bench_with(*workers: str, **settings: object) -> Bench:
    bench = Bench(**settings)
    for index, name in enumerate(workers):
        bench.ready(name, incarnation=index + 1)
    return bench


def numbers_at(bench: Bench, name: str) -> list[int]:
    """Requests that a worker was given."""
    messages = bench.received[(name.encode(),)]
    return [int.from_bytes(m.request_id, "big") for m in messages if m.verb is Verb.GENERATE]


class TestOneRequest:
    def test_stream_from_acceptance_to_final(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        assert bench.verbs("c") == ["ACCEPTED"]
        assert numbers_at(bench, "w") == [1]
        bench.tokens("w", row(1, 0, [7], "a"))
        bench.tokens("w", row(1, 1, [8], "b", "stop"))
        bench.final("w", 1)
        assert bench.verbs("c", 1) == ["ACCEPTED", "TOKENS", "TOKENS", "FINAL"]
        assert bench.token_ids("c", 1) == [7, 8]
        assert bench.state.num_unfinished == 0
        assert bench.state.counters.finished == {"stop": 1}

    def test_unstreamed_request_gets_final_alone(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1, stream=False)
        assert bench.verbs("c") == []
        bench.final("w", 1, "length")
        assert bench.verbs("c") == ["FINAL"]

    def test_worker_gets_body_and_raw_frames_untouched_and_header_completed(self) -> None:
        bench = bench_with("w")
        body = b"\xc1 not even msgpack"
        header = {"deployment": "m", "stream": True, "future_key": [1], "client": 99, "attempt": 5, "first_seq": 7}
        header["deadline_ms"] = 900
        bench.client("c", Verb.GENERATE, 1, header, body=body, raw=(bytes(8), b"x"))
        sent = bench.last("w", Verb.GENERATE)
        assert sent.body == body
        assert sent.raw == [bytes(8), b"x"]
        assert sent.header == {**header, "client": 1, "attempt": 0, "first_seq": 0, "deadline_ms": 900}

    def test_rows_of_a_batching_client_pass_as_they_came(self) -> None:
        bench = bench_with("w")
        bench.hello("c")
        bench.generate("c", 1)
        bench.generate("c", 2)
        bench.tokens("w", row(1, 0, [1], "é"), row(2, 0, [2, 3], "x"), client=1)
        message = bench.last("c", Verb.TOKENS)
        assert [d.token_ids for d in iterate_tokens(message)] == [b"\1\0\0\0", b"\2\0\0\0\3\0\0\0"]
        assert message.header["client"] == 1
        assert bench.state.counters.forwarded_messages == 1
        assert bench.state.counters.forwarded_tokens == 3

    def test_plain_client_gets_one_message_per_request(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.generate("c", 2)
        bench.tokens("w", row(1, 0, [1], "a"), row(2, 0, [2], "b"))
        assert bench.verbs("c", 1) == ["ACCEPTED", "TOKENS"]
        assert bench.verbs("c", 2) == ["ACCEPTED", "TOKENS"]
        assert [len(m.header["rows"]) for m in bench.received[(b"c",)] if m.verb is Verb.TOKENS] == [1, 1]

    def test_worker_error_passes_untouched(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        header = {"code": "context_length_exceeded", "message": "too long", "param": "prompt", "emitted_tokens": 0}
        bench.worker("w", encode(Verb.ERROR, request_id(1), header))
        assert bench.error("c") == header
        assert bench.state.counters.errors == {"context_length_exceeded": 1}

    def test_request_with_a_missing_row_goes_on_elsewhere_and_a_repeated_row_is_dropped(self) -> None:
        bench = bench_with("w", "v")
        bench.hello("c")
        bench.generate("c", 1)
        bench.tokens("w", row(1, 0, [1]))
        bench.tokens("w", row(1, 0, [1]))
        assert bench.token_ids("c", 1) == [1]
        bench.tokens("w", row(1, 2, [3]))
        assert bench.verbs("w")[-1] == "CANCEL"
        assert bench.state.counters.dropped_rows == 2
        again = bench.last("v", Verb.GENERATE)
        assert (again.raw, again.header["first_seq"], again.header["attempt"]) == ([packed([1])], 1, 1)
        bench.tokens("w", row(1, 1, [66]))
        bench.tokens("v", row(1, 1, [2]))
        assert bench.token_ids("c", 1) == [1, 2]


class TestRefusals:
    @pytest.mark.parametrize(
        ("header", "code", "param"),
        [
            ({}, "protocol", None),
            ({"deployment": 5}, "protocol", "deployment"),
            ({"deployment": "m", "stream": 1}, "protocol", "stream"),
            ({"deployment": "nope"}, "unknown_deployment", "deployment"),
            ({"deployment": "m", "priority": 2**40}, "invalid_request", "priority"),
            ({"deployment": "m", "deadline_ms": 0}, "invalid_request", "deadline_ms"),
        ],
    )
    def test_bad_headers(self, header: dict[str, object], code: str, param: str | None) -> None:
        bench = bench_with("w")
        bench.client("c", Verb.GENERATE, 1, header)
        assert bench.last("c").request_id == request_id(1)
        assert bench.error("c")["code"] == code
        assert bench.error("c").get("param") == param
        assert bench.state.num_unfinished == 0
        bench.generate("c", 2)
        assert bench.verbs("c", 2) == ["ACCEPTED"]

    def test_unknown_deployment_names_the_known_ones(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1, deployment="n")
        assert "'n'" in bench.error("c")["message"]
        assert "known: m" in bench.error("c")["message"]

    def test_before_any_worker_registered_the_name_may_still_come(self) -> None:
        bench = Bench()
        bench.generate("c", 1)
        assert bench.error("c")["code"] == "no_workers"
        assert bench.error("c")["retryable"] is True
        bench.advance(11)
        bench.generate("c", 2)
        assert bench.error("c")["code"] == "unknown_deployment"

    def test_a_deployment_that_the_client_has_seen_is_waited_for(self) -> None:
        bench = bench_with("w")
        bench.client("c", Verb.GENERATE, 1, {"deployment": "n", "seen": True})
        bench.ready("v", incarnation=9, deployment="n")
        assert numbers_at(bench, "v") == [1]

    def test_that_wait_is_bounded(self) -> None:
        bench = bench_with("w")
        bench.client("c", Verb.GENERATE, 1, {"deployment": "n", "seen": True})
        bench.advance(11, ("w",))
        assert bench.error("c")["code"] == "no_workers"
        assert set(bench.state.status(bench.now)["deployments"]) == {"m"}
        bench.client("c", Verb.GENERATE, 2, {"deployment": "n", "seen": True})
        assert bench.error("c")["code"] == "unknown_deployment"

    def test_a_header_that_a_worker_might_not_take_is_refused(self) -> None:
        """The broker adds to it, and the numbers in it may need more bytes in its own spelling."""
        bench = bench_with("w")
        bench.client("c", Verb.GENERATE, 1, {"deployment": "m", "future": bytes(MAX_HEADER_BYTES - 50)})
        assert bench.error("c")["code"] == "request_too_large"
        bench.client("c", Verb.GENERATE, 2, {"deployment": "m", "future": bytes(60_000)})
        assert len(bench.last("w", Verb.GENERATE).header["future"]) == 60_000
        assert bench.state.requests.held_bytes > 60_000

    def test_header_nested_as_deeply_as_can_be_read_is_passed_on(self) -> None:
        bench = bench_with("w")
        frames = encode(Verb.GENERATE, request_id(1), {"deployment": "m", "x": 0})
        frames[3] = frames[3][:-1] + b"\x91" * 1000 + b"\x90"
        bench.perform(bench.state.client_message((b"c",), decode(frames), bench.now))
        assert numbers_at(bench, "w") == [1]

    def test_zero_id_duplicate_id_and_bad_resume(self) -> None:
        bench = bench_with("w")
        bench.client("c", Verb.GENERATE, None, {"deployment": "m"})
        assert bench.error("c")["param"] == "request_id"
        bench.generate("c", 1)
        bench.generate("c", 1)
        assert bench.error("c")["param"] == "request_id"
        assert bench.state.num_unfinished == 1
        bench.generate("c", 2, raw=(b"abc",))
        assert bench.error("c")["param"] == "resume"

    def test_verbs_that_clients_may_not_send(self) -> None:
        bench = bench_with("w")
        bench.client("c", Verb.READY, None, {})
        assert bench.error("c")["code"] == "protocol"

    def test_error_about_a_cancel_does_not_look_like_the_end_of_the_request(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.client("c", Verb.CANCEL, 1, {"request_ids": 5})
        assert bench.last("c").request_id == NO_ID
        assert bench.state.num_unfinished == 1

    def test_draining_broker_refuses_and_finishes(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.state.drain()
        bench.generate("c", 2)
        assert bench.error("c")["code"] == "draining"
        assert not bench.state.is_finished
        bench.final("w", 1)
        assert bench.state.is_finished

    def test_a_draining_broker_says_so_in_its_heartbeats(self) -> None:
        bench = bench_with("w")
        bench.hello("c")
        bench.client("c", Verb.HEARTBEAT)
        assert "is_draining" not in bench.last("c").header
        assert bench.state.status(bench.now)["deployments"]["m"]["takes_requests"] is True
        bench.state.drain()
        bench.client("c", Verb.HEARTBEAT)
        assert bench.last("c").header["is_draining"] is True
        assert bench.state.status(bench.now)["deployments"]["m"]["takes_requests"] is False

    def test_close_ends_everything_with_an_error(self) -> None:
        bench = bench_with("w")
        bench.hello("c")
        bench.generate("c", 1)
        bench.perform(bench.state.close(bench.now))
        assert bench.verbs("c", 1) == ["ACCEPTED", "ERROR"]
        assert bench.verbs("w")[-2:] == ["CANCEL", "DISCONNECT"]
        assert bench.verbs("c")[-1] == "DISCONNECT"


class TestQueue:
    def test_room_priority_and_order(self) -> None:
        bench = Bench()
        bench.ready("w", max_requests=1)
        bench.generate("c", 1)
        bench.generate("c", 2)
        bench.generate("c", 3, priority=-1)
        bench.generate("c", 4)
        for number in (1, 3, 2, 4):
            bench.final("w", number)
        assert numbers_at(bench, "w") == [1, 3, 2, 4]

    def test_full_queue(self) -> None:
        bench = Bench(max_queued_requests=2)
        bench.ready("w", max_requests=1)
        for number in range(1, 4):
            bench.generate("c", number)
        bench.generate("c", 4)
        assert bench.error("c")["code"] == "overloaded"
        assert bench.error("c")["retry_after_ms"] > 0
        assert bench.state.counters.refused == 1

    def test_client_limit(self) -> None:
        bench = bench_with("w", max_client_requests=1)
        bench.generate("c", 1)
        bench.generate("c", 2)
        bench.generate("d", 3)
        assert bench.verbs("c", 2) == ["ERROR"]
        assert bench.verbs("d", 3) == ["ACCEPTED"]

    def test_byte_limit(self) -> None:
        bench = bench_with("w")
        bench.state.requests.held_bytes = 2**30 - 2
        bench.state.check = lambda: None  # type: ignore[method-assign]
        bench.generate("c", 1)
        assert bench.error("c")["code"] == "overloaded"

    def test_deadline_passes_in_the_queue(self) -> None:
        bench = Bench()
        bench.ready("w", max_requests=1)
        bench.generate("c", 1)
        bench.generate("c", 2, deadline_ms=300)
        bench.advance(0.5, ("w",))
        assert bench.error("c")["code"] == "deadline_exceeded"
        bench.final("w", 1)
        assert numbers_at(bench, "w") == [1]

    def test_deadline_that_passed_since_the_last_tick(self) -> None:
        bench = Bench()
        bench.ready("w", max_requests=1)
        bench.generate("c", 1)
        bench.generate("c", 2, deadline_ms=10)
        bench.now += 0.02
        bench.final("w", 1)
        assert numbers_at(bench, "w") == [1]
        assert bench.verbs("c", 2) == ["ACCEPTED", "ERROR"]

    def test_forwarded_deadline_is_what_is_left(self) -> None:
        bench = Bench()
        bench.ready("w", max_requests=1)
        bench.generate("c", 1)
        bench.generate("c", 2, deadline_ms=5000)
        bench.now += 2
        bench.final("w", 1)
        assert bench.last("w", Verb.GENERATE).header["deadline_ms"] == pytest.approx(3000, abs=2)

    def test_worker_that_ignores_a_deadline(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1, deadline_ms=1000)
        bench.advance(2.9, ("w",))
        assert bench.verbs("c", 1) == ["ACCEPTED"]
        bench.advance(0.3, ("w",))
        assert bench.error("c")["code"] == "deadline_exceeded"
        assert "CANCEL" in bench.verbs("w")

    def test_waits_for_a_group_that_left_a_moment_ago_only(self) -> None:
        bench = bench_with("w")
        bench.worker("w", encode(Verb.DISCONNECT))
        bench.generate("c", 1)
        assert bench.verbs("c") == ["ACCEPTED"]
        bench.advance(GROUP_WAIT_S - 0.5)
        bench.generate("c", 2)
        bench.ready("v")
        assert numbers_at(bench, "v") == [1, 2]
        bench.final("v", 1)
        bench.final("v", 2)
        bench.worker("v", encode(Verb.DISCONNECT))
        bench.generate("c", 3)
        bench.advance(GROUP_WAIT_S + 0.5)
        assert bench.error("c")["code"] == "no_workers"
        bench.generate("c", 4)
        assert bench.verbs("c", 4) == ["ERROR"]

    def test_who_waits_in_vain_with_a_deadline_behind_him_ends_once(self) -> None:
        bench = bench_with("w", group_wait_s=0.5)
        bench.generate("c", 1)
        bench.generate("c", 2, deadline_ms=300)
        bench.advance(0.5, ("w",))
        bench.worker("w", encode(Verb.DRAIN))
        bench.worker("w", encode(Verb.DISCONNECT))
        bench.advance(1.0)
        codes = [m.header["code"] for m in bench.received[(b"c",)] if m.verb is Verb.ERROR]
        assert codes == ["worker_lost", "worker_lost"]
        assert bench.state.num_unfinished == 0

    def test_request_that_must_wait_for_its_own_cancellation_lets_others_pass(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.client("c", Verb.CANCEL, 1)
        bench.generate("c", 1)
        bench.generate("c", 2)
        assert numbers_at(bench, "w") == [1, 2]
        bench.worker("w", encode(Verb.ERROR, request_id(1), {"code": "cancelled", "message": ""}))
        assert numbers_at(bench, "w") == [1, 2, 1]
        assert bench.verbs("c", 1) == ["ACCEPTED", "ERROR", "ACCEPTED"]


class TestRouting:
    def test_least_outstanding_tokens(self) -> None:
        bench = bench_with("w", "v")
        bench.generate("c", 1, num_tokens=1000)
        bench.generate("c", 2, num_tokens=10)
        bench.generate("c", 3, num_tokens=10)
        assert numbers_at(bench, "w") == [1]
        assert numbers_at(bench, "v") == [2, 3]

    def test_forwarded_tokens_count_no_longer(self) -> None:
        bench = bench_with("w", "v")
        bench.generate("c", 1, num_tokens=20)
        bench.generate("c", 2, num_tokens=10)
        bench.tokens("w", row(1, 0, list(range(15))))
        bench.generate("c", 3, num_tokens=10)
        assert numbers_at(bench, "w") == [1, 3]

    def test_equal_groups_take_turns(self) -> None:
        bench = bench_with("w", "v")
        for number in range(1, 5):
            bench.generate("c", number)
            bench.final("w" if number in numbers_at(bench, "w") else "v", number)
        assert len(numbers_at(bench, "w")) == len(numbers_at(bench, "v")) == 2

    def test_load_from_other_brokers_counts(self) -> None:
        bench = bench_with("w", "v")
        bench.heartbeat("w", outstanding_tokens=5000)
        bench.heartbeat("v", incarnation=2, outstanding_tokens=0)
        bench.generate("c", 1, num_tokens=10)
        bench.generate("c", 2, num_tokens=10)
        assert numbers_at(bench, "v") == [1, 2]

    def test_deployments_are_apart(self) -> None:
        bench = bench_with("w")
        bench.ready("v", deployment="n", incarnation=2)
        bench.generate("c", 1, deployment="n")
        assert numbers_at(bench, "v") == [1]
        assert numbers_at(bench, "w") == []


class TestCancel:
    def test_running_and_waiting(self) -> None:
        bench = Bench()
        bench.ready("w", max_requests=1)
        bench.generate("c", 1)
        bench.generate("c", 2)
        bench.client("c", Verb.CANCEL, None, {"request_ids": [request_id(1), request_id(2), request_id(9)]})
        assert bench.verbs("c", 1) == bench.verbs("c", 2) == ["ACCEPTED", "ERROR"]
        assert bench.error("c")["code"] == "cancelled"
        assert bench.last("w").verb is Verb.CANCEL
        assert bench.last("w").request_id == request_id(1)
        bench.client("c", Verb.CANCEL, 1)
        bench.final("w", 1)
        assert bench.verbs("c", 1) == ["ACCEPTED", "ERROR"]
        assert bench.state.counters.dropped_rows == 0

    def test_others_requests_are_out_of_reach(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.client("d", Verb.CANCEL, 1)
        assert bench.state.num_unfinished == 1
        assert bench.verbs("d") == []

    def test_several_in_one_message_to_the_group(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.generate("c", 2)
        bench.client("c", Verb.DISCONNECT)
        assert sorted(bench.last("w").header["request_ids"]) == [request_id(1), request_id(2)]
        assert bench.verbs("c") == ["ACCEPTED", "ACCEPTED"]

    def test_late_rows_after_cancel_are_dropped(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.client("c", Verb.CANCEL, 1)
        bench.tokens("w", row(1, 0, [1]))
        assert bench.verbs("c", 1) == ["ACCEPTED", "ERROR"]
        assert bench.state.counters.dropped_rows == 1


class TestClients:
    def test_welcome_and_heartbeat(self) -> None:
        bench = bench_with("w")
        bench.hello("c")
        welcome = bench.last("c").header
        assert welcome["deployments"] == ["m"]
        assert welcome["heartbeat_ms"] == 500
        assert welcome["capabilities"] == ["batch", "credit", "logprobs", "abort", "reset_prefix_cache"]
        bench.client("c", Verb.HEARTBEAT)
        assert bench.last("c").header == {"epoch": welcome["epoch"]}

    def test_heartbeat_without_hello_is_fenced(self) -> None:
        bench = bench_with("w")
        bench.client("c", Verb.HEARTBEAT)
        assert bench.verbs("c") == ["DISCONNECT"]

    def test_silent_client_is_given_up(self) -> None:
        bench = bench_with("w")
        bench.hello("c")
        bench.generate("c", 1)
        bench.advance(3.5, ("w",))
        # Its requests end without a word: should it be alive, it sends them again after HELLO.
        assert bench.verbs("c")[-1] == "DISCONNECT"
        assert bench.state.num_unfinished == 0
        assert "CANCEL" in bench.verbs("w")

    def test_vanished_client_is_found_by_asking(self) -> None:
        bench = bench_with("w")
        bench.hello("c")
        bench.generate("c", 1)
        bench.kill("c")
        bench.advance(1.0, ("w",))
        assert bench.state.num_unfinished == 0
        assert "CANCEL" in bench.verbs("w")

    def test_plain_client_owes_no_heartbeats_and_is_forgotten_when_idle(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.advance(5, ("w",))
        assert bench.state.num_unfinished == 1
        bench.final("w", 1)
        for _ in range(700):
            bench.now += 0.9
            bench.perform(bench.state.tick(bench.now))
        assert not bench.state.clients.by_address

    def test_request_sent_again_on_a_new_connection_moves_there(self) -> None:
        bench = bench_with("w", "v")
        bench.generate("c", 1)
        bench.tokens("w", row(1, 0, [1]))
        bench.generate("d", 1, raw=(b"\1\0\0\0",))
        assert bench.error("c")["code"] == "cancelled"
        assert "CANCEL" in bench.verbs("w")
        assert numbers_at(bench, "v") == [1]
        bench.tokens("v", row(1, 0, [2], offset=1))
        bench.final("v", 1)
        assert bench.verbs("d", 1) == ["ACCEPTED", "TOKENS", "FINAL"]

    def test_one_shot_socket(self) -> None:
        bench = bench_with("w")
        bench.generate(REQ, 1)
        assert bench.error(REQ)["param"] == "stream"
        bench.generate(REQ, 2, stream=False)
        bench.final("w", 2)
        for verb in (Verb.CANCEL, Verb.HEARTBEAT, Verb.STATUS, Verb.HELLO):
            bench.client(REQ, verb)
        bench.client(REQ, Verb.CREDIT, None, {"credit": 1})
        assert bench.verbs(REQ) == ["ERROR", "FINAL", "ERROR", "ERROR", "STATUS", "WELCOME", "ERROR"]

    def test_credit_that_makes_no_sense(self) -> None:
        bench = bench_with("w")
        bench.client("c", Verb.HELLO, None, {"credit": -1})
        assert bench.error("c")["param"] == "credit"
        bench.client("c", Verb.HEARTBEAT)
        assert bench.verbs("c")[-1] == "DISCONNECT", "it has not said HELLO, and owes no heartbeats"
        bench.client("c", Verb.CREDIT, 8, {"credit": 0})
        assert bench.error("c")["param"] == "credit"
        bench.clear()
        bench.client("c", Verb.CREDIT, 8, {"credit": 2})
        assert bench.verbs("c") == []

    def test_stalled_broker_blames_nobody(self) -> None:
        bench = bench_with("w")
        bench.hello("c")
        bench.generate("c", 1)
        bench.advance(0.3)
        bench.now += 60
        bench.perform(bench.state.tick(bench.now))
        assert bench.state.num_unfinished == 1
        assert bench.state.workers.by_address

    def test_stalls_again_and_again_keep_nobody_alive(self) -> None:
        bench = bench_with("v", "w", group_wait_s=5.0)
        bench.hello("c")
        bench.hello("d")
        bench.generate("c", 1)
        bench.generate("d", 2)
        for _ in range(20):
            bench.now += 1.5
            bench.advance(0.3, heartbeats=("v",), clients=("d",))
        assert bench.state.clients.by_address.keys() == {(b"d",)}
        assert [group.name for group in bench.state.workers.by_address.values()] == ["v"]
        for _ in range(60):
            bench.now += 1.5
            bench.advance(0.3, clients=("d",))
        assert not bench.state.workers.by_address
        assert bench.error("d")["code"] == "worker_lost"

    def test_status(self) -> None:
        bench = bench_with("w")
        bench.heartbeat("w", outstanding_tokens=7, running=1)
        bench.generate("c", 1)
        bench.client("c", Verb.STATUS, 5)
        body = bench.state.status(bench.now)
        assert bench.last("c").body == pack(body)
        group = body["deployments"]["m"]["groups"][0]
        assert group["group"] == "w"
        assert group["num_requests"] == 1
        assert group["load"]["running"] == 1
        assert body["counters"]["accepted"] == 1
        assert body["num_clients"] == 1
