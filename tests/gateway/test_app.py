# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import logging

import pytest


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /mii/m HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\r\n\r\n",
    ],
    ids=["TLS", "no Host", "bad length", "ZMTP"],
)
async def test_what_is_no_http_is_answered_and_not_logged(
    data: bytes, address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data + b"\r\n\r\n")
    assert b" 400 " in await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
