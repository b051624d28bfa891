# SPDX-License-Identifier: Apache-2.0
"""The scripts for a GPU, as far as they run without one: requests, arithmetic, time limits, the calls of kernels."""

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


def run(*arguments: str) -> list[dict[str, Any]]:
    """The JSON lines of a script."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=SCRIPTS.parent, capture_output=True, text=True,
        env={"PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_idle_time_is_where_no_record_covers_it(script: Any) -> None:
    timeline = script("kernel_timeline")
    step = [
        ("Memcpy HtoD (Pinned -> Device)", 0, 2), ("batch_inputs_kernel", 3, 5), ("norm", 5, 50), ("gemm", 40, 90),
        ("argmax", 91, 95),
    ]  # fmt: skip
    records = [timeline.Record(name, start + at, end + at) for at in (0, 100, 200) for name, start, end in step]
    found = timeline.timeline(records)
    assert found["steps"] == 2
    assert found["step_us"] == 100
    # Per step: 1 before the first kernel, 5 before the copy, 1 inside it.
    assert found["idle_share"] == pytest.approx(0.07)
    assert found["idle_between_steps_share"] == pytest.approx(0.06)
    assert found["longest_gaps_us"][0] == [5, "Memcpy HtoD (Pinned -> Device)"]
    with pytest.raises(ValueError, match="1 steps"):
        timeline.timeline(records[:5])


@pytest.mark.slow
def test_linears_are_told_apart_by_their_place(script: Any) -> None:
    timeline = script("kernel_timeline")
    names = [
        "batch_inputs_kernel",
        "embed",
        "gemv_kernel",
        "rope_kv_kernel",
        "attention",
        "nvjet_a",
        "skinny_gemm",
        "act",
    ]
    names += ["nvjet_b", "splitKreduce", "nvjet_c", "rope_kv_kernel", "nvjet_a", "skinny_gemm", "nvjet_b", "nvjet_head"]
    records = [timeline.Record(name, index, index + 1) for index, name in enumerate(names * 2)]
    want = ["", "", "qkv", "", "", "out", "up", "", "down", "down", "qkv", "", "out", "up", "down", "head"]
    assert timeline.linear_labels(records) == want * 2
    assert timeline.kernel_times(records)["down nvjet_b"] == [2, 2]


@pytest.mark.parametrize(
    ("name", "prompt", "output"), [("mix2600", 2600, 60), ("mix1200", 1200, 128), ("nano", 562, 562)]
)
def test_workloads_have_the_lengths_of_their_names(script: Any, name: str, prompt: int, output: int) -> None:
    sizes = script("measured_engine").lengths(name)
    assert len(sizes) == 256
    assert sum(size for size, _ in sizes) / 256 == pytest.approx(prompt, rel=0.1)
    assert sum(size for _, size in sizes) / 256 == pytest.approx(output, rel=0.1)


@pytest.mark.slow
def test_the_mixed_requests_do_preempt(script: Any) -> None:
    mixed = script("mixed_requests")
    requests = mixed.mixed_requests(mixed.VOCAB_SIZE, 1500)
    found = mixed.simulate(mixed.LIMITS, requests, step_ms=5)
    assert found["preemptions"] > 40


@pytest.mark.slow
def test_gpu_checks_outlive_what_fails_or_hangs(script: Any, tmp_path: Path) -> None:
    checks = script("gpu_checks")
    sleeper = "import signal; signal.pause()"
    hang = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{sleeper}']).wait()"
    given = [
        checks.Check("good", ("-c", "print('{\"ms\": 4}')"), 60),
        checks.Check("bad", ("-c", "print('{odd'); raise SystemExit('broke')"), 60),
        checks.Check("hung", ("-c", hang), 1.0),
    ]
    good, bad, hung = checks.run_all(given, tmp_path, seconds=60)
    assert (good.status, good.num_figures) == ("ok", 1)
    assert bad.status == "failed with exit code 1"
    assert "broke" in bad.tail
    assert hung.status == "stopped after 1 s"
    assert json.loads((tmp_path / "figures.jsonl").read_text()) == {"check": "good", "ms": 4}
    assert "broke" in (tmp_path / "log.txt").read_text()
    assert "stopped after 1 s" in (tmp_path / "summary.txt").read_text()
    (late,) = checks.run_all(given[:1], tmp_path, seconds=-1)
    assert late.status == "not run: no time left"


@pytest.mark.slow
def test_the_gpu_tests_need_no_plugin_of_the_others(script: Any, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): ...")
    command = [sys.executable, *script("gpu_checks").PYTEST, "-q", "-p", "no:asyncio", str(tmp_path)]
    done = subprocess.run(command, cwd=SCRIPTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_engine_benchmark_runs_dry() -> None:
    arguments = ("--dry-run", "--repeat", "1", "--batches", "1,8", "--profile", "8")
    found = run("scripts/bench_engine.py", "decode", "sampling", "timeline", *arguments)
    tests = [line["test"] for line in found]
    assert tests[:5] == ["ready", "decode", "decode", "sampling", "timeline"]
    assert tests[5:] == ["profile mixed sampling", "profile mix2600", "profile"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_kernel_cases_call_their_kernels() -> None:
    found = run("scripts/bench_kernels.py", "--interpret", "--cases", "(1, ", "--only", "attention", "small")
    assert found[-1]["failed"] == 0
    assert found[-1]["cases"] == len(found) - 1 > 4
