# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.errors import ProtocolError
from mii_zmq.logprobs import Entry, Record, decode_records, encode_records

entries = st.builds(
    Entry,
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.floats(-1e4, 0, width=32) | st.just(float("-inf")),
    st.binary(max_size=12),
)
records = st.builds(Record, st.booleans(), entries, st.lists(entries, max_size=3).map(tuple))


@given(first=st.lists(records, max_size=4), second=st.lists(records, max_size=3))
@settings(max_examples=60, deadline=None)
def test_joined_records_come_back_in_order(first: list[Record], second: list[Record]) -> None:
    assert decode_records(encode_records(first) + encode_records(second)) == first + second


@given(found=st.lists(records, min_size=1, max_size=3), cut=st.integers(1, 10**6))
@settings(max_examples=60, deadline=None)
def test_what_is_cut_is_refused_or_ends_at_a_record(found: list[Record], cut: int) -> None:
    data = encode_records(found)
    data = data[: cut % len(data)]
    try:
        assert decode_records(data) == found[: len(decode_records(data))]
    except ProtocolError:
        pass


@pytest.mark.parametrize("data", [b"\0", b"\0\0", b"\0\1", b"\0\1" + bytes(13), b"\0\1" + bytes(12) + b"\5\0abc"])
def test_half_records_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="log-probabilities"):
        decode_records(data)


def test_the_form_is_that_of_the_page() -> None:
    record = Record(True, Entry(5, 2, -0.5, b"ab"), (Entry(1, 1, -0.25, b""),))
    assert encode_records([record]).hex() == (
        "0102" + "05000000" + "02000000" + "000000bf" + "0200" + "6162" + "01000000" + "01000000" + "000080be" + "0000"
    )
