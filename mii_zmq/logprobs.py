# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities on the wire: a self-contained record per token, so that records can be joined and passed on unread.

    flags (u8: 1 prompt token, else output token) | number of entries (u8) | entries
    entry: token id (i32) | rank (i32) | log-probability (f32) | bytes of text (u16) | text

All numbers little endian. A record's first entry is the token itself, the others are the most probable ones in its
place, descending, whether or not the token is among them. The first token of a prompt follows nothing: its rank is 0
and its log-probability means nothing. The text of a token is what it adds to a text; it need not be whole characters.
Written by the worker, which has the tokenizer, read by the doors; those between see bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mii_zmq.errors import ProtocolError

_HEAD = struct.Struct("<BB")
_ENTRY = struct.Struct("<iifH")
_PROMPT = 1
MAX_TEXT_BYTES = 2**16 - 1
"""Longer token texts are cut."""


class Entry(NamedTuple):
    """One token in one place."""

    token_id: int
    rank: int
    """1: the most probable one. 0: it follows nothing."""
    logprob: float
    """Natural logarithm."""
    text: bytes


class Record(NamedTuple):
    """What is known of one place."""

    is_prompt: bool
    chosen: Entry
    """The token that stands there."""
    top: tuple[Entry, ...]
    """The most probable ones, descending."""


def encode_record(is_prompt: bool, entries: Sequence[tuple[int, int, float, bytes]]) -> bytes:
    """`entries` as in `Entry`, the token itself first."""
    parts = [_HEAD.pack(is_prompt, len(entries))]
    for token_id, rank, logprob, text in entries:
        text = text[:MAX_TEXT_BYTES]
        parts += (_ENTRY.pack(token_id, rank, logprob, len(text)), text)
    return b"".join(parts)


def encode_records(records: Iterable[Record]) -> bytes:
    return b"".join(encode_record(record.is_prompt, (record.chosen, *record.top)) for record in records)


def decode_records(data: bytes) -> list[Record]:
    """Raises ProtocolError when `data` does not hold whole records."""
    records = []
    at = 0
    try:
        while at < len(data):
            flags, count = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            entries = []
            for _ in range(count):
                token_id, rank, logprob, length = _ENTRY.unpack_from(data, at)
                at += _ENTRY.size + length
                entries.append(Entry(token_id, rank, logprob, data[at - length : at]))
            records.append(Record(flags == _PROMPT, entries[0], tuple(entries[1:])))
    except (struct.error, IndexError):
        raise ProtocolError("a row's log-probabilities are malformed") from None
    if at != len(data):
        raise ProtocolError("a row's log-probabilities end early")
    return records
