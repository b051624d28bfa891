# SPDX-License-Identifier: Apache-2.0
"""The GPU's mixture of experts without a GPU: in Triton's interpreter against the oracle, and compiled."""

from __future__ import annotations

import pytest

from tests.kernels.test_triton_kernels import COMPILATIONS, run_program

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_experts_agree_with_the_oracle() -> None:
    run_program("triton_moe_cases.py")


@pytest.mark.parametrize("arguments", COMPILATIONS, ids="-".join)
def test_kernels_compile(arguments: tuple[str, ...]) -> None:
    run_program("triton_moe_compile.py", *arguments)
