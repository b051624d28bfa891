# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the mixture of experts, tiny and in Triton's interpreter: its calls and its checks hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.interpreter import INTERPRETED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_case_passes() -> None:
    environment = {**os.environ, **INTERPRETED, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "scripts/bench_moe.py", "--only", "mixtral-8x7b", "--tokens", "3"],
        cwd=ROOT, capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records[-1]["passed"]
    assert {"shared expert", "mixtral-8x7b", "mixtral-8x7b deterministic"} <= {
        record.get("case") for record in records if record.get("passed")
    }
