# SPDX-License-Identifier: Apache-2.0
"""The GPU's mixture of experts without a GPU: in Triton's interpreter against the oracle, and compiled."""

from __future__ import annotations

import pytest

from tests.kernels.test_triton_kernels import run_program

pytest.importorskip("triton")


@pytest.mark.slow
def test_experts_agree_with_the_oracle() -> None:
    run_program("triton_moe_cases.py", "all")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_kernels_compile(capability: str) -> None:
    run_program("triton_moe_compile.py", capability)
