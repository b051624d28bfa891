# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii_zmq.bench_metrics import (
    Failure,
    RequestRecord,
    distribution,
    max_concurrency,
    max_tokens_per_s,
    meets_objectives,
    parse_goodput,
    percentile,
    summarize,
)
from mii_zmq.errors import ConfigError
from tests.bench_server import record

seconds = st.floats(0, 1000, allow_subnormal=False)


def test_latencies_of_one_request() -> None:
    one = record(0.2, 0.3, ttft=0.5, ended_at=1.1, output_tokens=4)
    assert one.ttft_s == 0.5
    assert one.e2el_s == 1.1
    # The time after the first token, over the three other tokens, however many chunks there were.
    assert one.tpot_s == pytest.approx(0.2)
    assert one.itls_s == pytest.approx([0.2, 0.3])


def test_an_output_of_one_token_has_no_tpot_and_meets_every_objective_for_it() -> None:
    one = record(ttft=0.5)
    assert one.tpot_s is None
    assert one.itls_s == []
    assert meets_objectives(one, {"tpot": 0.001})


def test_an_output_without_any_text_has_its_first_token_at_its_end() -> None:
    one = RequestRecord(prompt_tokens=1, output_tokens=3, sent_at=1.0, ended_at=3.0)
    assert (one.ttft_s, one.e2el_s, one.tpot_s) == (2.0, 2.0, 0.0)


def test_a_summary_counts_tokens_of_completed_requests_and_failures_by_kind() -> None:
    failed = replace(record(prompt_tokens=1000), failure=Failure("HTTP 429", "slow down"))
    broken = replace(failed, failure=Failure("broken connection", "reset"))
    records = [
        record(0.1, 0.1, prompt_tokens=10),
        record(0.1, prompt_tokens=20, has_usage=False),
        failed,
        failed,
        broken,
    ]
    found = summarize(records, 2.0)
    assert (found.num_completed, found.num_failed, found.num_without_usage) == (2, 3, 1)
    assert found.failures == {"HTTP 429": 2, "broken connection": 1}
    assert (found.total_input_tokens, found.total_output_tokens) == (30, 5)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (1.0, 2.5, 17.5)
    assert found.request_goodput is None
    assert found.latencies["itl"] is not None
    assert found.latencies["itl"].median == pytest.approx(100)


def test_nothing_completed_has_no_latencies() -> None:
    found = summarize([replace(record(), failure=Failure("timeout", ""))], 1.0)
    assert set(found.latencies.values()) == {None}
    assert found.request_throughput == 0
    assert summarize([], 0.0).output_throughput == 0


def test_goodput_asks_for_all_objectives_at_once() -> None:
    quick, late, slow = record(0.01, 0.01), record(0.01, 0.01, ttft=0.6), record(0.2, 0.2)
    failed = replace(quick, failure=Failure("timeout", ""))
    objectives = parse_goodput(["ttft:500", "tpot:50"])
    assert objectives == {"ttft": 500.0, "tpot": 50.0}
    assert summarize([quick, late, slow, failed], 4.0, objectives=objectives).request_goodput == 0.25
    assert summarize([quick, late], 4.0, objectives={"e2el": 200.0}).request_goodput == 0.25


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:nan", "itl:5", "tpot:x", ""])
def test_wrong_objectives_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=repr(text)):
        parse_goodput([text])


@given(st.lists(seconds, min_size=1), st.floats(0, 100))
def test_distributions_are_numpys(values: list[float], percent: float) -> None:
    found = distribution(values, [percent])
    assert found is not None
    in_ms = np.array(values) * 1000
    close = {"rel": 1e-9, "abs": 1e-6}
    assert found.mean == pytest.approx(in_ms.mean(), **close)
    assert found.median == pytest.approx(np.median(in_ms), **close)
    assert found.std == pytest.approx(in_ms.std(), rel=1e-6, abs=1e-3)
    assert found.percentiles[percent] == pytest.approx(np.percentile(in_ms, percent), **close)


@given(st.lists(seconds, min_size=1), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_ascend_within_the_values(values: list[float], low: float, high: float) -> None:
    ordered = sorted(values)
    low, high = sorted((low, high))
    assert ordered[0] <= percentile(ordered, low) <= percentile(ordered, high) <= ordered[-1]


@given(st.lists(seconds, min_size=1, max_size=20), st.integers(1, 50))
def test_latencies_add_up(gaps: list[float], num_more_tokens: int) -> None:
    one = record(*gaps, output_tokens=1 + num_more_tokens)
    assert one.tpot_s is not None
    assert one.ttft_s + one.tpot_s * num_more_tokens == pytest.approx(one.e2el_s)
    assert one.ttft_s + math.fsum(one.itls_s) == pytest.approx(one.e2el_s)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=20))
def test_concurrency_is_the_most_that_overlap_at_a_moment(spans: list[tuple[int, int]]) -> None:
    records = [record(sent_at=start, ended_at=start + length) for start, length in spans]
    overlaps = [sum(start <= moment < start + length for start, length in spans) for moment in range(41)]
    assert max_concurrency(records) == max(overlaps)


def test_the_fullest_second_counts_from_the_first_request() -> None:
    first = record(sent_at=0.5, ended_at=2.0, chunk_times=(0.6, 1.4, 1.6))
    second = record(sent_at=0.9, ended_at=2.0, chunk_times=(1.7,))
    assert max_tokens_per_s([second, first]) == 2
    assert max_tokens_per_s([]) == 0
