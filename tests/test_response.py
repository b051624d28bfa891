# SPDX-License-Identifier: Apache-2.0
"""Responses and the log-probabilities in them; the engines behind are in test_api and in tests/e2e."""

from __future__ import annotations

import json

import pytest

from mii_zmq.logprobs import Entry, Record, encode_records
from mii_zmq.response import GenerationFinishReason, Response, ResponseReader
from mii_zmq.sampling_params import SamplingParams

A, B = Entry(65, 1, -0.5, b"A"), Entry(200, 3, -2.5, b"\xc3")
FIRST = Record(True, Entry(66, 0, 0.0, b"B"), ())
SECOND = Record(True, B, (A,))
OUTPUT = [Record(False, A, (A, B)), Record(False, B, (A, B))]


def reader(**options: int) -> ResponseReader:
    return ResponseReader(SamplingParams(**options))


def test_records_go_to_the_response_that_follows_them() -> None:
    found = reader(logprobs=2, prompt_logprobs=1)
    found.add(encode_records([FIRST, SECOND]))
    found.add(encode_records(OUTPUT[:1]))
    first = found.response("A", 0, 1)
    assert (first.logprobs, first.prompt_logprobs, first.finish_reason) == (OUTPUT[:1], [None, SECOND], "none")
    found.add(b"")
    found.add(encode_records(OUTPUT[1:]))
    last = found.response("", 2, 2, "length")
    assert (last.logprobs, last.prompt_logprobs, last.finish_reason) == (OUTPUT[1:], None, "length")
    assert found.response("", 2, 2, "stop").logprobs == []


def test_what_was_not_asked_for_is_none() -> None:
    response = reader().response("A", 1, 1, "stop")
    assert (response.logprobs, response.prompt_logprobs) == (None, None)
    only_prompt = reader(prompt_logprobs=0)
    only_prompt.add(encode_records([FIRST]))
    response = only_prompt.response("A", 1, 1, "stop")
    assert (response.logprobs, response.prompt_logprobs) == (None, [None])


@pytest.mark.parametrize("prompt", [None, [None, SECOND]])
def test_a_response_survives_plain_json(prompt: list[Record | None] | None) -> None:
    response = Response("A\ufffd", 2, 2, GenerationFinishReason.LENGTH, OUTPUT, prompt)
    message = response.to_msg_dict()
    assert ("prompt_logprobs" in message) == (prompt is not None)
    assert Response.from_msg_dict(json.loads(json.dumps(message))) == response
