# SPDX-License-Identifier: Apache-2.0
"""Regular expressions as requests write them -> the few constructs that the grammar compiler reads as everybody does.

The compiler passes over what it does not know (assertions, anchors in the middle), takes unknown escapes for letters,
and reads several classes in its own way. So expressions are read here: what ECMAScript and Python read alike is written
anew, in characters, sets of code points, groups, alternatives and repetitions; everything else is refused by name.
The result describes the whole text, as if it stood between ^ and $. Pure.
"""

from __future__ import annotations

from mii_zmq.worker.grammar_charsets import ANY, UNQUOTED, Ranges, intersection, written
from mii_zmq.worker.grammar_regex_tree import Anchor, Choice, Node, RegexReader, Repeat, UnusableRegexError

_AS_RULES = "(é){0}"
"""Nothing, but not in ASCII: the compiler then makes rules of a JSON string's pattern, as it does of other expressions.
The automaton that it would make takes (a{1,2}|a) for a+; it is right, and small where counts are large, for sets one
behind the other."""


def normal(pattern: str, *, in_json: bool) -> str:
    """The expression in the compiler's terms.

    `in_json`: it describes what stands between the quotation marks of a JSON string, where the characters that JSON
    escapes are never written: sets are taken without them.

    Raises:
        UnusableRegexError: it is malformed, or holds what cannot be enforced.
    """
    node = RegexReader(pattern).read()
    _check_anchors(node, is_first=True, is_last=True)
    if not in_json:
        return _write(node, ANY)
    return ("" if _is_flat(node) else _AS_RULES) + _write(node, UNQUOTED)


def lengths(pattern: str) -> tuple[int, int | None]:
    """Characters in the shortest and in the longest text that matches as a whole; None: any number.

    Raises:
        UnusableRegexError: as `normal`.
    """
    return _lengths(RegexReader(pattern).read())


def _is_flat(node: Node) -> bool:
    """Sets, repeated or not, one behind the other."""
    if isinstance(node, Repeat):
        return not isinstance(node.what, (Repeat, Choice, Anchor))
    return not isinstance(node, Choice) or (len(node.branches) == 1 and all(map(_is_flat, node.branches[0])))


def _check_anchors(node: Node, *, is_first: bool, is_last: bool) -> None:
    """Anchors say nothing new at the ends of the text; elsewhere no text could match, or not in every repetition."""
    if isinstance(node, Repeat):
        is_single = (node.least, node.most) == (1, 1)
        _check_anchors(node.what, is_first=is_first and is_single, is_last=is_last and is_single)
    elif isinstance(node, Choice):
        for branch in node.branches:
            marks = [part.mark if isinstance(part, Anchor) else "" for part in branch]
            num_leading = next((i for i, mark in enumerate(marks) if mark != "^"), len(marks))
            num_trailing = next((i for i, mark in enumerate(reversed(marks)) if mark != "$"), len(marks))
            for index, part in enumerate(branch):
                first, last = index <= num_leading, index >= len(branch) - 1 - num_trailing
                _check_anchors(part, is_first=is_first and first, is_last=is_last and last)
    elif isinstance(node, Anchor) and not (is_first if node.mark == "^" else is_last):
        raise UnusableRegexError(f"holds {node.mark} in its middle (position {node.at + 1}), which cannot be enforced")


def _write(node: Node, alphabet: Ranges) -> str:
    if isinstance(node, Anchor):
        return ""
    if isinstance(node, Repeat):
        what = _write(node.what, alphabet)
        if not what or node.most == 0:
            return "()"
        if node.most is None and node.least < 2:
            return what + "*+"[node.least]
        return f"{what}{{{node.least},{'' if node.most is None else node.most}}}"
    if isinstance(node, Choice):
        return f"({'|'.join(''.join(_write(part, alphabet) for part in branch) for branch in node.branches)})"
    ranges = intersection(node, alphabet)
    if not ranges:
        raise UnusableRegexError(
            f"asks for {written(node)}, a character that JSON escapes (a quotation mark, a backslash, a control), "
            "which cannot be enforced"
        )
    return written(ranges)


def _lengths(node: Node) -> tuple[int, int | None]:
    if isinstance(node, Anchor):
        return 0, 0
    if isinstance(node, Repeat):
        least, most = _lengths(node.what)
        if most == 0 or node.most == 0:
            return 0, 0
        return least * node.least, None if most is None or node.most is None else most * node.most
    if isinstance(node, Choice):
        found = [[_lengths(part) for part in branch] for branch in node.branches]
        longest = [
            None if any(most is None for _, most in parts) else sum(most or 0 for _, most in parts) for parts in found
        ]
        bounded = [length for length in longest if length is not None]
        return (
            min(sum(least for least, _ in parts) for parts in found),
            max(bounded) if len(bounded) == len(longest) else None,
        )
    return 1, 1
