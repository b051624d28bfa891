# SPDX-License-Identifier: Apache-2.0
"""The all-reduce kernels in Triton's interpreter: the phases of all ranks one after the other, and compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import INTERPRETED

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

CASES = Path(__file__).with_name("all_reduce_cases.py")


@pytest.mark.parametrize("case", ["one_shot", "norm", "two_shot", "alone"])
def test_arithmetic(case: str) -> None:
    environment = {**os.environ, **INTERPRETED, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(CASES), case], env=environment, check=True, timeout=100)


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles(capability: int) -> None:
    subprocess.run([sys.executable, str(CASES), "compile", str(capability)], check=True, timeout=100)
