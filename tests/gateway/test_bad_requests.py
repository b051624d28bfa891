# SPDX-License-Identifier: Apache-2.0
"""One corpus of bad requests, replayed through every door: a typed 4xx that names the field, fast, and no harm."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from mii_zmq.config import MAX_BODY_BYTES
from tests.gateway.fake_client import FakeClient

LIMIT_S = 0.1
"""Of this process's CPU time, for client and gateway together: what others do on the machine does not count."""


@dataclass(frozen=True)
class Door:
    path: str
    prompt: str
    good: dict[str, Any]
    max_tokens: str

    def body(self, field: str, value: str) -> bytes:
        """A good request with one field replaced by raw JSON text."""
        names = {"max_new_tokens": self.max_tokens, "prompts": self.prompt}
        field = names.get(field, field)
        rest = {name: v for name, v in self.good.items() if name != field}
        return f'{{"{field}":{value},{json.dumps(rest)[1:]}'.replace(",}", "}").encode("utf-8", "surrogatepass")

    def name(self, field: str) -> str:
        return {"max_new_tokens": self.max_tokens, "prompts": self.prompt}.get(field, field)


DOORS = [
    Door("/mii/fake", "prompts", {"prompts": "a b"}, "max_new_tokens"),
    Door("/v1/completions", "prompt", {"model": "fake", "prompt": "a b"}, "max_tokens"),
    Door(
        "/v1/chat/completions",
        "messages",
        {"model": "fake", "messages": [{"role": "user", "content": "a b"}]},
        "max_completion_tokens",
    ),
    Door("/v1/responses", "input", {"model": "fake", "input": "a b"}, "max_output_tokens"),
    Door(
        "/v1/messages",
        "messages",
        {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "a b"}]},
        "max_tokens",
    ),
    Door("/v1/embeddings", "input", {"model": "fake", "input": "a b"}, "dimensions"),
    Door("/v1/score", "text_2", {"model": "fake", "text_1": "a", "text_2": "b"}, "max_tokens"),
    Door("/v1/rerank", "documents", {"model": "fake", "query": "a", "documents": ["b"]}, "max_tokens_per_doc"),
]

