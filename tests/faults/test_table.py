# SPDX-License-Identifier: Apache-2.0
"""docs/faults.md names only tests that exist, and calls open exactly what is marked so."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "faults.md"
NUM_ROWS = 50
"""With at least one test, at least."""


class Row(NamedTuple):
    number: str
    tests: list[tuple[str, str]]
    """Path below tests/ and function."""
    result: str
    red_without: str


def rows() -> list[Row]:
    found = []
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if re.fullmatch(r"\d+", cells[0]):
            tests = [tuple(name.split("::")) for name in re.findall(r"`([\w/]+\.py::[\w:]+)`", cells[3])]
            found.append(Row(cells[0], [(path, names[-1]) for path, *names in tests], cells[4], cells[5]))
    return found


@cache
def functions(path: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {
        node.name: node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }  # fmt: skip


def is_open(test: tuple[str, str]) -> bool:
    """Whether the test, or one of its cases, is expected to fail."""
    path, name = test
    marks = re.findall(r"^(\w+) = pytest\.mark\.xfail", (ROOT / "tests" / path).read_text(), re.M)
    decorators = [ast.unparse(decorator) for decorator in functions(path)[name].decorator_list]
    return any(word in decorator for decorator in decorators for word in ("xfail", *marks))


def test_every_test_of_the_table_exists() -> None:
    for row in rows():
        for path, name in row.tests:
            assert (ROOT / "tests" / path).is_file(), f"row {row.number}: {path}"
            assert name in functions(path), f"row {row.number}: {path}::{name}"


def test_open_rows_are_those_with_expected_failures() -> None:
    for row in rows():
        if row.tests:
            assert row.result.startswith("open") == any(map(is_open, row.tests)), f"row {row.number}: {row.result}"
        else:
            assert row.result.startswith("none"), f"row {row.number} has no test"


def test_each_row_once_and_enough_of_them() -> None:
    numbers = [int(row.number) for row in rows()]
    assert numbers == sorted(set(numbers))
    assert sum(bool(row.tests) for row in rows()) >= NUM_ROWS
    assert sum(bool(row.red_without) for row in rows()) >= 10


@pytest.mark.parametrize("path", sorted(path.name for path in Path(__file__).parent.glob("test_*.py")))
def test_every_expected_failure_is_in_the_table(path: str) -> None:
    listed = {test for row in rows() for test in row.tests}
    for name in functions(f"faults/{path}"):
        if name.startswith("test_") and is_open((f"faults/{path}", name)):
            assert (f"faults/{path}", name) in listed
