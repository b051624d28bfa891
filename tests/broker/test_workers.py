# SPDX-License-Identifier: Apache-2.0
"""Registration, fencing, loss and drain of worker groups, by example."""

from __future__ import annotations

import pytest

from mii_zmq.broker.workers import MAX_HISTOGRAMS
from mii_zmq.protocol import HistogramValues, Load, Verb, WorkerHeartbeat, encode
from tests.broker.bench import Bench, request_id, row
from tests.broker.test_state import bench_with, numbers_at


class TestRegistration:
    def test_ready_and_heartbeat_are_answered(self) -> None:
        bench = bench_with("w")
        assert bench.last("w").header == {"epoch": bench.state.epoch, "heartbeat_ms": 500, "liveness": 6}
        bench.heartbeat("w")
        assert bench.verbs("w") == ["REGISTERED", "HEARTBEAT"]

    def test_status_shows_the_histograms_of_the_last_heartbeat(self) -> None:
        bench = bench_with("w")

        def beat(*names: str) -> None:
            found = {name: HistogramValues([0.1], [2, 1], 0.5) for name in names}
            header = WorkerHeartbeat(incarnation=request_id(1), state="ready", load=Load(), histograms=found)
            bench.worker("w", encode(Verb.HEARTBEAT, header=header))

        beat("prefill")
        (group,) = bench.state.status(bench.now)["deployments"]["m"]["groups"]
        assert group["histograms"] == {"prefill": {"bounds": [0.1], "counts": [2, 1], "total": 0.5}}
        beat(*map(str, range(MAX_HISTOGRAMS + 1)))
        assert "at most 64 histograms, not 65" in bench.last("w", Verb.DISCONNECT).header["reason"]

    def test_unregistered_worker_is_told_at_a_bounded_rate(self) -> None:
        bench = Bench()
        for _ in range(5):
            bench.tokens("w", row(1, 0, [1]))
        assert bench.verbs("w") == ["DISCONNECT"]
        bench.advance(0.5)
        bench.heartbeat("w")
        assert bench.verbs("w") == ["DISCONNECT", "DISCONNECT"]
        assert bench.state.counters.fenced == 6

    def test_duplicate_name_is_refused_visibly(self) -> None:
        bench = bench_with("w")
        bench.ready("v", "w", incarnation=2)
        assert bench.last("v").verb is Verb.DISCONNECT
        assert bench.last("v").header["reason"].startswith("duplicate")
        assert list(bench.state.workers.by_address) == [(b"w",)]

    def test_successor_of_a_dead_group_gets_in_at_its_second_try(self) -> None:
        bench = bench_with("w")
        bench.kill("w")
        bench.ready("v", "w", incarnation=2)
        bench.ready("v", "w", incarnation=2)
        assert bench.last("v").verb is Verb.REGISTERED

    def test_after_a_broker_restart_leftovers_are_cancelled(self) -> None:
        bench = Bench()
        bench.heartbeat("w")
        bench.ready("w", in_flight=[request_id(7), request_id(8)])
        assert bench.verbs("w") == ["DISCONNECT", "REGISTERED", "CANCEL"]
        # A request sent again with its old id waits until the leftover has ended.
        bench.generate("c", 7)
        assert numbers_at(bench, "w") == []
        bench.tokens("w", row(7, 40, [1]))
        bench.worker("w", encode(Verb.ERROR, request_id(7), {"code": "cancelled", "message": ""}))
        assert numbers_at(bench, "w") == [7]

    def test_news_on_the_same_connection(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.ready("w", max_requests=1, info={"k": 1})
        bench.generate("c", 2)
        assert numbers_at(bench, "w") == [1]
        bench.final("w", 1)
        assert numbers_at(bench, "w") == [1, 2]

    def test_same_incarnation_on_a_new_connection_keeps_what_it_still_runs(self) -> None:
        bench = bench_with("w")
        for number in (1, 2, 3):
            bench.generate("c", number)
        bench.tokens("w", row(1, 0, [1]), row(2, 0, [1]))
        bench.kill("w")
        bench.ready("v", "w", in_flight=[request_id(1)])
        assert bench.verbs("v")[0] == "REGISTERED"
        bench.tokens("v", row(1, 1, [2]))
        assert bench.token_ids("c", 1) == [1, 2]
        assert numbers_at(bench, "v") == [2, 3]
        assert bench.last("v", Verb.GENERATE).raw == []
        bench.tokens("v", row(2, 1, [5]))
        assert bench.token_ids("c", 2) == [1, 5]
        assert not any(request.crashes for request in bench.state.requests.by_id.values())

    def test_request_that_a_group_no_longer_lists_is_lost(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.generate("c", 2)
        bench.tokens("w", row(1, 0, [1]))
        bench.ready("w")
        assert numbers_at(bench, "w") == [1, 2, 1]
        bench.advance(1.5, ("w",))
        bench.ready("w", in_flight=[request_id(1)])
        assert numbers_at(bench, "w") == [1, 2, 1, 2]

    @pytest.mark.parametrize(
        "change",
        [
            {"deployment": "a b"}, {"deployment": ""}, {"group": ""}, {"group": "x" * 300}, {"incarnation": b"1"},
            {"max_requests": 0}, {"in_flight": [b"x"]}, {"max_model_len": "1"}, {"info": 5},
        ],
    )  # fmt: skip
    def test_bad_ready(self, change: dict[str, object]) -> None:
        bench = Bench()
        ready = {"group": "g", "incarnation": bytes(16), "deployment": "m", "max_requests": 1, "max_model_len": 1}
        bench.worker("w", encode(Verb.READY, header={**ready, **change}))
        assert bench.verbs("w") == ["DISCONNECT"]
        assert not bench.state.workers.by_address


class TestLoss:
    def test_requests_go_on_elsewhere_with_and_without_output(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.generate("c", 2)
        bench.generate("c", 3, stream=False)
        bench.tokens("w", row(1, 0, [1, 2], "ab"))
        bench.ready("v")
        bench.perform(bench.state.worker_gone((b"w",), bench.now))
        # None of them had got far, so each is suspected: one at a time, as long as they can wait.
        assert numbers_at(bench, "v") == [1]
        bench.tokens("w", row(1, 1, [66], offset=2))
        bench.tokens("v", row(1, 1, [3], "c", offset=2))
        assert bench.token_ids("c", 1) == [1, 2, 3]
        bench.final("v", 1)
        assert numbers_at(bench, "v") == [1, 2]
        bench.advance(2.2, ("v",))
        assert numbers_at(bench, "v") == [1, 2, 3]
        assert bench.last("v", Verb.GENERATE).header["attempt"] == 1
        bench.tokens("v", row(2, 0, [5]))
        bench.final("v", 2)
        bench.final("v", 3)
        assert bench.verbs("c", 1) == ["ACCEPTED", "TOKENS", "TOKENS", "FINAL"]
        assert bench.verbs("c", 2) == ["ACCEPTED", "TOKENS", "FINAL"]
        assert (bench.state.counters.retries, bench.state.counters.resumes) == (3, 1)
        assert bench.state.counters.resumed_tokens == 2

    def test_missed_heartbeats(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.advance(2.9)
        assert bench.state.workers.by_address
        bench.ready("v", incarnation=2)
        bench.advance(0.3)
        assert numbers_at(bench, "v") == [1]
        bench.tokens("w", row(1, 0, [9]))
        assert bench.verbs("w")[-1] == "DISCONNECT"
        assert bench.token_ids("c", 1) == []

    def test_closed_connection_is_found_by_asking(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.kill("w")
        bench.advance(1.0)
        assert not bench.state.workers.by_address
        assert bench.state.num_unfinished == 1

    def test_retried_requests_stand_in_front(self) -> None:
        bench = Bench()
        bench.ready("w", max_requests=1)
        bench.generate("c", 1)
        bench.generate("c", 2)
        bench.worker("w", encode(Verb.DISCONNECT))
        bench.ready("v", incarnation=2, max_requests=1)
        bench.final("v", 1)
        assert numbers_at(bench, "v") == [1, 2]

    def test_worker_error_before_output_is_retried_elsewhere(self) -> None:
        bench = bench_with("w", "v")
        bench.generate("c", 1)
        bench.worker("w", encode(Verb.ERROR, request_id(1), {"code": "worker_lost", "message": "engine died"}))
        assert numbers_at(bench, "v") == [1]
        assert bench.verbs("c", 1) == ["ACCEPTED"]

    def test_worker_that_breaks_the_protocol_is_cut_off(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.worker(
            "w", encode(Verb.TOKENS, request_id(1), {"rows": [[request_id(1), 0, 0, 5, 0, None]]}, raw=(b"", b""))
        )
        assert bench.verbs("w")[-1] == "DISCONNECT"
        assert not bench.state.workers.by_address
        assert bench.verbs("c", 1) == ["ACCEPTED"]

    def test_wrong_incarnation_is_fenced(self) -> None:
        bench = bench_with("w")
        bench.heartbeat("w", incarnation=9)
        assert bench.verbs("w")[-1] == "DISCONNECT"


class TestDrain:
    def test_running_requests_finish_new_ones_go_elsewhere(self) -> None:
        bench = bench_with("w")
        bench.generate("c", 1)
        bench.worker("w", encode(Verb.DRAIN))
        bench.generate("c", 2)
        bench.ready("v", incarnation=2)
        bench.final("w", 1)
        bench.worker("w", encode(Verb.DISCONNECT))
        assert numbers_at(bench, "w") == [1]
        assert numbers_at(bench, "v") == [2]
        assert bench.state.counters.groups_lost == 0

    def test_request_that_crossed_the_drain_is_sent_elsewhere(self) -> None:
        bench = bench_with("w", "v", max_attempts=1)
        bench.generate("c", 1)
        bench.worker("w", encode(Verb.ERROR, request_id(1), {"code": "draining", "message": "", "retryable": True}))
        assert numbers_at(bench, "v") == [1]
        assert bench.verbs("c", 1) == ["ACCEPTED"]

    def test_state_in_the_heartbeat_counts_too(self) -> None:
        bench = bench_with("w", "v")
        bench.heartbeat("w", "draining")
        bench.generate("c", 1)
        assert numbers_at(bench, "v") == [1]
