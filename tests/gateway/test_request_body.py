# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes come, parsing ends with a value or with an error of ours, and it ends soon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway import rest
from mii_zmq.gateway.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from mii_zmq.gateway.openai_schemas import parse_chat, parse_completion
from mii_zmq.gateway.request_body import Fields, split_fields
from mii_zmq.sampling_params import SamplingParams

PARSERS: list[Callable[[Fields], Any]] = [rest.parse, parse_chat, parse_completion]
NAMES = sorted({*SamplingParams.__struct_fields__, "prompts", *CHAT_FIELDS, *COMPLETION_FIELDS})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def parse_all(body: bytes) -> None:
    for parse in PARSERS:
        try:
            parse(split_fields(body)).bodies()
        except InvalidRequest as error:
            assert error.message  # noqa: PT017 - either outcome is fine
            error.message.encode()


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), VALUES, max_size=6))
def test_any_json_object(fields: dict[str, Any]) -> None:
    defaults = {"prompts": "a", "model": "m", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    parse_all(json.dumps(fields).encode("utf-8", "surrogatepass"))
    parse_all(json.dumps(defaults | fields).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": "\\ud800"}', "at or behind prompt: a broken escape or a lone surrogate (byte 12)"),
        (b'{"prompt": "a\\ud800", "model": "m"}', "at or behind prompt: a broken escape or a lone surrogate (byte"),
        (b'{"prompt": "a', "Input data was truncated"),
        (b'{"prompt": NaN}', "at or behind prompt: NaN and infinity do not exist in JSON (byte 11)"),
    ],
)
def test_what_is_no_json_is_said_with_its_place(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        split_fields(body)
    assert reason in caught.value.message


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,\\ud8a0-1eNI ', max_size=40).map(str.encode))
def test_any_bytes(body: bytes) -> None:
    parse_all(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"' * 2**19,
        b'":' * 2**19,
        b'{"a":' + b" " * 2**20,
        b'{"a":' + b"[" * 499 + b'"a":' * 2**18,
        b'{"a":[' + b",".join([b'{"a":' * 240 + b"1" + b"}" * 240] * 700) + b'],"b":' + b"[" * 2000,
        b'{"prompts":"' + b"\\" * (2**20 - 1) + b'"}',
        b'{"prompts":[' + b"{}," * 2**18 + b"{}]}",
        b'{"messages":[' + b"{}," * 2**18 + b"{}]}",
    ],
    ids=lambda body: body[:16].decode() + "...",
)
def test_hostile_megabytes_take_no_time(body: bytes) -> None:
    start = time.process_time()
    with pytest.raises(InvalidRequest):
        rest.parse(split_fields(body))
    assert time.process_time() - start < 0.1


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"b":'])
def test_nesting_names_the_field_whatever_the_brackets(opening: bytes) -> None:
    with pytest.raises(InvalidRequest, match="zz is nested too deeply") as caught:
        split_fields(b'{"prompts":"a","zz":' + opening * 100_000)
    assert caught.value.param == "zz"
