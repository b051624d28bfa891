# SPDX-License-Identifier: Apache-2.0
"""What a client does with a response: read events, or the whole answer as one awaitable."""

from __future__ import annotations

import json
from typing import Any

import aiohttp


async def read_events(response: aiohttp.ClientResponse) -> list[str]:
    """The data of every event; checks the framing."""
    text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


async def read_chunks(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """The decoded events of a stream that ended well."""
    *chunks, done = await read_events(response)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


async def read_named_events(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """The decoded events of a stream whose events have names; each bears its own as `type`."""
    text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events = []
    for event in text[:-2].split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def post(
    http: aiohttp.ClientSession, path: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Status and decoded body."""
    async with http.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()
