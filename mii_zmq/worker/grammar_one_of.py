# SPDX-License-Identifier: Apache-2.0
"""Whether at most one branch of a `oneOf` fits any value, so that taking any of them keeps to it. Pure.

The grammar compiler takes a value that fits any branch. That is right where no value which is written for one branch
fits another: where types or values differ, or an object has a property that tells branches apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 4
MAX_COMPARISONS = 50_000
MAX_SHAPES = 20_000
MAX_ALTERNATIVES = 64
_KINDS = frozenset({"null", "boolean", "string", "integer", "number", "array", "object"})
_IMPLIED = {
    "object": ("properties", "additionalProperties", "patternProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}


class NotDisjointError(ValueError):
    """A value may fit two branches; the message names them."""


def implied_type(schema: dict[str, Any]) -> str | None:
    """What a schema without a type describes, by its keywords."""
    return next((kind for kind, names in _IMPLIED.items() if any(name in schema for name in names)), None)


@dataclass(slots=True)
class _Shape:
    kinds: frozenset[str]
    values: frozenset[str] | None = None
    """The only ones there are, in a spelling of which equal values have the same; None: not listed."""
    properties: dict[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    writes_others: bool = True
    """Keys that it does not list may be written."""
    allows_others: bool = True


class Branches:
    """Compares branches; `resolve` gives the schema behind a `$ref`."""

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve
        self._num_comparisons = self._num_shapes = 0
        self._known: dict[int, list[_Shape]] = {}

    def required_to_tell(self, branches: list[Any], discriminator: Any = None) -> list[frozenset[str]]:
        """The optional properties of each branch that have to be there, so that no value fits two branches.

        `discriminator`: the name of one that is taken before others.

        Raises:
            NotDisjointError: there are none, as far as can be told.
        """
        if self._are_distinct_lists(branches):
            return [frozenset()] * len(branches)
        pairs = {}
        for second in range(len(branches)):
            for first in range(second):
                names = self._apart(branches[first], branches[second], 0, may_require=True)
                if names is None:
                    raise NotDisjointError(f"its branches {first} and {second} may both fit one value")
                if names:
                    pairs[first, second] = names
        common = frozenset.intersection(*pairs.values()) if pairs else frozenset()
        required: list[set[str]] = [set() for _ in branches]
        for (first, second), names in pairs.items():
            chosen = (
                discriminator
                if discriminator in names
                else min(common or names, key=lambda name: (not self._is_listed(name, branches), name))
            )
            required[first].add(chosen)
            required[second].add(chosen)
        return [frozenset(names) for names in required]

    def _are_distinct_lists(self, branches: list[Any]) -> bool:
        """Whether all are const or enum without a common value, which long lists of labels are."""
        lists = [[shape.values for shape in self._shapes_of(branch)] for branch in branches]
        found = [value for values in lists for value in set().union(*(listed or () for listed in values))]
        return all(None not in values for values in lists) and len(set(found)) == len(found)

    def _is_listed(self, name: str, branches: list[Any]) -> bool:
        """Whether a property has const or enum wherever it is."""
        shapes = [shape for branch in branches for shape in self._shapes_of(branch)]
        found = [shape.properties[name] for shape in shapes if name in shape.properties]
        return all(shape.values is not None for schema in found for shape in self._shapes_of(schema))

    def _apart(self, a: Any, b: Any, depth: int, *, may_require: bool) -> frozenset[str] | None:
        """Empty if no value that is written for one fits the other; names: if both require one; None: unknown."""
        shapes_a, shapes_b = self._shapes_of(a), self._shapes_of(b)
        may_require = may_require and len(shapes_a) == len(shapes_b) == 1
        found: frozenset[str] = frozenset()
        for shape_a in shapes_a:
            for shape_b in shapes_b:
                self._num_comparisons += 1
                if self._num_comparisons > MAX_COMPARISONS or depth > MAX_DEPTH:
                    return None
                names = self._shapes_apart(shape_a, shape_b, depth)
                if names is None or (names and not may_require):
                    return None
                found |= names
        return found

    def _shapes_apart(self, a: _Shape, b: _Shape, depth: int) -> frozenset[str] | None:
        common = {kind for kind in a.kinds if kind in b.kinds}
        if a.kinds & {"integer", "number"} and b.kinds & {"integer", "number"}:
            common.add("number")
        if not common:
            return frozenset()
        if a.values is not None and b.values is not None:
            return None if a.values & b.values else frozenset()
        if common != {"object"} or a.values is not None or b.values is not None:
            return None
        if self._never_fits(a, b) and self._never_fits(b, a):
            return frozenset()
        found = set()
        for name in a.properties.keys() & b.properties.keys():
            if self._apart(a.properties[name], b.properties[name], depth + 1, may_require=False) is not None:
                if name in a.required or name in b.required:
                    return frozenset()
                found.add(name)
        return frozenset(found) or None

    def _never_fits(self, written: _Shape, other: _Shape) -> bool:
        """No object that is written for the one fits the other, as its keys tell."""
        return (not written.writes_others and not other.required <= written.properties.keys()) or (
            not other.allows_others and not written.required <= other.properties.keys()
        )

    def _shapes_of(self, schema: Any) -> list[_Shape]:
        if id(schema) not in self._known:
            self._known[id(schema)] = list(self._shapes(schema, 0))
        return self._known[id(schema)]

    def _shapes(self, schema: Any, num_steps: int) -> Iterator[_Shape]:
        """The alternatives of a schema; one that allows everything where they cannot be told."""
        self._num_shapes += 1
        if not isinstance(schema, dict) or num_steps > MAX_ALTERNATIVES or self._num_shapes > MAX_SHAPES:
            yield _Shape(_KINDS)
        elif isinstance(schema.get("$ref"), str):
            yield from self._shapes(self._resolve(schema["$ref"]), num_steps + 1)
        elif "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            yield _Shape(frozenset(map(_kind, values)), frozenset(map(_spelling, values)))
        elif alternatives := next((schema[name] for name in ("anyOf", "oneOf", "allOf") if name in schema), None):
            if not isinstance(alternatives, list) or len(alternatives) > MAX_ALTERNATIVES:
                yield _Shape(_KINDS)
                return
            for alternative in alternatives:
                yield from self._shapes(
                    alternative, num_steps + (1 if len(alternatives) == 1 else MAX_ALTERNATIVES // 4)
                )
        else:
            yield _object_shape(schema)


def _object_shape(schema: dict[str, Any]) -> _Shape:
    types = schema.get("type", implied_type(schema))
    listed = types if isinstance(types, list) else [types]
    kinds = _KINDS.intersection(name for name in listed if isinstance(name, str)) if types else _KINDS
    properties, required = schema.get("properties"), schema.get("required")
    names = required if isinstance(required, list) else []
    others = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    is_named = "patternProperties" in schema or "propertyNames" in schema
    return _Shape(
        kinds,
        None,
        properties if isinstance(properties, dict) else {},
        frozenset(name for name in names if isinstance(name, str)),
        writes_others=is_named or properties is None or others not in (None, False),
        allows_others=is_named or others is not False,
    )


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def _spelling(value: Any) -> str:
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    """1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {key: _whole(item) for key, item in value.items()} if isinstance(value, dict) else value
