# SPDX-License-Identifier: Apache-2.0
"""What the fuzzing of the doors reports, and a short run of it where schemathesis is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("fuzz_doors")


def test_statuses_are_summed_over_routes(fuzz: Any) -> None:
    lines = (
        'mii_gateway_http_requests_total{route="/v1/models",code="200"} 7.0',
        'mii_gateway_http_requests_total{code="200",route="/status"} 3.0',
        'mii_gateway_http_requests_total{route="/mii/{deployment}",code="503"} 1.0',
        'mii_gateway_http_requests_created{route="/v1/models",code="500"} 1.7e+09',
    )
    assert fuzz.statuses("\n".join(lines)) == {"200": 10, "503": 1}


def test_findings_are_reported_with_their_operations(fuzz: Any) -> None:
    report = {
        "operations": {"tested": 2},
        "test_cases": {"generated": 40},
        "running_time": 1.26,
        "failures": [{"code": "ST100", "title": "Server error", "operations": ["GET /status"], "count": 3}],
        "errors": [],
    }
    assert fuzz.summary(report) == {
        "operations": 2,
        "cases": 40,
        "seconds": 1.3,
        "findings": [["ST100", "Server error", ["GET /status"]]],
        "errors": 0,
    }


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is not None, reason="schemathesis is there")
def test_without_schemathesis_one_line_says_how_to_get_it() -> None:
    done = subprocess.run([sys.executable, "scripts/fuzz_doors.py"], cwd=SCRIPTS.parent, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install -e '.[fuzz]'" in line


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs the extra fuzz")
def test_a_short_run_finds_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/fuzz_doors.py", "--minutes", "0.5", "--seed", "3"],
        cwd=SCRIPTS.parent, capture_output=True, text=True, timeout=115, check=False,
    )  # fmt: skip
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, figures["findings"]) == (0, []), done.stdout
    assert figures["cases"] > 100
    assert figures["statuses"].keys() >= {"200", "400", "404"}
