# SPDX-License-Identifier: Apache-2.0
"""What a worker answers with its tokenizer alone."""

from __future__ import annotations

from typing import Any

import pytest

from mii_zmq.errors import InvalidRequest, PromptTooLong
from mii_zmq.protocol import GenerateHeader, Verb, decode, encode
from mii_zmq.tokenizer import FakeTokenizer
from mii_zmq.worker.active_request import ActiveRequest, RequestTimes
from mii_zmq.worker.engine_channel import ids_to_bytes
from mii_zmq.worker.intake import Intake
from mii_zmq.worker.plan import EngineLimits
from mii_zmq.worker.text_tasks import MAX_TEXT, TextAnswer

LIMITS = EngineLimits(257, max_model_len=8, num_blocks=1, block_size=16, max_sequences=8, token_budget=64)


def answer(body: dict[str, Any], *, stream: bool = False) -> TextAnswer:
    message = decode(encode(Verb.GENERATE, bytes(16), {"deployment": "d"}, body))
    found = Intake(FakeTokenizer(), LIMITS).prepare(message, GenerateHeader(deployment="d", stream=stream), seq_id=3)
    assert isinstance(found, TextAnswer)
    return found


def test_prompt_longer_than_the_context() -> None:
    found = answer({"task": "tokenize", "prompt": "é" * 20})
    assert (found.token_ids, found.text) == (list("é".encode() * 20), "é" * 20)


def test_conversation() -> None:
    found = answer({"task": "tokenize", "messages": [{"role": "user", "content": "hi"}]})
    assert found.text == "user: hi\nassistant: "
    assert found.token_ids == list(found.text.encode())


def test_ids() -> None:
    assert answer({"task": "detokenize", "prompt_token_ids": [104, 105, 256]}) == TextAnswer([104, 105, 256], "hi<eos>")


@pytest.mark.parametrize(
    ("body", "stream", "param"),
    [
        ({"task": "detokenize", "prompt": "hi"}, False, "prompt_token_ids"),
        ({"task": "detokenize", "prompt_token_ids": [257]}, False, "prompt_token_ids"),
        ({"task": "tokenize", "prompt": ""}, False, "prompt"),
        ({"task": "tokenize", "prompt": "a"}, True, "stream"),
    ],
)
def test_refused(body: dict[str, Any], stream: bool, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        answer(body, stream=stream)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"task": "tokenize", "prompt": "a" * (MAX_TEXT + 1)}, "prompt"),
        ({"task": "detokenize", "prompt_token_ids": [1] * (MAX_TEXT + 1)}, "prompt_token_ids"),
        ({"task": "tokenize", "messages": [{"role": "user", "content": "a" * (2 * MAX_TEXT)}]}, "messages"),
    ],
)
def test_too_long_is_refused_before_the_work(body: dict[str, Any], param: str) -> None:
    with pytest.raises(PromptTooLong) as error:
        answer(body)
    assert error.value.param == param


def test_final_message() -> None:
    request = ActiveRequest(bytes(16), link=0, client=0, stream=False, seq_id=1, times=RequestTimes(0.0))
    assert request.prepared(TextAnswer([1, 2], "ab")) == "stop"
    body, raw = request.final("stop")
    assert (body.prompt_length, body.generated_length, body.text, raw) == (2, 0, "ab", (ids_to_bytes([1, 2]),))
