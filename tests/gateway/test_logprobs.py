# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities at the doors: what is asked of the engine, and how its records are shown."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.generations import MAX_LOGPROB_BYTES
from mii_zmq.gateway.logprob_bodies import LogprobView
from mii_zmq.gateway.openai_schemas import parse_chat, parse_completion
from mii_zmq.logprobs import Entry, Record, encode_records
from tests.gateway.fake_client import FakeClient, FakeGeneration
from tests.gateway.reading import post, read_chunks

PROMPT = [
    Record(True, Entry(1, 0, 0.0, b"Hi"), ()),
    Record(True, Entry(2, 3, -2.0, b" you"), (Entry(9, 1, -0.5, b" me"),)),
]
EURO = "€".encode()
OUTPUT = [
    Record(False, Entry(3, 1, -0.25, EURO[:1]), (Entry(3, 1, -0.25, EURO[:1]), Entry(4, 2, -1.5, b"x"))),
    Record(False, Entry(5, 7, float("-inf"), EURO[1:]), (Entry(4, 1, -0.125, b"x"), Entry(6, 2, -3.0, b"x"))),
]
DATA = encode_records([*PROMPT, *OUTPUT])
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
COMPLETION = {"model": "fake", "prompt": "a"}


def raw(fields: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(msgspec.json.encode(fields), type=dict[str, msgspec.Raw])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None)),
        ({"logprobs": 0}, (0, None)),
        ({"logprobs": False}, (None, None)),
        ({"logprobs": 5, "echo": True}, (5, 5)),
        ({"echo": True}, (None, None)),
        ({"prompt_logprobs": 2}, (None, 2)),
        ({"logprobs": 1, "echo": True, "prompt_logprobs": 2, "max_tokens": 0}, (1, 2)),
    ],
)
def test_what_a_completion_asks_of_the_engine(fields: dict[str, Any], expected: tuple[int | None, int | None]) -> None:
    params = parse_completion(raw({**COMPLETION, **fields})).params
    assert (params.logprobs, params.prompt_logprobs) == expected


