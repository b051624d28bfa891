# SPDX-License-Identifier: Apache-2.0
"""Histograms in fewer buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mii_zmq.telemetry import (
    FIRST_TOKEN_S,
    INTER_TOKEN_S,
    LONG_S,
    REQUEST_S,
    SHORT_S,
    VLLM_FIRST_TOKEN_S,
    VLLM_INTER_TOKEN_S,
    VLLM_REQUEST_S,
    Histogram,
)

PAIRS = [
    (FIRST_TOKEN_S, LONG_S), (FIRST_TOKEN_S, VLLM_FIRST_TOKEN_S), (REQUEST_S, LONG_S), (REQUEST_S, VLLM_REQUEST_S),
    (INTER_TOKEN_S, SHORT_S), (INTER_TOKEN_S, VLLM_INTER_TOKEN_S),
]  # fmt: skip


@given(pair=st.sampled_from(PAIRS), values=st.lists(st.floats(0, 1e5) | st.sampled_from(FIRST_TOKEN_S)))
def test_coarse_is_what_had_been_observed_that_way(
    pair: tuple[tuple[float, ...], tuple[float, ...]], values: list[float]
) -> None:
    fine, bounds = pair
    one, other = Histogram(fine), Histogram(bounds)
    for value in values:
        one.observe(value)
        other.observe(value)
    found = one.coarse(bounds)
    assert (found.bounds, found.counts, found.total) == (other.bounds, other.counts, other.total)


def test_unknown_buckets_stay() -> None:
    histogram = Histogram((1.0, 2.0))
    assert histogram.coarse((1.5,)) is histogram
    assert histogram.coarse((1.0, 2.0)).counts == [0, 0, 0]
