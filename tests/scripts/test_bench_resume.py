# SPDX-License-Identifier: Apache-2.0
"""The measurement of what resume and credit cost, in small."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_resume")


def test_ratios_are_of_pairs(bench: Any) -> None:
    pairs = [{"on": {"broker": 3.0 * pace}, "off": {"broker": 2.0 * pace}} for pace in (1.0, 10.0, 4.0)]
    assert bench.summary(pairs) == {"broker": {"on_us": 12.0, "off_us": 8.0, "ratio": 1.5, "quartiles": [1.5, 1.5]}}


def test_cpu_time_is_of_the_process(bench: Any) -> None:
    before = time.process_time()
    assert before <= bench.process_cpu_s(os.getpid()) <= time.process_time()


@pytest.mark.long
def test_both_ways_are_measured() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/bench_resume.py", "--streams=1,3", "--tokens=20", "--pairs=2", "--step-ms=0"],
        cwd=SCRIPTS.parent, capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    one, three = map(json.loads, done.stdout.splitlines())
    assert (one["streams"], three["streams"]) == (1, 3)
    assert three["path"]["on_us"] > 0 < three["path"]["off_us"]
