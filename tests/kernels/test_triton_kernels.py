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

HERE = Path(__file__).parent
CASES = (
    "batch_inputs", "decode_attention", "chunk_attention", "norm", "norm_add", "rope_kv", "rope_length", "gemv",
    "skinny_gemm", "elementwise", "argmax", "copy_blocks",
)  # fmt: skip


def run_program(name: str, argument: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(HERE / name), argument], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith("ok")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kernel_agrees_with_the_oracle(case: str) -> None:
    run_program("triton_cases.py", case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemm", "linear", "attention"])
def test_deterministic_kernels_give_every_row_its_own_bits(case: str) -> None:
    run_program("triton_invariance.py", case)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_kernels_compile(capability: str) -> None:
    run_program("triton_compile.py", capability)
