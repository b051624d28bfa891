# SPDX-License-Identifier: Apache-2.0
"""W3C trace context, read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mii_zmq.trace_context import TraceContext, new_span_id, new_trace_id, parse, request_name

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@given(trace=st.integers(1, 2**128 - 1), span=st.integers(1, 2**64 - 1), sampled=st.booleans())
def test_round_trip(trace: int, span: int, sampled: bool) -> None:
    context = TraceContext(f"{trace:032x}", f"{span:016x}", sampled, "a=1,b=2")
    assert parse(context.traceparent, context.state) == context


@given(st.one_of(st.text(max_size=80), st.binary(), st.integers(), st.none(), st.floats()))
def test_anything_else_counts_as_absent(value: object) -> None:
    assert parse(value, value) is None


@pytest.mark.parametrize(
    "text",
    [
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f" 00-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-{'x' * 300}",
    ],
)
def test_invalid(text: str) -> None:
    assert parse(text) is None


def test_later_versions_and_other_flags_are_read() -> None:
    assert parse(f"01-{TRACE}-{SPAN}-03-more") == TraceContext(TRACE, SPAN, True)
    assert parse(f"00-{TRACE}-{SPAN}-02") == TraceContext(TRACE, SPAN, False)


@pytest.mark.parametrize("state", ["a" * 513, "a=1\n", "ü=1", 5, None])
def test_invalid_state_is_left_out(state: object) -> None:
    assert parse(f"00-{TRACE}-{SPAN}-01", state) == TraceContext(TRACE, SPAN, True, "")


def test_spans_below_another() -> None:
    context = TraceContext(new_trace_id(), new_span_id(), True, "a=1")
    found = {context.derived(number).span_id for number in range(100)}
    assert len(found) == 100
    assert context.derived(7) == context.derived(7)
    assert context.child() != context.child()
    for below in (context.derived(1), context.child()):
        assert (below.trace_id, below.is_sampled, below.state) == (context.trace_id, True, "a=1")
        assert parse(below.traceparent, below.state) == below


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\n", "<script>", None, 5, b"a"])
def test_odd_names_of_requests_are_not_repeated(given: object) -> None:
    assert request_name(given, bytes(16)) == "0" * 32
    assert request_name("a:1.2_3-B", bytes(16)) == "a:1.2_3-B"
