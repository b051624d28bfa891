#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""schemathesis against a running deployment (fake engine), by the OpenAPI description that its gateway serves.

    pip install -e '.[fuzz]'
    scripts/fuzz_doors.py --minutes 5 --seed 1

Sends examples, boundary cases and random requests, right and wrong ones, to every operation. Exit code 0 says: no 5xx,
no status, media type, header or body that is not described, no wrong request that was taken, and the deployment is
still ready. Prints what was found, and one JSON line of figures at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.stack import Stack, http

ROOT = Path(__file__).resolve().parents[1]
MODEL = "fake:eos_every=20,max_model_len=256"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
HOOKS = "scripts.fuzz_hooks"
END_S = 120.0
_ANSWERED = re.compile(r'^mii_gateway_http_requests_total\{.*code="(\d+)".*\} ([0-9.e+]+)$', re.MULTILINE)


def main() -> int:
    options = _options()
    if importlib.util.find_spec("schemathesis") is None:
        print("schemathesis is not installed here; install it with: pip install -e '.[fuzz]'", file=sys.stderr)
        return 2
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        directory = Path(options.report or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        stack = Stack()
        try:
            stack.start_group("group", MODEL)
            url = stack.start_gateway("--admin-endpoints")
            code = fuzz(url, options.minutes * 60, seed, directory)
            is_ready = http(url + "/health/ready")[0] == 200
            answered = statuses(http(url + "/metrics")[1].decode())
        finally:
            stack.close()
        figures = summary(json.loads((directory / "report.json").read_text()))
    is_good = code == 0 and is_ready and not any(status >= "500" for status in answered)
    print(json.dumps({**figures, "statuses": answered, "seed": seed, "is_good": is_good}), flush=True)
    return 0 if is_good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--report", metavar="DIR", help="keep the report of every request there")
    return parser.parse_args()


def fuzz(url: str, seconds: float, seed: int, directory: Path) -> int:
    """Runs schemathesis, which prints its findings; returns its exit code."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", url + "/openapi.json"),
        *("--max-time", str(max(1, round(seconds))), "--seed", str(seed), "--phases", "examples,coverage,fuzzing"),
        *("--checks", ",".join(CHECKS), "--continue-on-failure", "--generation-database", "none", "--no-color"),
        *("--report", "json", "--report-json-path", str(directory / "report.json")),
    ]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS, "PYTHONPATH": paths}
    return subprocess.run(command, env=environment, cwd=directory, timeout=seconds + END_S, check=False).returncode


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The figures of schemathesis' report."""
    return {
        "operations": report["operations"]["tested"],
        "cases": report["test_cases"]["generated"],
        "seconds": round(report["running_time"], 1),
        "findings": [[found["code"], found["title"], found["operations"]] for found in report["failures"]],
        "errors": len(report["errors"]),
    }


def statuses(metrics: str) -> dict[str, int]:
    """What the gateway says that it answered: requests by status."""
    found: dict[str, int] = {}
    for code, number in _ANSWERED.findall(metrics):
        found[code] = found.get(code, 0) + round(float(number))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    sys.exit(main())
