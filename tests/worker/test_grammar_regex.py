# SPDX-License-Identifier: Apache-2.0
"""Expressions in the compiler's terms; test_grammar_texts compiles them."""

from __future__ import annotations

import pytest

from mii_zmq.worker.grammar_charsets import WORD, complement, intersection, other_texts, union, written
from mii_zmq.worker.grammar_regex import lengths, normal
from mii_zmq.worker.grammar_regex_tree import UnusableRegexError


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("x^y|a", r"\^ in its middle \(position 2\)"),
        ("a^b", r"\^ in its middle"),
        ("a$b", r"\$ in its middle"),
        ("(^a)+", r"\^ in its middle"),
        ("(a$)?", r"\$ in its middle"),
        ("a*^b", r"\^ in its middle"),
        ("^*", r"\^ that is repeated"),
        (r"\Aab\Z", r"\\A, an anchor; write \^"),
        (r"ab\Z", r"\\Z, an anchor; write \$"),
        (r"\bfoo", "a word boundary"),
        (r"foo\B", "a word boundary"),
        (r"(a)\1", "a backreference"),
        (r"(?P<n>a)(?P=n)", "a backreference"),
        (r"(?<n>a)\k<n>", "a backreference"),
        (r"\p{Lu}", "a Unicode property"),
        (r"\P{Lu}", "a Unicode property"),
        (r"\cA", "a control character"),
        (r"\01", "a backreference"),
        (r"\e", "an unknown escape"),
        (r"\U0001F600", "an unknown escape"),
        (r"\ud800", "which is no character"),
        (r"\u{110000}", "which is no character"),
        ("^(?=a)b", "a lookahead"),
        ("a(?!b)", "a lookahead"),
        ("(?<=a)b", "a lookbehind"),
        ("(?<!a)b", "a lookbehind"),
        ("(?>a)", "an atomic group"),
        ("(?#a)", "a comment"),
        ("(?i)a", r"flags or an unknown group, \(\?i"),
        ("(?i:a)", "flags or an unknown group"),
        ("(a)?(?(1)b)", "a condition"),
        ("a++", "a repetition of a repetition"),
        ("a{2}{3}", "a repetition of a repetition"),
        ("a{,3}", "which is read in two ways"),
        ("a{2,1}", "minimum is above"),
        ("a|*b", "nothing to repeat"),
        ("{2}", "nothing to repeat"),
        ("a{1" + "0" * 5000 + "}", "more than 9 digits"),
        ("[[:alpha:]]", "a named set"),
        ("[]a]", "begins with ]"),
        ("[^]a]", "begins with ]"),
        ("[z-a]", "a range whose end"),
        ("[a", "a set that is not closed"),
        ("(a", "a parenthesis that is not closed"),
        ("a)", "a closing parenthesis"),
        ("a\\", "a backslash at its end"),
        ("(" * 101 + ")" * 101, "more than 100 groups"),
    ],
)
def test_what_is_read_otherwise_by_others_is_refused_by_name(pattern: str, reason: str) -> None:
    for in_json in (False, True):
        with pytest.raises(UnusableRegexError, match=reason):
            normal(pattern, in_json=in_json)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a$", "(a)"),
        ("^a|b$", "(a|b)"),
        ("(?:^a$|^b)$", "((a|b))"),
        ("(?P<x>a)(?<y>b)", "((a)(b))"),
        (r"\x41\u0042\u{43}\/\-\_", r"(ABC\u{2f}\u{2d}\u{5f})"),
        (r"a{2}?b{1,}c{0,3}d??", "(a{2,2}b+c{0,3}d{0,1})"),
        ("x{a}{}]", r"(x\u{7b}a\u{7d}\u{7b}\u{7d}\u{5d})"),
        (r"[\w.-]", r"([\u{2d}-\u{2e}0-9A-Z\u{5f}a-z])"),
        (r"[\w-.]", r"([\u{2d}-\u{2e}0-9A-Z\u{5f}a-z])"),
        (r"[^\d\D]?", None),
        (r"[\b]\0", r"(\u{8}\u{0})"),
        ("(a|)", "((a|))"),
        ("a{0}", "(())"),
        ("", "()"),
    ],
)
def test_what_all_read_alike_is_written_in_few_constructs(pattern: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(UnusableRegexError):
            normal(pattern, in_json=False)
    else:
        assert normal(pattern, in_json=False) == expected


def test_sets_in_json_have_no_character_that_json_escapes() -> None:
    for pattern in (".", r"[^a]", r"\W", r"\S", r"[\x00-\x7f]", r'["a]'):
        text = normal(pattern, in_json=True)
        assert r"\u{22}" not in text
        assert r"\u{5c}" not in text


def test_ranges() -> None:
    assert union([(5, 6), (1, 2), (3, 3), (5, 5)]) == ((1, 3), (5, 6))
    assert complement(complement(WORD)) == union(WORD)
    assert intersection(((0, 50),), ((48, 60),)) == ((48, 50),)
    assert complement([(0, 0x10FFFF)]) == ()
    assert written(((97, 97),)) == "a"


def test_texts_other_than_some() -> None:
    assert other_texts(["a"], ((97, 98),)) == "(|b[a-b]*|a([a-b][a-b]*))"
    long = "a" * 40
    assert len(other_texts([long], ((97, 98),))) < 1000


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^a$", (1, 1)),
        ("a|bcd|", (0, 3)),
        ("(ab?){2,3}", (2, 6)),
        ("a+b*", (1, None)),
        ("(a{0})*", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_lengths_of_what_matches(pattern: str, expected: tuple[int, int | None]) -> None:
    assert lengths(pattern) == expected
