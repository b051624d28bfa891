# SPDX-License-Identifier: Apache-2.0
"""Schemas, expressions and formats, compiled: which texts may be written and which not."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
import random
import re
import uuid
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("xgrammar")
pytest.importorskip("jsonschema")
import xgrammar

from mii_zmq.worker.grammar_formats import FORMATS
from tests.worker.test_grammar_follower import compiled, vocabulary
from tests.worker.test_grammar_validity import is_writable, walk

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("schema", "writable", "unwritable"),
    [
        ({"type": "string", "pattern": "^(a{1,2}|a)$"}, ['"a"', '"aa"'], ['"aaa"', '""']),
        ({"type": "string", "pattern": r"^[A-Z]+(-[0-9]+)?$"}, ['"AB"', '"AB-12"'], ['"AB12"', '"AB-"']),
        ({"type": "string", "pattern": "^[^é]*$"}, ['"a"'], ['"a""', '"\\"', '"é"']),
        ({"type": "string", "pattern": r'^[^"]+$'}, ['"a"'], ['"""', '"a\\"']),
        ({"type": "string", "pattern": "^[^é]{0,300}$"}, ['""', f'"{"a" * 300}"'], [f'"{"a" * 301}"', '"""', '"é"']),
        # A listed key has its own type, however its letters are spelled.
        (
            {"type": "object", "properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
            ['{"ab":null}', '{"ab":null,"a":true}', '{"abc":true}', '{"é":true}', "{}"],
            ['{"ab":true}', r'{"\u0061b":true}', r'{"\u0061b":null}', '{"ab":null,"ab":true}', '{"a":null}'],
        ),
        ({"type": "object", "properties": {"a": {"type": "null"}}}, ['{"a":null}', "{}"], ['{"b":1}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"b":1}']),
        ({"type": "object"}, ["{}", '{"b":[1]}'], ["[]"]),
        ({"properties": {"a": {}}}, ['{"a":[{"b":"c"}]}'], ["1", '"a"']),
        ({"items": {"type": "null"}}, ["[]", "[null,null]"], ["{}", "[1]"]),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "maxItems": 1}, ["[]", "[null]"],
         ["[null,true]"]),
        ({"type": "integer", "multipleOf": 3, "minimum": -4, "maximum": 7}, ["-3", "0", "6"], ["-6", "1", "9"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "1", "0.000001"], ["0", "-1", "0.0", "1e-9"]),
        (
            {"oneOf": [{"type": "object", "properties": {"k": {"const": k}, k: {"type": "null"}}} for k in "ab"]},
            ['{"k":"a"}', '{"k":"b","b":null}'],
            ["{}", '{"a":null}', '{"k":"a","b":null}'],
        ),
        ({"type": ["object", "null"], "propertyNames": {"pattern": "^a|b$"}}, ["null", '{"a":1,"b":2}'], ['{"ab":1}']),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}}, ["[[],[[]]]"], ["[1]"]),
    ],
    ids=lambda value: str(value)[:80],
)  # fmt: skip
def test_what_may_be_written_and_what_not(schema: Any, writable: list[str], unwritable: list[str]) -> None:
    assert [text for text in writable if not is_writable(schema, text)] == []
    assert [text for text in unwritable if is_writable(schema, text)] == []


def matches(kind: str, value: str, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled(kind, value), override_stop_tokens=[vocabulary(kind).end_id])
    return bool(matcher.accept_string(text) and matcher.accept_token(vocabulary(kind).end_id))


def expression(draw: random.Random, depth: int) -> str:
    kind = draw.random()
    if depth == 0 or kind < 0.25:
        return draw.choice(["a", "b", "1", "[ab]", "[^a]", "[a1]", r"\d", r"\w", "."])
    if kind < 0.55:
        return expression(draw, depth - 1) + expression(draw, depth - 1)
    if kind < 0.65:
        return f"({expression(draw, depth - 1)}|{expression(draw, depth - 1)})"
    repeats = ["*", "+", "?", "{2}", "{1,2}", "{0,1}", "*?", "{2,}", "{0,2}", "{1,3}", "??", "|"]
    repeat = draw.choice(repeats)
    inner = expression(draw, depth - 1)
    return f"(?:{inner}|)" if repeat == "|" else f"({inner}){repeat}"


