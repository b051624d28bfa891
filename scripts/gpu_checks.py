#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Everything that has to be checked and measured on an NVIDIA GPU, in one go and within a given time.

    python scripts/gpu_checks.py [--minutes N] [--only NAME ...] [--out FOLDER]

Runs the checks one after the other in processes of their own, each with a time limit; one that fails, hangs or finds
no time left does not stop the others. The folder (default: $OUT, else a new temporary one) gets `log.txt` with all
output, `figures.jsonl` with every JSON line and `summary.txt`, which is printed last. The exit code is 1 unless all
checks passed. `--dry-run` tries what can be tried without a GPU: arguments, requests and arithmetic, kernels in
Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent
MIN_SECONDS = 15.0
"""A check is not begun with less time left."""
NUM_TAIL_LINES = 12
INTERPRETED = {"TRITON_INTERPRET": "1"}
PYTEST = (
    "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--import-mode", "importlib", "-p", "no:cacheprovider",
)  # fmt: skip
"""Without the project's settings, which are errors where a plugin is missing that the GPU tests do without."""


@dataclass(frozen=True)
class Check:
    """One process."""

    name: str
    command: tuple[str, ...]
    """Arguments of the Python interpreter, in the repository's root."""
    limit_s: float
    dry_command: tuple[str, ...] | None = None
    """What can be tried without a GPU."""


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str
    """'ok', or why it is not."""
    seconds: float = 0.0
    num_figures: int = 0
    tail: tuple[str, ...] = ()
    """The last lines, where it is not ok."""


def _kernels(group: str, limit_s: float) -> Check:
    command = ("scripts/bench_kernels.py", "--only", group)
    return Check(f"kernels_{group}", command, limit_s, (*command, "--interpret"))


def _engine(name: str, limit_s: float, *arguments: str) -> Check:
    command = ("scripts/bench_engine.py", *arguments)
    return Check(name, command, limit_s, (*command, "--dry-run", "--repeat", "1"))


def marked_tests(mark: str) -> list[str]:
    """The files with such tests, so that the others' needs do not matter."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    pattern = re.compile(rf"pytest\.mark\.{mark}\b")
    return [str(path.relative_to(ROOT)) for path in files if pattern.search(path.read_text(encoding="utf-8"))]


CHECKS = (
    Check("verify_engine", ("scripts/verify_engine.py",), 150),
    Check(
        "verify_deterministic", ("scripts/verify_engine.py", "--deterministic"), 120,
        ("scripts/mixed_requests.py", "--num-requests", "2000", "--step-ms", "5"),
    ),
    Check(
        "verify_families", ("scripts/verify_families.py",), 300,
        ("scripts/verify_families.py", "--interpret", "--only", "llama", "gemma2", "mixtral"),
    ),
    Check("tests", (*PYTEST, "-m", "gpu", "-q", *marked_tests("gpu")), 120),
    _kernels("attention", 120),
    _kernels("linear", 120),
    _kernels("small", 90),
    _kernels("sampling", 90),
    Check("moe", ("scripts/bench_moe.py",), 150, ("scripts/bench_moe.py",)),
    _engine("start", 90, "start", "--repeat", "2"),
    _engine(
        "engine", 330, "decode", "timeline", "sampling", "prefill", "mix1200", "mix2600", "--profile", "1,64,256"
    ),
    _engine("mixtral", 90, "--random-weights", "8x7B-16", "decode", "--batches", "1,16,64"),
    _engine("nano", 75, "--random-weights", "0.6B", "nano"),
    _engine("deterministic", 180, "deterministic"),
    Check("service", ("scripts/bench_service.py",), 390, ("scripts/bench_service.py", "--dry-run", "fake")),
)  # fmt: skip


class Runner:
    """Runs checks until the time is over."""

    def __init__(self, folder: Path, seconds: float, more_environment: dict[str, str]) -> None:
        self.folder, self._more_environment = folder, more_environment
        self._end = time.monotonic() + seconds

    def run(self, name: str, command: tuple[str, ...], limit_s: float) -> Outcome:
        """One check; its output goes to the log as it comes."""
        begin = time.monotonic()
        left_s = self._end - begin
        if left_s < MIN_SECONDS:
            return Outcome(name, "not run: no time left")
        limit_s = min(limit_s, left_s)
        log = self.folder / "log.txt"
        with log.open("ab") as file:
            file.write(f"\n===== {name}: {' '.join(command)}\n".encode())
            file.flush()
            start = file.tell()
            code = self._wait(command, limit_s, file)
        seconds = time.monotonic() - begin
        with log.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
        num_figures = self._keep_figures(name, lines)
        if code == 0:
            return Outcome(name, "ok", seconds, num_figures)
        status = f"stopped after {limit_s:.0f} s" if code is None else f"failed with exit code {code}"
        return Outcome(name, status, seconds, num_figures, tuple(lines[-NUM_TAIL_LINES:]))

    def _wait(self, command: tuple[str, ...], limit_s: float, file: BinaryIO) -> int | None:
        """The exit code; None if it took too long."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        environment |= {"OUT": str(self.folder.resolve()), **self._more_environment}
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # What the check started goes with it, or it would keep the card's memory.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def _keep_figures(self, name: str, lines: list[str]) -> int:
        count = 0
        with (self.folder / "figures.jsonl").open("a", encoding="utf-8") as file:
            for line in lines:
                try:
                    figures = json.loads(line) if line.startswith("{") else None
                except ValueError:
                    continue
                if isinstance(figures, dict):
                    file.write(json.dumps({"check": name, **figures}) + "\n")
                    count += 1
        return count


def summary(outcomes: list[Outcome]) -> str:
    lines = [f"{'check':22} {'seconds':>8} {'figures':>8}  status"]
    for outcome in outcomes:
        lines.append(f"{outcome.name:22} {outcome.seconds:8.1f} {outcome.num_figures:8}  {outcome.status}")
        lines += [f"    | {line[:200]}" for line in outcome.tail]
    return "\n".join(lines)


def run_all(checks: list[Check], folder: Path, seconds: float, dry_run: bool = False) -> list[Outcome]:
    """Every check in order; what is known is on disk after each."""
    folder.mkdir(parents=True, exist_ok=True)
    runner = Runner(folder, seconds, INTERPRETED if dry_run else {})
    outcomes: list[Outcome] = []
    for check in checks:
        command = check.dry_command if dry_run else check.command
        if command is None:
            outcomes.append(Outcome(check.name, "ok: nothing to try without a GPU"))
        else:
            outcomes.append(runner.run(check.name, command, check.limit_s))
        (folder / "summary.txt").write_text(summary(outcomes) + "\n", encoding="utf-8")
        print(f"{check.name}: {outcomes[-1].status}, {outcomes[-1].seconds:.1f} s", flush=True)
    return outcomes


def parse_arguments(checks: tuple[Check, ...], description: str | None) -> argparse.Namespace:
    names = [check.name for check in checks]
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="time for all of them together")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), metavar="FOLDER")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU")
    return parser.parse_args()


def main(checks: tuple[Check, ...] = CHECKS, description: str | None = __doc__) -> int:
    args = parse_arguments(checks, description)
    folder = Path(args.out or tempfile.mkdtemp(prefix="gpu-checks-"))
    chosen = [check for check in checks if check.name in args.only]
    outcomes = run_all(chosen, folder, 60 * args.minutes, args.dry_run)
    print(f"\n{summary(outcomes)}\n\nall output: {folder}/log.txt", flush=True)
    return 0 if all(outcome.status.startswith("ok") for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