def test_what_a_chat_asks_of_the_engine() -> None:
    asked = parse_chat(raw({**CHAT, "logprobs": True, "top_logprobs": 4, "logit_bias": {"7": -100}}))
    assert (asked.params.logprobs, asked.params.prompt_logprobs) == (4, None)
    assert asked.params.logit_bias == {7: -100.0}
    assert asked.bodies()[0].params["logit_bias"] == {"7": -100.0}
    assert parse_chat(raw({**CHAT, "logprobs": True})).params.logprobs == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "logit_bias": {"x": 1}}, "logit_bias"),
        ({**CHAT, "logit_bias": {"5": 101}}, "logit_bias"),
        ({**CHAT, "logit_bias": {"-5": 1}}, "logit_bias"),
        ({**CHAT, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({**CHAT, "allowed_token_ids": []}, "allowed_token_ids"),
        ({**COMPLETION, "logprobs": True}, "logprobs"),
        ({**COMPLETION, "logprobs": 21}, "logprobs"),
        ({**COMPLETION, "prompt_logprobs": -1}, "prompt_logprobs"),
        ({**COMPLETION, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({**COMPLETION, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    parse = parse_chat if "messages" in fields else parse_completion
    with pytest.raises(InvalidRequest) as caught:
        parse(raw(fields))
    assert caught.value.param == param
    assert param in caught.value.message


def test_the_chat_form() -> None:
    found = LogprobView(is_chat=True, num_top=1).choice(DATA)
    replaced = {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -0.25, "bytes": [0xE2]}
    assert found == {
        "content": [
            {**replaced, "top_logprobs": [replaced]},
            {
                "token": "\N{REPLACEMENT CHARACTER}" * 2, "logprob": -9999.0, "bytes": [0x82, 0xAC],
                "top_logprobs": [{"token": "x", "logprob": -0.125, "bytes": [0x78]}],
            },
        ],
        "refusal": None,
    }  # fmt: skip


def test_the_completions_form_with_the_prompt() -> None:
    found = LogprobView(is_chat=False, num_top=2, echo=True).choice(DATA)
    assert found == {
        "text_offset": [0, 2, 6, 6],
        "tokens": ["Hi", " you", "bytes:\\xe2", "bytes:\\x82\\xac"],
        "token_logprobs": [None, -2.0, -0.25, -9999.0],
        "top_logprobs": [
            None,
            {" me": -0.5, " you": -2.0},
            {"bytes:\\xe2": -0.25, "x": -1.5},
            {"x": -0.125, "bytes:\\x82\\xac": -9999.0},
        ],
    }


def test_rows_of_a_stream_continue_each_others_offsets() -> None:
    writer = LogprobView(is_chat=False, num_top=0, by_id=True).writer()
    first, second = (
        writer.write(encode_records([*PROMPT, OUTPUT[0]])),
        writer.write(encode_records([OUTPUT[1], *OUTPUT])),
    )
    assert first["tokens"] == ["token_id:3"]
    assert first["top_logprobs"] == [{"token_id:3": -0.25}]
    assert second["text_offset"] == [0, 1, 1]


def test_vllms_form_of_prompts() -> None:
    found = LogprobView(is_chat=True, num_top=None, num_prompt_top=1).prompt(DATA)
    assert found == {
        "prompt_logprobs": [
            None,
            {
                "2": {"logprob": -2.0, "rank": 3, "decoded_token": " you"},
                "9": {"logprob": -0.5, "rank": 1, "decoded_token": " me"},
            },
        ]
    }
    assert LogprobView(is_chat=True, num_top=None).prompt(DATA) == {}


def answer(generation: FakeGeneration) -> None:
    """Two tokens; the second one has no text of its own."""
    generation.push("€", logprobs=encode_records(OUTPUT[:1]))
    generation.push("", logprobs=encode_records(OUTPUT[1:]))
    generation.finish("length")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/mii/fake"])
async def test_streams_and_whole_answers_show_the_same(
    path: str, http: aiohttp.ClientSession, broker: FakeClient
) -> None:
    broker.answer = answer
    body = {
        "/v1/chat/completions": {**CHAT, "logprobs": True, "top_logprobs": 2},
        "/v1/completions": {**COMPLETION, "logprobs": 2},
        "/mii/fake": {"prompts": "a", "logprobs": 2},
    }[path]
    _, whole = await post(http, path, body)
    expected = whole[0]["logprobs"] if path == "/mii/fake" else whole["choices"][0]["logprobs"]
    async with http.post(path, json={**body, "stream": True}) as response:
        events = await read_chunks(response)
    shown = [event if path == "/mii/fake" else event["choices"][0] for event in events]
    parts = [item["logprobs"] for item in shown if item.get("logprobs")]
    assert len(parts) == 2
    if path == "/mii/fake":
        assert [*parts[0], *parts[1]] == expected
    else:
        for name, values in expected.items():
            assert values is None or [*parts[0][name], *parts[1][name]] == values


@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_an_answer_holds_is_refused(
    http: aiohttp.ClientSession, broker: FakeClient, stream: bool
) -> None:
    many = encode_records(OUTPUT) * (MAX_LOGPROB_BYTES // (2 * len(encode_records(OUTPUT))) + 1)

    def answer(generation: FakeGeneration) -> None:
        generation.push("a", logprobs=many)
        generation.finish("length")

    broker.answer = answer
    asked = {"model": "fake", "prompt": "a", "logprobs": 1, "n": 2, "stream": stream}
    async with http.post("/v1/completions", json=asked) as response:
        text = await response.text()
        assert response.status == (200 if stream else 400)
    assert "log-probabilities of this request exceed" in text
    assert all(sent.final or sent.is_cancelled.is_set() for sent in broker.sent)