def flat_expression(draw: random.Random) -> str:
    """Of which the compiler makes an automaton, unlike the others."""
    repeats = ["", "*", "+", "?", "{2}", "{1,2}", "{0,1}", "{2,}", "{0,2}", "{1,3}", "{3}", "{1,}", "{2,4}"]
    sets = ["a", "b", "1", "[ab]", "[^a]", "[a1]", "[aé]", "."]
    return "".join(draw.choice(sets) + draw.choice(repeats) for _ in range(draw.randint(1, 5)))


def compare_expressions(seeds: range, length: int) -> None:
    texts = ["".join(text) for number in range(length + 1) for text in itertools.product("ab1", repeat=number)]
    texts += ["é", "éé", "aé", "éa", "aéb"]
    for seed in seeds:
        draw = random.Random(seed)
        pattern = flat_expression(draw) if seed % 3 == 0 else expression(draw, 4)
        expected = [text for text in texts if re.fullmatch(pattern, text, re.ASCII)]
        tag = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}})
        schema = json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"})
        assert [text for text in texts if matches("json_schema", schema, f'"{text}"')] == expected, pattern
        kind, value = ("regex", pattern) if seed % 2 else ("structural_tag", tag)
        assert [text for text in texts if matches(kind, value, text)] == expected, (kind, pattern)


def test_expressions_match_what_they_match_elsewhere() -> None:
    compare_expressions(range(300), 4)


@pytest.mark.long
def test_the_same_for_many_expressions() -> None:
    compare_expressions(range(100, 1000), 5)


READERS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}
SAMPLES = {
    "date": ["2024-02-29", "2000-02-29", "1999-12-31"],
    "time": ["12:30:45Z", "00:00:00.123+02:00"],
    "date-time": ["2026-12-01T15:48:49Z"],
    "duration": ["P1DT2H", "PT5M", "P3W", "P1Y2M3D"],
    "email": ["a.b+c@example.org"],
    "hostname": ["localhost", "a.example.org"],
    "ipv4": ["127.0.0.1", "255.255.255.255"],
    "ipv6": ["::1", "::", "fe80::1", "2001:db8::8:800:200c:417a", "1:2:3:4:5:6:7:8"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "uri": ["https://example.org/a/b?c=d#e", "mailto:a@b.org", "urn:isbn:123", "http://localhost:8080/"],
    "uri-reference": ["/a/b", "a", "", "https://example.org", "?q=1", "#f"],
    "json-pointer": ["", "/a/b~1c", "/0"],
    "relative-json-pointer": ["0", "1/a", "0#"],
}
NO_SAMPLES = [
    ("date", "1900-02-29"), ("date", "2023-02-30"), ("date", "0000-01-01"), ("time", "24:00:00Z"), ("time", "12:00:00"),
    ("date-time", "2026-12-01 15:48:49Z"), ("ipv4", "01.2.3.4"), ("ipv6", "1:2"), ("ipv6", "1::2::3"), ("uuid", "a"),
    ("ipv6", "1:2:3:4:5:6:7:8:9"), ("email", "a@b"), ("uri", "abc"), ("hostname", "-a"), ("duration", "P"),
    ("json-pointer", "a"), ("json-pointer", "/~2"), ("uri-reference", "a b"), ("relative-json-pointer", "01"),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert [text for text in SAMPLES[name] if not is_writable(schema, f'"{text}"')] == []
    assert [text for form, text in NO_SAMPLES if form == name and is_writable(schema, f'"{text}"')] == []
    num_ended = 0
    for seed in range(12):
        text = walk(schema, seed)
        if text is not None:
            num_ended += 1
            READERS.get(name, str)(json.loads(text))
    assert num_ended
