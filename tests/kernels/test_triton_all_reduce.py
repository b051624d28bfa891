# SPDX-License-Identifier: Apache-2.0
"""The all-reduce kernels in Triton's interpreter: the phases of all ranks one after the other, and compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import INTERPRETED
from tests.kernels.test_triton_kernels import CAPABILITIES

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CASES = Path(__file__).with_name("all_reduce_cases.py")


def run(*arguments: str, **environment: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(CASES.parents[2]), "OMP_NUM_THREADS": "1", **environment}
    subprocess.run([sys.executable, str(CASES), *arguments], env=environment, check=True)


def test_arithmetic() -> None:
    run(**INTERPRETED)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles(capability: int) -> None:
    run("compile", str(capability))
