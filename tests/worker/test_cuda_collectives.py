# SPDX-License-Identifier: Apache-2.0
"""Exchanges between two ranks, each a process: on two GPUs through peer memory and NCCL, else through gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("collectives_cases.py")


def run(*names: str) -> str:
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, str(CASES), *names], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [("sums", "gather"), ("norm",), ("changing",), ("graphs",)], ids="-".join)
def test_two_gpus(names: tuple[str, ...]) -> None:
    assert run(*names).count("ok") == len(names)


@pytest.mark.slow
def test_the_cases_themselves() -> None:
    assert run().count("ok") == 5