BAD_FIELDS = [
    ("temperature", '"hot"'), ("temperature", "-1"), ("temperature", "1e308"), ("temperature", "NaN"),
    ("temperature", "Infinity"), ("temperature", "-Infinity"), ("temperature", "1e999"), ("temperature", "[1]"),
    ("temperature", "true"), ("top_p", "0"), ("top_p", "1.5"), ("top_p", '{"a":1}'), ("top_k", "1.5"),
    ("top_k", "-7"), ("top_k", "9" * 30), ("min_p", "2"), ("n", "0"), ("n", "1000000000"), ("n", "1.0"),
    ("n", "9" * 5000), ("seed", "9" * 30), ("seed", '"x"'), ("stop", "5"), ("stop", "[1]"), ("stop", '[""]'),
    ("stop", '["\\ud800"]'), ("stop", json.dumps(["x"] * 17)), ("stop", json.dumps("y" * 1025)),
    ("stop_token_ids", "[-1]"), ("stop_token_ids", "[1e3]"), ("stop_token_ids", f"[{2**63}]"),
    ("stop_token_ids", json.dumps([1] * 257)), ("bad_words", '[null]'), ("repetition_penalty", "0"),
    ("presence_penalty", "1e999"), ("frequency_penalty", "1000"), ("ignore_eos", '"yes"'), ("ignore_eos", "1"),
    ("max_new_tokens", "0"), ("max_new_tokens", "-5"), ("max_new_tokens", "12345678901234567890123456789012"),
    ("max_new_tokens", '"12"'), ("stream", "1"), ("stream", '"true"'), ("no_such_field", "1"),
    ("temperatur", "1"), ("__class__", "{}"), ("resume", "[]"), ("", "1"), ("z" * 5000, "1"),
    ("prompts", '""'), ("prompts", "[]"), ("prompts", "null"), ("prompts", "5"), ("prompts", "{}"),
    ("prompts", '"\\ud800"'), ("prompts", '"\\udc00 x"'), ("prompts", '[["a"]]'), ("prompts", '["a",null]'),
    ("prompts", "[" * 100_000 + "]" * 100_000), ("prompts", "[" * 100_000), ("temperature", "[" * 100_000),
]  # fmt: skip

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
BAD_FORMS = {
    "/mii/fake": [
        ("structured_output", '"json"'), ("structured_output", "{}"), ("structured_output", '{"kind":"xml"}'),
        ("structured_output", '{"kind":"regex","value":"a","more":1}'), ("structured_output", DEEP),
        ("structured_output", '{"kind":"json_schema","value":"{"}'), ("structured_output", '{"kind":"regex"}'),
        ("structured_output", json.dumps({"kind": "regex", "value": "a" * 70_000})),
        ("structured_output", json.dumps({"kind": "json_schema", "value": "[" * 60_000})),
    ],
    "/v1/completions": [
        ("response_format", "[]"), ("response_format", '{"type":"yaml"}'), ("response_format", DEEP),
        ("response_format", '{"type":"json_object","strict":true}'), ("guided_choice", "[]"), ("guided_choice", '"a"'),
        ("guided_regex", "5"), ("guided_json", '"{"'), ("guided_json", json.dumps("[" * 60_000)),
        ("structural_tag", '"["'), ("structural_tag", DEEP), ("structured_outputs", '{"xml":1}'),
        ("structured_outputs", '{"regex":"a","grammar":"b"}'), ("structured_outputs", DEEP),
        ("structured_outputs", json.dumps({"structural_tag": '{"type":' * 10_000})),
    ],
    "/v1/chat/completions": [
        ("response_format", '{"type":"json_schema","json_schema":{"name":"a"}}'), ("response_format", '{"type":null}'),
        ("response_format", '{"json_schema":{"schema":' + DEEP + ',"name":"a"},"type":"json_schema"}'),
        ("tool_choice", '"required"'), ("tool_choice", '{"type":"function"}'), ("tool_choice", DEEP),
        ("tool_choice", '{"type":"function","function":{"name":"f"}}'),
    ],
    "/v1/responses": [
        ("text", "[]"), ("text", '{"format":{"type":"json_schema"}}'), ("text", '{"format":{"type":"x"}}'),
        ("text", '{"verbosity":"low"}'), ("text", '{"format":' + DEEP + "}"), ("tool_choice", '"required"'),
    ],
    "/v1/messages": [
        ("output_config", "[]"), ("output_config", '{"effort":"max"}'), ("output_config", '{"format":{"type":"x"}}'),
        ("output_config", '{"format":' + DEEP + "}"), ("output_format", '{"type":"json_schema"}'),
        ("tool_choice", '{"type":"any"}'), ("tool_choice", '"any"'), ("tool_choice", '{"type":"tool"}'),
    ],
}  # fmt: skip
"""By path: forms of an answer that cannot be, each the API's own."""

MALFORMED = [
    b"", b"{", b"null", b"[]", b'"x"', b"5", b"{}", b"{'a':1}", b'{"prompts":"a"} x', b"\x00", b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf" + b'{"prompts":"a"}', b'{"prompts":"\xff\xfe"}', b'{"prompts":"\xed\xa0\x80"}',
    b'{"model":"\xc3\x28"}', b"[" * 100_000, b'{"a":' * 100_000, b'{"prompts":NaN}', b'{"\\ud800":1}',
    b'{"prompts":"a","prompts":',
]  # fmt: skip


