# SPDX-License-Identifier: Apache-2.0
"""What compiled grammars are counted as, against what the allocator says."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

pytest.importorskip("xgrammar")
import xgrammar

from mii_zmq.worker.grammar_memory import bytes_of
from tests.worker.test_grammar_follower import compiled, vocabulary

pytestmark = pytest.mark.slow


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def allocated_bytes() -> int:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("this C library does not say what is allocated")
    library.mallinfo2.restype = Mallinfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def of_fields(number: int, form: dict[str, Any], required: bool = True) -> str:
    names = [f"field_{index}" for index in range(number)]
    return json.dumps(
        {
            "type": "object",
            "properties": dict.fromkeys(names, form),
            "required": names if required else [],
            "additionalProperties": False,
        }
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", of_fields(10, {"enum": ["red", "green", "blue", "white", "black"]})),
        ("json_schema", of_fields(100, {"type": "boolean"})),
        ("json_schema", of_fields(20, {"type": "integer"}, required=False)),
        ("regex", "[a-z]{1,60}-[0-9]{4}"),
        ("choice", json.dumps([f"choice {number}" for number in range(200)])),
    ],
    ids=["enums", "many fields", "optional fields", "pattern", "choices"],
)
def test_a_grammar_takes_about_what_it_is_counted_as(kind: str, text: str) -> None:
    form = compiled(kind, text).serialize_json()
    before = allocated_bytes()
    kept = [xgrammar.CompiledGrammar.deserialize_json(form, vocabulary(kind).info) for _ in range(10)]
    taken = allocated_bytes() - before
    counted = sum(bytes_of(grammar, form) for grammar in kept)
    assert 0.3 * counted < taken < 1.5 * counted
