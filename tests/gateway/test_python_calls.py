# SPDX-License-Identifier: Apache-2.0
"""Python's literals and calls, held to what `ast.literal_eval` makes of the same text."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mii_zmq.gateway.python_calls import PythonReader

LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(value=LITERALS)
def test_what_python_writes_is_read(value: Any) -> None:
    assert PythonReader(repr(value)).read_value() == value
    assert PythonReader(f"[f(x={value!r}, y={value!r})]").read_calls() == [("f", {"x": value, "y": value})]


@settings(max_examples=100, deadline=None)
@given(value=LITERALS, at=st.integers(0, 40), put=st.sampled_from([*"[](){}'\"\\,:.+-01eu ", ""]))
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_what_both_read_of_a_text_with_a_fault_is_the_same(value: Any, at: int, put: str) -> None:
    text = repr(value)
    text = f"{text[:at]}{put}{text[at + 1 :]}".strip()
    try:
        theirs = ast.literal_eval(text)
        ours = PythonReader(text).read_value()
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return
    assert ours == with_lists(theirs)


def with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_lists(item) for key, item in value.items()}
    return [with_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("null", None), ("(1, 'a',)", [1, "a"]), ("()", []), ("{'a': {}, }", {"a": {}}),
        ("-0.5e3", -500.0), (r"'\x41\u00e9\U0001F600\101\n\q\''", "Aé😀A\n\\q'"), ("'a\nb'", "a\nb"),
        ('"it\'s"', "it's"), (".5", 0.5), ("1.", 1.0),
    ],
)  # fmt: skip
def test_values(text: str, value: Any) -> None:
    assert PythonReader(f" {text} ").read_value() == value


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "1 2", "[1", "[1 2]", "[,]", "{1: 2}", "{'a'}", "'a", "'a' 'b'", "f'a'", "b'a'", "1j", "0x10", "1_0",
        "01", "+", ".", "e5", "-True", "a.b", "__import__('os')", "1 if 1 else 2", r"'\U99999999'", "9" * 5000,
        "[" * 100_000, "[" * 66 + "]" * 66, "lambda: 1", "Nonesuch",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        PythonReader(text).read_value()


@pytest.mark.parametrize(
    "text", ["f()", "[f]", "[f(1)]", "[f(*a)]", "[f(x=y)]", "[f(x=1)", "[f(x=1) g()]", "[f(x=g())]"]
)
def test_calls_have_literal_keyword_arguments(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        PythonReader(text).read_calls()
