# SPDX-License-Identifier: Apache-2.0
"""What a request demands -> what is compiled for it: the same, or less where the rest could not be enforced.

Schemas and regular expressions go the same way wherever they stand, as the whole demand or within a structural tag.
Pure: the door of the engine asks early, the compilation once more.
"""

from __future__ import annotations

import json
from typing import Any

from mii_zmq.errors import InvalidRequest
from mii_zmq.worker.grammar_charsets import UNQUOTED, WORD
from mii_zmq.worker.grammar_regex import normal
from mii_zmq.worker.grammar_regex_tree import UnusableRegexError
from mii_zmq.worker.grammar_schema import enforceable


def compilable(kind: str, value: str) -> str:
    """The text to compile for a demand that has passed `check_structured_output`.

    Raises:
        InvalidRequest: it asks for what cannot be enforced, or is malformed.
    """
    if kind == "json_schema":
        return json.dumps(enforceable(json.loads(value)))
    if kind == "regex":
        return _regex(value)
    if kind == "structural_tag":
        return json.dumps(_tag(json.loads(value)))
    return value


def _tag(part: Any) -> Any:
    """A part of a structural tag; where schemas and expressions stand, at whatever depth."""
    if isinstance(part, list):
        return [_tag(item) for item in part]
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind in ("json_schema", "qwen_xml_parameter") and "json_schema" in part:
        # Where objects are written as pairs of tags, a key stands between their marks.
        is_json = kind == "json_schema" and part.get("style", "json") == "json"
        return {**part, "json_schema": enforceable(part["json_schema"], UNQUOTED if is_json else WORD)}
    if kind == "regex" and isinstance(part.get("pattern"), str):
        return {**part, "pattern": _regex(part["pattern"])}
    return {name: _tag(item) for name, item in part.items()}


def _regex(pattern: str) -> str:
    try:
        return normal(pattern, in_json=False)
    except UnusableRegexError as error:
        raise InvalidRequest(f"structured_output: its regex {error}", param="structured_output") from None