async def check_refusal(response: aiohttp.ClientResponse, door: Door, status: int | None = None) -> dict[str, Any]:
    body = await response.json()
    assert 400 <= response.status < 500, body
    assert status is None or response.status == status
    assert response.headers["Content-Type"] == "application/json"
    if door.path == "/v1/messages":
        assert body["type"] == "error"
        error = body["error"]
        assert sorted(error) == ["message", "type"]
        assert error["type"] == ("request_too_large" if response.status == 413 else "invalid_request_error")
    elif door.path.startswith("/v1/"):
        error = body["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert error["type"] == "invalid_request_error"
    else:
        assert list(body) == ["message"]
        error = body
    assert len(error["message"]) < 500
    return error


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.path)
async def test_bad_fields_are_refused_by_name(door: Door, http: aiohttp.ClientSession, broker: FakeClient) -> None:
    headers = {"Content-Type": "application/json"}
    for field, value in (*BAD_FIELDS, *BAD_FORMS.get(door.path, ())):
        start = time.process_time()
        async with http.post(door.path, data=door.body(field, value), headers=headers) as response:
            error = await check_refusal(response, door, 400)
        assert time.process_time() - start < LIMIT_S, (field, value[:40])
        name = door.name(field)[:77]
        assert name in error["message"], (field, value[:40], error)
        if "param" in error:
            assert error["param"].startswith(name)
    assert broker.sent == []
    async with http.post(door.path, json=door.good) as response:
        assert response.status == 200


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.path)
async def test_malformed_bodies_are_400(door: Door, http: aiohttp.ClientSession, broker: FakeClient) -> None:
    for data in MALFORMED:
        start = time.process_time()
        async with http.post(door.path, data=data, headers={"Content-Type": "application/json"}) as response:
            await check_refusal(response, door, 400)
        assert time.process_time() - start < LIMIT_S, data[:40]
    assert broker.sent == []


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.path)
async def test_harmless_oddities_are_accepted(door: Door, http: aiohttp.ClientSession) -> None:
    good = json.dumps(door.good)
    for data, content_type in (
        (good.replace("{", '{"stream":true,"stream":false,', 1), "application/json"),
        ("\n\t " + good + "\r\n", "application/json; charset=utf-16"),
        (good, "application/json;charset=bogus"),
    ):
        async with http.post(door.path, data=data.encode(), headers={"Content-Type": content_type}) as response:
            assert response.status == 200, await response.text()


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.path)
async def test_other_content_types_are_415(door: Door, http: aiohttp.ClientSession) -> None:
    good = json.dumps(door.good).encode()
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x"):
        async with http.post(door.path, data=good, headers={"Content-Type": content_type}) as response:
            await check_refusal(response, door, 415)
    bomb = gzip.compress(b"0" * 2**24)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with http.post(door.path, data=bomb, headers=headers) as response:
        await check_refusal(response, door, 415)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.path)
async def test_large_bodies_are_413(door: Door, http: aiohttp.ClientSession) -> None:
    size = MAX_BODY_BYTES + 1

    async def pieces() -> Any:
        for _ in range(size // 2**20 + 1):
            yield b" " * 2**20

    headers = {"Content-Type": "application/json"}
    for data in (io.BytesIO(b" " * size), pieces()):
        async with http.post(door.path, data=data, headers=headers) as response:
            await check_refusal(response, door, 413)
    async with http.post(door.path, json=door.good) as response:
        assert response.status == 200


async def test_too_many_choices_are_refused_before_any_is_sent(http: aiohttp.ClientSession, broker: FakeClient) -> None:
    for path, body in (
        ("/mii/fake", {"prompts": ["a"] * 65, "n": 16}),
        ("/v1/completions", {"model": "fake", "prompt": ["a"] * 65, "n": 16}),
    ):
        async with http.post(path, json=body) as response:
            assert response.status == 400
    assert broker.sent == []


async def test_a_body_that_never_comes_is_408(http: aiohttp.ClientSession, gateway: Any) -> None:
    gateway.body_timeout_s = 0.05

    async def never() -> Any:
        yield b'{"prompts":'
        async with http.get("/health/live") as response:
            assert response.status == 200
        await gate.wait()

    gate = asyncio.Event()
    headers = {"Content-Type": "application/json"}
    async with http.post("/mii/fake", data=never(), headers=headers) as response:
        gate.set()
        assert response.status == 408
