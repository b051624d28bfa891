# SPDX-License-Identifier: Apache-2.0
"""Random schemas, compiled and held to a validator.

What the masks let end is valid, and plain valid values may be written.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("xgrammar")
pytest.importorskip("jsonschema")
import jsonschema

from tests.worker.test_grammar_follower import EOS, TOKENS, allowed, chars, follow
from tests.worker.test_grammar_schema import ACCEPTED

pytestmark = pytest.mark.slow

MAX_BYTES = 160
Sampler = Callable[[random.Random], Any]
Drawn = tuple[Any, Sampler]
"""A schema, and what draws values that fit it and that may be written."""


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    """JSON Schema's patterns are ECMAScript's, where \\w and \\d are ASCII."""
    if isinstance(instance, str) and re.search(pattern, instance, re.ASCII) is None:
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})


def walk(schema: Any, seed: int) -> str | None:
    """An output of random tokens from the masks, of closing marks with preference; None: too long."""
    draw, text = random.Random(seed), b""
    follower = follow("json_schema", json.dumps(schema))
    while len(text) < MAX_BYTES:
        possible = allowed(follower)
        assert possible, f"nothing can follow {text!r}"
        if EOS in possible and (draw.random() < 0.3 or possible == {EOS}):
            return text.decode()
        preferred = possible & chars('"}]') if draw.random() < 0.4 else set()
        token_id = draw.choice(sorted(preferred or possible - {EOS}))
        follower.accept(token_id)
        text += TOKENS[token_id]
    return None


def is_writable(schema: Any, text: str) -> bool:
    follower = follow("json_schema", json.dumps(schema))
    for byte in [*text.encode(), EOS]:
        possible = allowed(follower)
        if possible is None or byte not in possible:
            return False
        if byte != EOS:
            follower.accept(byte)
    return True


def check(schema: Any, sampler: Sampler | None, seed: int, num_walks: int) -> int:
    """How many outputs ended; all of them are valid."""
    validator, num_ended = Validator(schema), 0
    for number in range(num_walks):
        text = walk(schema, seed * 1000 + number)
        if text is not None:
            num_ended += 1
            assert validator.is_valid(json.loads(text)), f"{text} breaks {json.dumps(schema)}"
    for number in range(num_walks if sampler else 0):
        assert sampler is not None
        value = sampler(random.Random(seed * 1000 + number))
        assert validator.is_valid(value), f"{value} was to fit {json.dumps(schema)}"
        assert is_writable(schema, json.dumps(value, ensure_ascii=False)), (
            f"{value} cannot be written by {json.dumps(schema)}"
        )
    return num_ended


def drawn(draw: random.Random, depth: int = 2) -> Drawn:
    makers = [_integer, _number, _string, _pattern_string, _listed, _typeless, _several_types]
    if depth:
        makers += [_array, _tuple, _object, _open_object, _any_of, _one_of, _map]
    schema, sampler = draw.choice(makers)(draw, depth)
    if draw.random() < 0.2:
        schema = {"title": "t", "default": None, **schema}
    return schema, sampler


def _integer(draw: random.Random, depth: int) -> Drawn:
    low = draw.randint(-120, 120)
    high = low + draw.choice([0, 3, 40, 1100])
    schema: dict[str, Any] = {"type": "integer"}
    if draw.random() < 0.6:
        schema |= draw.choice([{"minimum": low}, {"exclusiveMinimum": low - 1}, {"minimum": low - 0.5}])
    if draw.random() < 0.6:
        schema |= draw.choice([{"maximum": high}, {"exclusiveMaximum": high + 1}, {"maximum": high + 0.5}])
    if len(schema) != 2 and draw.random() < 0.4:
        step = draw.choice([1, 2, 7, 10])
        first = int(-(-low // step) * step)
        if first <= high:
            return schema | {"multipleOf": step}, lambda sample: first
    return schema, lambda sample: sample.randint(low, high)


def _number(draw: random.Random, depth: int) -> Drawn:
    digits = draw.choice([0, 1, 3, 6])
    low = round(draw.uniform(-20, 20), digits)
    high = round(low + draw.choice([1, 2.5, 300]), 6)
    schema: dict[str, Any] = {"type": "number"}
    if draw.random() < 0.7:
        schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
    if draw.random() < 0.7:
        schema[draw.choice(["maximum", "exclusiveMaximum"])] = high
    middle = round((low + high) / 2, 3)
    return schema, lambda sample: middle


def _string(draw: random.Random, depth: int) -> Drawn:
    least, most = draw.randint(0, 3), draw.randint(3, 6)
    schema: dict[str, Any] = {"type": "string"}
    if draw.random() < 0.6:
        schema["minLength"] = least
    if draw.random() < 0.6:
        schema["maxLength"] = most
    return schema, lambda sample: "".join(sample.choices("abcxyz 0/", k=sample.randint(least, most)))


PATTERNS = {
    "^[a-c]{1,3}$": "abc", "^a|b$": "b", r"\d{2}": "42", r"^\w+@\w+$": "a@b", r"^[^a-z]{2}$": "A1", "x.z": "xyz",
    r"^(foo|bar)*$": "foobar", r'^[^"]{0,5}$': "a'b", r"^\S+$": "a", r"^(?:a|b(?:c|d)?)+?$": "abc", "^[é-ü]$": "é",
    r"^\/\-\.$": "/-.", r"^[\w.-]+\s?$": "a.b ", r"\W": "-", r"^\D{2}$": "ab", "^$|^[0-9]$": "7", "": "",
}  # fmt: skip


def _pattern_string(draw: random.Random, depth: int) -> Drawn:
    pattern, value = draw.choice(sorted(PATTERNS.items()))
    return {"type": "string", "pattern": pattern}, lambda sample: value


PLAIN = [1, True, None, "a"]
"""Values that JSON spells in one way only."""


def _listed(draw: random.Random, depth: int) -> Drawn:
    value = draw.choice(PLAIN)
    others = draw.sample(["a", 'q"\\/', "é😀\n", -2.5, 10**15, True, [1, {"a": None}], {"k": "v"}], draw.randint(0, 3))
    return draw.choice([{"const": value}, {"enum": [value, *others]}, {"enum": [*others, value]}]), lambda sample: value


def _typeless(draw: random.Random, depth: int) -> Drawn:
    schema = draw.choice([{}, {"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])
    value = None if "null" in str(schema) else True
    return schema, lambda sample: value


def _several_types(draw: random.Random, depth: int) -> Drawn:
    maker = draw.choice([_integer, _string, _pattern_string, _array, _object])
    schema, sampler = maker(draw, depth - 1)
    return {**schema, "type": [schema["type"], "null"]}, sampler


def _array(draw: random.Random, depth: int) -> Drawn:
    items, sampler = drawn(draw, depth - 1) if depth > 0 else _integer(draw, 0)
    least, most = draw.randint(0, 2), draw.randint(2, 4)
    schema = {"type": "array", "items": items}
    if draw.random() < 0.5:
        schema["minItems"] = least
    if draw.random() < 0.5:
        schema["maxItems"] = most
    return schema, lambda sample: [sampler(sample) for _ in range(sample.randint(least, most))]


def _tuple(draw: random.Random, depth: int) -> Drawn:
    parts = [drawn(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    schema: dict[str, Any] = {"type": "array", "prefixItems": [part[0] for part in parts]}
    if draw.random() < 0.5:
        schema["items"] = draw.choice([False, True, {"type": "null"}])
    if draw.random() < 0.5:
        schema["minItems"] = draw.randint(0, len(parts))
    if draw.random() < 0.4:
        schema["maxItems"] = draw.randint(len(parts), len(parts) + 2)
    return schema, lambda sample: [part[1](sample) for part in parts]


def _object(draw: random.Random, depth: int) -> Drawn:
    parts = {name: drawn(draw, depth - 1) if depth > 0 else _integer(draw, 0) for name in draw.sample("abcd", 3)}
    required = [name for name in parts if draw.random() < 0.5]
    schema: dict[str, Any] = {"type": "object", "properties": {name: part[0] for name, part in parts.items()}}
    if draw.random() < 0.8:
        schema["required"] = required
    if draw.random() < 0.5:
        schema[draw.choice(["additionalProperties", "unevaluatedProperties"])] = False
    if draw.random() < 0.3:
        schema["minProperties"] = draw.randint(0, 3)
    if draw.random() < 0.3:
        schema["maxProperties"] = 3
    return schema, lambda sample: {name: part[1](sample) for name, part in parts.items()}


def _open_object(draw: random.Random, depth: int) -> Drawn:
    """Listed keys beside free ones."""
    schema, sampler = _object(draw, depth)
    schema.pop("unevaluatedProperties", None)
    schema["additionalProperties"] = draw.choice([True, {"type": "boolean"}, {"type": "string", "maxLength": 2}])
    if schema.get("minProperties", 0) > 1:
        schema["minProperties"] = 1
    schema.pop("maxProperties", None)
    return schema, sampler


def _map(draw: random.Random, depth: int) -> Drawn:
    values, sampler = drawn(draw, depth - 1)
    key = draw.choice([{"pattern": "^[a-c]+$"}, {"maxLength": 2}, {"enum": ["a", "b"]}, {"const": "a"}, True])
    schema: dict[str, Any] = {"type": "object", "additionalProperties": values, "propertyNames": key}
    if draw.random() < 0.3:
        schema = {"type": "object", "patternProperties": {"^[a-c]": values}, "additionalProperties": False}
    if draw.random() < 0.3:
        schema |= {"minProperties": 1, "maxProperties": 2}
    return schema, lambda sample: {"a": sampler(sample)}


def _any_of(draw: random.Random, depth: int) -> Drawn:
    parts = [drawn(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.3:
        return {"allOf": [parts[0][0]]}, parts[0][1]
    return {"anyOf": [part[0] for part in parts]}, lambda sample: sample.choice(parts)[1](sample)


def _one_of(draw: random.Random, depth: int) -> Drawn:
    """Branches that a property tells apart, required or not."""
    tag, branches = draw.choice("ak"), []
    for number in range(draw.randint(2, 3)):
        value = draw.choice([{"const": number}, {"enum": [number, f"k{number}"]}])
        branch: dict[str, Any] = {
            "type": "object",
            "properties": {tag: value, "b": draw.choice([_string, _number])(draw, 0)[0]},
        }
        if draw.random() < 0.6:
            branch["required"] = [tag]
        if draw.random() < 0.5:
            branch["additionalProperties"] = draw.choice([False, True])
        branches.append(branch)
    others = draw.choice([{"type": "string", "maxLength": 2}, {"type": ["integer", "null"]}, {"const": True}])
    return {"oneOf": [*branches, others]}, lambda sample: {tag: 1}


def run(seeds: range, num_walks: int) -> None:
    num_ended = 0
    for seed in seeds:
        schema, sampler = drawn(random.Random(seed))
        num_ended += check(schema, sampler, seed, num_walks)
    assert num_ended > len(seeds)


@pytest.mark.parametrize("schema", [schema for schema in ACCEPTED if schema is not True], ids=str)
def test_what_ends_is_valid_for_each_keyword(schema: Any) -> None:
    assert check(schema, None, 0, 12)


def test_what_ends_is_valid_and_what_is_valid_can_be_written() -> None:
    run(range(500), 3)


@pytest.mark.long
def test_the_same_for_many_schemas() -> None:
    run(range(1000, 3000), 8)
