# SPDX-License-Identifier: Apache-2.0
"""Request ids, foreign origins, unknown paths."""

from __future__ import annotations

import aiohttp
import pytest

from tests.gateway.fake_client import FakeClient


async def test_request_id_comes_back(http: aiohttp.ClientSession) -> None:
    async with http.get("/", headers={"X-Request-ID": "abc-1.2_3"}) as response:
        assert response.headers["X-Request-ID"] == "abc-1.2_3"
        assert (await response.json())["service"] == "mii_zmq gateway"
    for odd in ("a b", "x" * 200, "<script>", ""):
        async with http.post(
            "/mii/fake", json={"prompts": "a", "stream": True}, headers={"X-Request-ID": odd}
        ) as response:
            assert len(response.headers["X-Request-ID"]) == 32


@pytest.mark.parametrize(
    "origin", ["http://evil.test", "null", "https://127.0.0.1", "http://[", "", "http://a@127.0.0.1"]
)
async def test_foreign_origins_are_refused(origin: str, http: aiohttp.ClientSession, broker: FakeClient) -> None:
    for path, body in (("/mii/fake", {"prompts": "a"}), ("/v1/completions", {"model": "fake", "prompt": "a"})):
        async with http.post(path, json=body, headers={"Origin": origin}) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers
    assert broker.sent == []


async def test_own_origin_is_served(http: aiohttp.ClientSession, address: tuple[str, int]) -> None:
    origin = f"http://{address[0]}:{address[1]}"
    async with http.post("/mii/fake", json={"prompts": "a"}, headers={"Origin": origin}) as response:
        assert response.status == 200


async def test_unknown_paths_are_404_json(http: aiohttp.ClientSession) -> None:
    for path in ("/nothing", "/mii/", "/mii", "/v1", "/../etc/passwd", "/terminate"):
        async with http.get(path) as response:
            assert response.status == 404
            assert "message" in await response.json()
