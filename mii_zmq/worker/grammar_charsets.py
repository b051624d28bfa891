# SPDX-License-Identifier: Apache-2.0
"""Sets of characters, as sorted ranges of code points, and of texts, as the grammar compiler's expressions. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

Ranges = tuple[tuple[int, int], ...]
"""First and last code point of each, both within."""

MAX_SHARED = 32
_SURROGATES = (0xD800, 0xDFFF)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same characters, sorted, nothing named twice."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All other characters; halves of surrogate pairs are none."""
    found: list[tuple[int, int]] = []
    following = 0
    for low, high in union((*ranges, _SURROGATES)):
        if following < low:
            found.append((following, low - 1))
        following = high + 1
    return (*found, (following, 0x10FFFF)) if following <= 0x10FFFF else tuple(found)


def intersection(ranges: Ranges, others: Ranges) -> Ranges:
    return complement((*complement(ranges), *complement(others)))


def written(ranges: Ranges) -> str:
    """One character or a bracketed set, in letters, digits and \\u{...} only."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _spelling(ranges[0][0])
    parts = (_spelling(low) if low == high else f"{_spelling(low)}-{_spelling(high)}" for low, high in ranges)
    return f"[{''.join(parts)}]"


def _spelling(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\u{{{code:x}}}"


ANY = complement(())
UNQUOTED = complement([(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))])
"""What a JSON string may hold as it is."""
_DIGITS = ((ord("0"), ord("9")),)
WORD = (*_DIGITS, (ord("A"), ord("Z")), (ord("_"), ord("_")), (ord("a"), ord("z")))
_SPACES = ((9, 13), (32, 32))
_ALL_SPACES = (
    (9, 13), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
ESCAPED_SETS: dict[str, Ranges] = {
    "d": _DIGITS, "D": complement(_DIGITS), "w": WORD, "W": complement(WORD), "s": _SPACES,
    "S": complement(_ALL_SPACES), ".": complement([(10, 10), (13, 13), (0x2028, 0x2029)]),
}  # fmt: skip
"""As in ECMAScript. Of \\s, \\S and the dot only what Python's `re` takes as well, with and without re.ASCII."""


def other_texts(texts: Collection[str], alphabet: Ranges = UNQUOTED) -> str:
    """An expression in the compiler's terms for what of the alphabet is none of `texts`.

    What begins with the same `MAX_SHARED` characters as one of them is left out, too.
    """
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text[:MAX_SHARED]:
            node = node.setdefault(character, {})
        node[""] = len(text) > MAX_SHARED or node.get("", False)
    return _others(root, alphabet)


def _others(node: dict[str, Any], alphabet: Ranges) -> str:
    following = [character for character in node if character]
    branches = [] if "" in node else [""]
    if not node.get(""):
        different = intersection(complement((ord(character), ord(character)) for character in following), alphabet)
        branches.append(f"{written(different)}{written(alphabet)}*")
        branches += [
            written(((ord(character), ord(character)),)) + _others(node[character], alphabet) for character in following
        ]
    return f"({'|'.join(branches)})"
