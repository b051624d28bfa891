# SPDX-License-Identifier: Apache-2.0
"""From the socket to named, typed fields: reads a JSON body within its limits and decodes it field by field.

The outer object is split into raw fields first, so that an unknown or ignored field is never decoded, a known one is
decoded straight into its type, and every error names its field. Nothing is decoded before its size was checked. Knows
no door's field names.
"""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any

import msgspec
from aiohttp import http_exceptions, web

from mii_zmq.config import MAX_BODY_BYTES
from mii_zmq.errors import InvalidRequest, RequestTooLarge
from mii_zmq.gateway.http_errors import JSON, BodyTimeout, UnsupportedMediaType
from mii_zmq.gateway.state import GATEWAY

MAX_SHOWN_CHARS = 80

Fields = dict[str, msgspec.Raw]

_split = msgspec.json.Decoder(Fields)
_BYTE = re.compile(r"\(byte (\d+)\)")
_NESTING = re.compile(rb'"([^"\\]{1,80})":((?:[\[{\s]|"[^"\\]{0,80}":)*+)')
"""A key and all that opens behind it, taken whole and never given back, so that time is linear in the body's length."""
_HALF_AT_END = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}.{0,6}\Z", re.DOTALL)
"""The first half of a surrogate pair with no room behind it for the second one."""
MAX_OPENED = 500


async def read_fields(request: web.Request) -> Fields:
    """The fields of the request's JSON object, undecoded.

    Raises:
        UnsupportedMediaType, RequestTooLarge, BodyTimeout, InvalidRequest.
    """
    if request.content_type != JSON:
        raise UnsupportedMediaType(f"the content type is {_shown(request.content_type)!r}; send {JSON}")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMediaType(f"the body is compressed ({_shown(encoding)}); send it uncompressed")
    return split_fields(await _read(request))


def split_fields(body: bytes) -> Fields:
    """Split a JSON object into its fields; a name that occurs twice counts as its last value."""
    try:
        return _split.decode(body)
    except RecursionError:
        name = _deep_field(body)
        raise InvalidRequest(f"{name or 'the body'} is nested too deeply", param=name) from None
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the body must be a JSON object: {error}") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _malformed(body, str(error)) from None


def decode_field(name: str, raw: msgspec.Raw, kind: Any) -> Any:
    """Decode one field strictly into a type.

    Raises:
        InvalidRequest: `param` is the place, e.g. `stop` or `messages[2].content`.
    """
    try:
        return _decoder(kind).decode(raw)
    except RecursionError:
        raise InvalidRequest(f"{name} is nested too deeply", param=name) from None
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        place = name + path.rstrip("`")
        raise InvalidRequest(f"{place}: {reason}", param=place) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(f"{name}: {error}; send valid JSON in UTF-8", param=name) from None


async def _read(request: web.Request) -> bytes:
    announced = request.content_length
    timeout_s = request.app[GATEWAY].body_timeout_s
    if announced is not None and announced > MAX_BODY_BYTES:
        raise RequestTooLarge(f"the body has {announced} bytes; the limit is {MAX_BODY_BYTES}")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while data := await request.content.readany():
                body += data
                if len(body) > MAX_BODY_BYTES:
                    raise RequestTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {timeout_s:g} s") from None
    except (web.RequestPayloadError, http_exceptions.PayloadEncodingError) as error:
        raise InvalidRequest(f"the body is malformed: {error}") from None
    return bytes(body)


def _deep_field(body: bytes) -> str | None:
    """The first key behind which more opens than any request needs."""
    for found in _NESTING.finditer(body):
        opened = found.group(2)
        if len(opened) >= MAX_OPENED and sum(map(opened.count, (b"[", b"{", b":"))) >= MAX_OPENED:
            return found.group(1).decode("utf-8", "replace")
    return None


def _malformed(body: bytes, reason: str) -> InvalidRequest:
    """Says where: the parser names a byte (none where it ran out of them); the nearest key before it is shown."""
    if body.startswith(b"\xef\xbb\xbf"):
        return InvalidRequest("the body starts with a byte order mark; send plain UTF-8")
    found = _BYTE.search(reason)
    at = int(found.group(1)) if found else len(body)
    if body[at : at + 3] in (b"NaN", b"Inf", b"-In"):
        reason = f"NaN and infinity do not exist in JSON (byte {at})"
    half = _HALF_AT_END.search(body) if found is None else None
    if half is not None:
        # The parser looked for the other half behind the body's end.
        at, reason = half.start(), "surrogate"
    if "escape" in reason or "surrogate" in reason:
        reason = f"a broken escape or a lone surrogate (byte {at})"
    end = body.rfind(b'":', 0, at)
    name = body[body.rfind(b'"', 0, end) + 1 : end] if end > 0 else b""
    if not 0 < len(name) <= MAX_SHOWN_CHARS or b"\\" in name or "trailing" in reason:
        return InvalidRequest(f"the body is not valid JSON: {reason}")
    shown = name.decode("utf-8", "replace")
    return InvalidRequest(f"the body is not valid JSON at or behind {shown}: {reason}", param=shown)


@functools.lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
