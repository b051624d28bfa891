# SPDX-License-Identifier: Apache-2.0
"""The scripts for two GPUs, as far as they run without: ranks as processes on a CPU, tiny shapes, the fake engine."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def run(name: str, *arguments: str) -> list[dict[str, Any]]:
    """The JSON lines of a dry run."""
    done = subprocess.run(
        [sys.executable, f"scripts/{name}.py", "--dry-run", *arguments], cwd=SCRIPTS.parent, capture_output=True,
        text=True, env={"PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_thresholds_end_where_a_way_stops_winning(script: Any) -> None:
    times = {
        1: (4, 6, 20), 2: (5, 6, 20), 4: (6.1, 6, 21), 8: (9, 7, 22), 16: (8, 9, 23),
        32: (40, 22, 24), 64: (None, 40, 30), 128: (None, 30, 50), 256: (None, None, 90),
    }  # fmt: skip
    names = ("one_shot_us", "two_shot_us", "nccl_us")
    results = [
        {"bytes": size, **{name: time for name, time in zip(names, row, strict=True) if time is not None}}
        for size, row in times.items()
    ]
    found = script("ranks_collectives").thresholds(results)
    # A lead of 2 percent is none, and what wins again behind a loss is luck.
    assert found == {"ONE_SHOT_BYTES": 4, "HALF_BYTES": 32}


def test_what_may_be_retried_is_told_by_its_code(script: Any) -> None:
    codes = script("ranks_kill").retryable_codes()
    assert {"worker_lost", "no_workers", "overloaded"} <= codes
    assert codes.isdisjoint({"internal", "poison_request", "invalid_request", "deadline_exceeded"})


@pytest.mark.slow
def test_every_check_exists_and_can_be_tried(script: Any) -> None:
    checks = script("ranks_checks").CHECKS
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.dry_command, check.name
        assert check.command[0] == "-m" or (SCRIPTS.parent / check.command[0]).is_file(), check.command


@pytest.mark.slow
def test_the_benchmark_of_ranks_runs_dry() -> None:
    found = run("ranks_engine", "decode", "prefill", "--repeat", "1")
    assert [line["test"] for line in found] == ["ready", "decode", "decode", "prefill 48x1"]
    assert "on rank 0 of 2" in found[0]["memory"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_replicas_run_side_by_side() -> None:
    found = run("ranks_engine", "replicas", "--repeat", "1")
    assert found[-1]["test"] == "replicas"
    assert found[-1]["ratio"] > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_exchanges_are_measured() -> None:
    *sizes, last = run("ranks_collectives", "--rounds", "2")
    assert all(size["is_right"] for size in sizes)
    assert last["is_right"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_ranks_are_verified_in_the_interpreter() -> None:
    (found,) = run("ranks_verify")
    assert found["passed"]
    assert found["ranks_agree"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kills_cost_no_request() -> None:
    *kills, last = [line for line in run("ranks_kill", "--kills", "2") if line["test"].startswith("kill")]
    assert [kill["rank"] for kill in kills] == [1, 0]
    assert last["passed"]
    assert last["violations"] == last["unfinished"] == 0
