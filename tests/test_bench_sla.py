# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii_zmq.bench_metrics import Failure
from mii_zmq.bench_sla import effective_throughput, meets_sla, moving_averages, sla_share
from tests.bench_server import record

gaps = st.lists(st.floats(0, 100, allow_subnormal=False), max_size=40)


def test_the_moving_average_is_that_of_pandas() -> None:
    # pandas.Series([1, 2, 3, 10]).ewm(span=3).mean()
    assert moving_averages([1.0, 2.0, 3.0, 10.0], 3) == pytest.approx([1.0, 5 / 3, 17 / 7, 6.466666666666667])
    assert moving_averages([]) == []


@given(gaps, st.integers(1, 32))
def test_the_moving_average_is_the_weighted_mean_of_all_values_so_far(values: list[float], span: int) -> None:
    keep = 1 - 2 / (span + 1)
    for index, average in enumerate(moving_averages(values, span)):
        weights = [keep**age for age in range(index, -1, -1)]
        expected = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert average == pytest.approx(expected, abs=1e-9)


def test_the_first_token_has_a_second_for_every_512_tokens_of_the_prompt() -> None:
    assert meets_sla(record(ttft=1.0, prompt_tokens=512), 4)
    assert not meets_sla(record(ttft=1.01, prompt_tokens=512), 4)
    assert meets_sla(record(ttft=5.0, prompt_tokens=2600), 4)


def test_the_rate_must_hold_from_the_first_gap_on() -> None:
    assert meets_sla(record(*[0.24] * 50), 4)
    assert not meets_sla(record(*[0.25] * 50), 4)
    assert not meets_sla(record(0.3, *[0.01] * 50), 4)
    # One long gap after many short ones is forgiven: its weight is 2 / 17.
    assert meets_sla(record(*[0.1] * 50, 1.0), 4)
    assert not meets_sla(record(*[0.1] * 50, 1.0, 1.0), 4)


@given(gaps)
def test_a_slower_rate_is_easier_to_meet(values: list[float]) -> None:
    met = [meets_sla(record(*values), rate) for rate in (2, 4, 6)]
    assert met == sorted(met, reverse=True)


def test_effective_throughput_counts_failed_requests_as_missed() -> None:
    good, slow = record(0.1), record(0.3)
    records = [good, good, slow, replace(good, failure=Failure("timeout", ""))]
    assert effective_throughput(records, 4.0, 4) == 0.5
    assert sla_share(records, 4) == 0.5
    assert effective_throughput(records, 4.0, 2) == 0.75
    assert (effective_throughput([], 0.0, 4), sla_share([], 4)) == (0.0, 0.0)
