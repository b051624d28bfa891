# SPDX-License-Identifier: Apache-2.0
"""The GPU decoder's kernels without a GPU: in Triton's interpreter against the oracle, and compiled ahead of time.

Each runs in a process of its own, because the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
CAPABILITIES = (80, 90, 100)
COMPILATIONS = (
    ("80", "brief"),
    ("90",),
    ("100", "brief"),
    *(pytest.param((name,), marks=pytest.mark.long) for name in ("80", "100")),
)
"""Compilers take half a minute per architecture: the fast tier leaves out rare sizes of heads and experts for two."""


def run_program(name: str, *arguments: str) -> None:
    """Each takes seconds to start, and runs many cases; the last one that it names is the one before a failure."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(HERE / name), *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    assert done.stdout.strip().endswith("ok")


def test_kernels_agree_with_the_oracle() -> None:
    run_program("triton_cases.py")


def test_deterministic_kernels_give_every_row_its_own_bits() -> None:
    run_program("triton_invariance.py")


@pytest.mark.parametrize("arguments", COMPILATIONS, ids="-".join)
def test_kernels_compile(arguments: tuple[str, ...]) -> None:
    run_program("triton_compile.py", *arguments)
