# SPDX-License-Identifier: Apache-2.0
"""A JSON schema as a request writes it -> one that the grammar compiler enforces to the letter.

The compiler passes over what it cannot express, and such an answer would not be valid. So schemas are written anew, in
keywords of which it is known what the compiler makes of them; what restricts values otherwise is refused by path and
name. Annotations and unknown names are left out, as JSON Schema says. The result may allow less than the schema, never
more: docs/endpoints.md says where. Pure; nothing is resolved but references within the schema.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote

from mii_zmq.worker.grammar_charsets import UNQUOTED, Ranges
from mii_zmq.worker.grammar_containers import array, obj
from mii_zmq.worker.grammar_one_of import Branches, NotDisjointError, implied_type
from mii_zmq.worker.grammar_scalars import MAX_INTEGER, integer, number, refused, string

MAX_REFERENCES = 8
"""From one to the next, where keys are described."""
UNENFORCED = (
    "additionalItems", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxContains", "minContains", "not", "then", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Of these a schema may have one, and nothing that restricts beside it."""
RESTRICTING = frozenset({
    *DECIDING, "type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength",
    "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_TYPES: dict[str, Any] = {
    "string": str, "boolean": bool, "null": type(None), "array": list, "object": dict, "integer": int,
    "number": (int, float),
}  # fmt: skip


def enforceable(schema: Any, key_characters: Ranges = UNQUOTED) -> Any:
    """The schema for the compiler.

    Args:
        schema: as parsed from JSON.
        key_characters: what keys that the schema does not name consist of, beside those that it names.

    Raises:
        InvalidRequest: it is malformed, or an answer could violate it; the message says where.
    """
    found = _Schemas(schema, key_characters).whole()
    try:
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise refused("it holds half of a surrogate pair; send valid Unicode") from None
    except ValueError:
        raise refused("it holds a number that is too large") from None
    return found


class _Schemas:
    """One schema and what it refers to. References become numbered definitions, each written once."""

    def __init__(self, root: Any, key_characters: Ranges) -> None:
        self._root, self._key_characters = root, key_characters
        self._numbers: dict[tuple[str, frozenset[str]], int] = {}
        self._branches = Branches(lambda reference: self._target(reference, ""))

    def whole(self) -> Any:
        found = self._one(self._root, "")
        definitions: dict[str, Any] = {}
        while len(definitions) < len(self._numbers):
            # Those that turn up on the way are appended, so that depth costs no stack.
            for (reference, also_required), index in list(self._numbers.items())[len(definitions) :]:
                target = self._target(reference, "")
                definitions[str(index)] = self._one(target, reference[1:], also_required)
        return found | ({"$defs": definitions} if definitions else {})

    def _one(self, schema: Any, path: str, also_required: Collection[str] = ()) -> dict[str, Any]:
        if schema is True:
            return {}
        if schema is False:
            raise refused(f"{path or 'the schema'} is false, which no value fits; leave it out")
        if not isinstance(schema, dict):
            raise refused(f"{path or 'the schema'} has to be an object or a boolean")
        for keyword in UNENFORCED:
            if keyword in schema:
                raise refused(f"{path}/{keyword} cannot be enforced; leave it out")
        if schema.get("uniqueItems") not in (None, False):
            raise refused(f"{path}/uniqueItems cannot be enforced; leave it out")
        if path and "$id" in schema:
            raise refused(f"{path}/$id cannot be used within a schema; leave it out and refer by '#/...'")
        deciding = next((name for name in DECIDING if name in schema), None)
        if deciding is None:
            return self._typed(schema, path, also_required)
        beside = sorted(RESTRICTING & schema.keys() - {deciding})
        if beside and not (deciding in ("const", "enum") and beside == ["type"]):
            raise refused(
                f"{path or 'the schema'} has {deciding} and {beside[0]}, of which only one can be enforced; merge them"
            )
        if deciding == "$ref":
            return self._reference(schema["$ref"], path, also_required)
        if deciding in ("const", "enum"):
            return _values(schema, deciding, path)
        return self._alternatives(schema, deciding, path, also_required)

    def _typed(self, schema: dict[str, Any], path: str, also_required: Collection[str]) -> dict[str, Any]:
        types = _types(schema, path)
        if not types:
            if beside := sorted(RESTRICTING & schema.keys()):
                raise refused(f"{path}/{beside[0]} cannot be enforced without a type; add type")
            return {}
        found = [self._of_type(name, schema, path, also_required) for name in types]
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _of_type(self, name: str, schema: dict[str, Any], path: str, also_required: Collection[str]) -> dict[str, Any]:
        match name:
            case "string":
                return string(schema, path)
            case "integer":
                return integer(schema, path)
            case "number":
                return number(schema, path)
            case "array":
                return array(schema, path, self._one)
            case "object":
                return obj(self._with_names(schema, path), path, self._one, also_required, self._key_characters)
        return {"type": name}

    def _with_names(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """The schema with that of its keys in place of a reference to it."""
        names = schema.get("propertyNames")
        for _ in range(MAX_REFERENCES):
            if not isinstance(names, dict) or "$ref" not in names or RESTRICTING & names.keys() != {"$ref"}:
                break
            names = self._target(names["$ref"], f"{path}/propertyNames")
        return schema if names is None else {**schema, "propertyNames": names}

    def _alternatives(
        self, schema: dict[str, Any], keyword: str, path: str, also_required: Collection[str]
    ) -> dict[str, Any]:
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise refused(f"{path}/{keyword} has to be a list of schemas that is not empty")
        if keyword == "allOf" and len(branches) > 1:
            raise refused(f"{path}/allOf has {len(branches)} schemas, allowed: one; merge them")
        required: list[Collection[str]] = [also_required if len(branches) == 1 else ()] * len(branches)
        if keyword == "oneOf" and len(branches) > 1:
            mark = schema.get("discriminator")
            name = mark.get("propertyName") if isinstance(mark, dict) else None
            try:
                required = [*self._branches.required_to_tell(branches, name)]
            except NotDisjointError as error:
                raise refused(
                    f"{path}/oneOf cannot be enforced: {error}; use anyOf, or give them a property with const or "
                    "enum of different values"
                ) from None
        found = [
            self._one(branch, f"{path}/{keyword}/{index}", names)
            for index, (branch, names) in enumerate(zip(branches, required, strict=True))
        ]
        # Where an answer could be read in two ways, following it takes twice the work.
        distinct = list({json.dumps(branch): branch for branch in found}.values())
        return distinct[0] if len(distinct) == 1 else {"anyOf": distinct}

    def _reference(self, reference: Any, path: str, also_required: Collection[str]) -> dict[str, Any]:
        self._target(reference, path)
        key = (reference, frozenset(also_required))
        return {"$ref": f"#/$defs/{self._numbers.setdefault(key, len(self._numbers))}"}

    def _target(self, reference: Any, path: str) -> Any:
        """What a reference names. Raises InvalidRequest where there is nothing of the kind."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise refused(f"{path}/$ref is {str(reference)[:60]!r}, allowed: '#' and '#/...', within the schema")
        found = self._root
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif (
                isinstance(found, list)
                and name.isascii()
                and name.isdigit()
                and len(name) < 6
                and int(name) < len(found)
            ):
                found = found[int(name)]
            else:
                raise refused(f"{path}/$ref is {reference[:60]!r}, where the schema has nothing")
        return found


def _types(schema: dict[str, Any], path: str) -> list[str]:
    if "type" not in schema:
        implied = implied_type(schema)
        return [implied] if implied else []
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for name in types:
        if not isinstance(name, str) or name not in _TYPES:
            raise refused(f"{path}/type is {str(name)[:60]!r}, allowed: {', '.join(sorted(_TYPES))}")
    if not types or len(set(types)) < len(types):
        raise refused(f"{path}/type has to name types, none of them twice")
    return types


def _values(schema: dict[str, Any], keyword: str, path: str) -> dict[str, Any]:
    values = schema["enum"] if keyword == "enum" else [schema["const"]]
    if not isinstance(values, list) or not values:
        raise refused(f"{path}/enum has to be a list that is not empty")
    types = _types(schema, path)
    for value in values:
        if types and not any(_has_type(value, name) for name in types):
            raise refused(f"{path}/{keyword} holds {str(value)[:60]!r}, which is not of its type")
        _check_numbers(value, f"{path}/{keyword}")
    return {"enum": values}


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _check_numbers(value: Any, path: str) -> None:
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise refused(f"{path} holds {str(value)[:60]}, allowed: integers of at most {MAX_INTEGER}")
    if isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(item, path)
