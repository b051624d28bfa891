# SPDX-License-Identifier: Apache-2.0
"""What a door does with each field that its API publishes, as a table, and the sorting of a request by that table.

    honoured   decoded into its type, and used
    ignored    cannot change the text (bookkeeping, hints); named in the response header `x-ignored-fields`
    refused    would change the answer in a way this engine cannot deliver: 400, unless the value asks for nothing

A field that is not in the table is refused by name. To support one more field, move its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mii_zmq.errors import InvalidRequest
from mii_zmq.gateway.request_body import Fields, decode_field
from mii_zmq.sampling_params import unknown_field

MAX_SHOWN_BYTES = 60


@dataclass(frozen=True, slots=True)
class Honoured:
    """`param` is the name in SamplingParams, where the value goes there as it is."""

    kind: Any
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Ignored:
    pass


@dataclass(frozen=True, slots=True)
class Refused:
    """`harmless`: JSON values, in compact spelling, that ask for what the engine does anyway."""

    why: str
    harmless: tuple[bytes, ...] = ()


Rule = Honoured | Ignored | Refused
IGNORED = Ignored()


@dataclass(frozen=True, slots=True)
class ParsedFields:
    values: dict[str, Any]
    """Honoured fields that are not null."""
    ignored: list[str]

    def params(self, rules: Mapping[str, Rule]) -> dict[str, Any]:
        """The values that are SamplingParams under another or the same name."""
        found = {}
        for name, value in self.values.items():
            rule = rules[name]
            if isinstance(rule, Honoured) and rule.param is not None:
                found[rule.param] = value
        return found


def apply_rules(fields: Fields, rules: Mapping[str, Rule]) -> ParsedFields:
    """Sort a request's fields by the table. Raises InvalidRequest; `param` names the field."""
    parsed = ParsedFields({}, [])
    for name, raw in fields.items():
        match rules.get(name):
            case Honoured(kind):
                value = decode_field(name, raw, kind)
                if value is not None:
                    parsed.values[name] = value
            case Ignored():
                parsed.ignored.append(name)
            case Refused(why, harmless):
                if not _is_harmless(name, raw, harmless):
                    raise InvalidRequest(f"{name} is not supported: {why}", param=name)
                parsed.ignored.append(name)
            case None:
                raise unknown_field(name, rules)
    return parsed


def _is_harmless(name: str, raw: msgspec.Raw, harmless: tuple[bytes, ...]) -> bool:
    data = bytes(raw)
    if len(data) > MAX_SHOWN_BYTES:
        return False
    return msgspec.json.encode(decode_field(name, raw, Any)) in (b"null", *harmless)
