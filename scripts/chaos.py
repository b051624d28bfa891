#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random kills and stalls under a steady load, and a history that must stay free of lost, doubled and wrong tokens.

    scripts/chaos.py --engine fake --groups 4 --ranks 2 --brokers 2 --gateways 2 --minutes 20 --kill-every 5 --seed 1
    scripts/chaos.py --engine demo --groups 2 --minutes 10 --kill-every 15

With the fake engine every answer is known in advance. With the demo model streams are compared with undisturbed runs:
equal, or different only where the model's two best logits lie within rounding. Exit code 0 says: every request ended
exactly once, at least 99 % of all are complete and exact, and nothing is left behind. Prints one JSON line at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mii_zmq.client import BackgroundLoop
from mii_zmq.transport import remove_socket_file
from tests.conftest import _processes_with
from tests.faults.harness.baseline import Baseline
from tests.faults.harness.demo_runs import DemoRuns
from tests.faults.harness.fleet import Fleet
from tests.faults.harness.history import History, Verdict
from tests.faults.harness.load import Load
from tests.faults.harness.mayhem import Mayhem

COMPLETE_SHARE = 0.99
SETTLE_S = 120.0
END_S = 60.0
REPORT_S = 30.0
FAKE_CLIENTS = {"http_stream": 6, "http_whole": 4, "zmq_stream": 9, "zmq_whole": 5}
"""Those through gateways lose their connections when one is killed, which counts as incomplete: with that many of them
about one request in 200."""
DEMO_CLIENTS = {"http_stream": 1, "zmq_stream": 5}


def main() -> int:
    options = _options()
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    say(f"seed {seed}")
    with _run_directory() as run_directory, tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        logs = Path(options.logs or temporary)
        logs.mkdir(parents=True, exist_ok=True)
        shared_memory = set(os.listdir("/dev/shm"))
        report = run(options, seed, logs)
        report["left_behind"] = left_behind(run_directory, shared_memory)
    report["is_good"] = is_good(report)
    print(json.dumps(report), flush=True)
    return 0 if report["is_good"] else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("fake", "demo"), default="fake")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--kill-every", type=float, default=5.0, metavar="S")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the fake engine")
    parser.add_argument("--logs", metavar="DIR", help="keep the processes' logs there")
    parser.add_argument("--clients", type=int, help="scale the load to about this many clients")
    return parser.parse_args()


def run(options: argparse.Namespace, seed: int, logs: Path) -> dict[str, Any]:
    """The whole experiment; returns what is to be printed."""
    demo = DemoRuns() if options.engine == "demo" else None
    history, fleet = History(), Fleet(logs)
    loop = BackgroundLoop("load")
    started = time.monotonic()
    try:
        model = f"fake:step_ms={options.step_ms:g}" if demo is None else demo.model
        fleet.start(
            model=model, groups=options.groups, ranks=options.ranks, brokers=options.brokers,
            gateways=options.gateways, options=() if demo is None else demo.options,
        )  # fmt: skip
        baseline = Baseline.take(fleet) if demo is None else None
        say(f"{len(fleet.pids())} processes are up after {time.monotonic() - started:.1f} s")
        urls = [fleet.url(name) for name in fleet.gateways]
        load = Load(history, fleet.deployment, urls, fleet.client_endpoints, seed)
        if demo is not None:
            demo.record(fleet.client_endpoints[0], fleet.deployment)
            load.case = demo.case
        mayhem = Mayhem(fleet, random.Random(seed), say)
        outcome = _under_load(options, loop, load, mayhem)
        verdict = history.check()
        if demo is not None:
            verdict.violations += demo.compare(history)
        report = _report(options, seed, verdict, history, load, mayhem)
        report.update(outcome)
        if baseline is not None:
            report["baseline"] = _check_baseline(baseline, fleet)
    finally:
        loop.close()
        fleet.close()
        for endpoint in (*fleet.client_endpoints, *fleet.worker_endpoints):
            remove_socket_file(endpoint)
    return report


def _under_load(options: argparse.Namespace, loop: BackgroundLoop, load: Load, mayhem: Mayhem) -> dict[str, Any]:
    """Load and mayhem for the given time, then an orderly end of both."""
    clients = FAKE_CLIENTS if options.engine == "fake" else DEMO_CLIENTS
    if options.clients:
        scale = options.clients / sum(clients.values())
        clients = {kind: max(1, round(count * scale)) for kind, count in clients.items()}
    threads = ThreadPoolExecutor(1)
    driving = threads.submit(loop.run, load.run(clients))
    started = next_strike = next_report = time.monotonic()
    next_strike += min(2.0, options.kill_every)
    while time.monotonic() - started < 60 * options.minutes and not driving.done():
        mayhem.turn()
        now = time.monotonic()
        if now >= next_strike and (options.engine == "fake" or mayhem.all_well) and mayhem.strike():
            next_strike = now + options.kill_every
        if now >= next_report:
            next_report = now + REPORT_S
            say(f"{now - started:.0f} s: {len(load.history)} requests, {sum(mayhem.counts.values())} faults")
        time.sleep(0.02)
    seconds = time.monotonic() - started
    has_settled = mayhem.settle(SETTLE_S)
    load.is_stopping = True
    deadline = time.monotonic() + END_S
    while not driving.done() and time.monotonic() < deadline:
        mayhem.turn()
        time.sleep(0.02)
    outcome = {"seconds": round(seconds, 1), "has_settled": has_settled, "unfinished": load.history.unfinished()[:20]}
    failure = driving.exception() if driving.done() else TimeoutError("the clients did not end")
    if failure is not None:
        outcome["load_failed"] = f"{type(failure).__name__}: {failure}"
    threads.shutdown(wait=False)
    return outcome


def _report(
    options: argparse.Namespace, seed: int, verdict: Verdict, history: History, load: Load, mayhem: Mayhem
) -> dict[str, Any]:
    for violation in verdict.violations[:20]:
        say(f"VIOLATION {violation}")
    for cause, count in verdict.errors.most_common():
        say(f"{count:6} {cause}")
        for message, number in verdict.messages[cause].most_common(3):
            say(f"       {number} x {message[:200]}")
    latencies = sorted(history.latencies())
    return {
        "engine": options.engine,
        "seed": seed,
        "faults": dict(sorted(mayhem.counts.items())),
        "num_faults": sum(mayhem.counts.values()),
        "restarts": dict(mayhem.num_restarts),
        "downtime_s": {kind: _spread(values) for kind, values in mayhem.downtimes.items()},
        "latency_s": _spread(latencies),
        "reconnects": load.num_reconnects,
        **verdict.as_dict(),
        "complete_share_of_unbroken": _share(verdict.num_complete, verdict.num_requests - verdict.num_broken),
        "examples": verdict.violations[:5],
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 5) if whole else 0.0


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {name: round(ordered[int(share * (len(ordered) - 1))], 3) for name, share in (("p50", 0.5), ("max", 1.0))}


def _check_baseline(baseline: Baseline, fleet: Fleet) -> str:
    try:
        baseline.check(fleet)
    except AssertionError as error:
        return str(error)[:3000]
    return "ok"


def is_good(report: dict[str, Any]) -> bool:
    share = report["complete"] / report["requests"] if report["requests"] else 0.0
    return (
        not report["violations"]
        and not report["unfinished"]
        and "load_failed" not in report
        and share >= COMPLETE_SHARE
        and report.get("baseline", "ok") == "ok"
        and not any(report["left_behind"].values())
    )


def left_behind(run_directory: Path, shared_memory: set[str]) -> dict[str, list[str]]:
    """What the fleet should have taken with it."""
    deadline = time.monotonic() + 10
    while (pids := _processes_with(str(run_directory)) - {os.getpid()}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return {
        "processes": [str(pid) for pid in pids],
        "files": [str(path) for path in run_directory.rglob("*")],
        "shared_memory": sorted(set(os.listdir("/dev/shm")) - shared_memory),
    }


@contextlib.contextmanager
def _run_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mz-", dir="/tmp") as directory:
        os.environ["MII_ZMQ_RUN_DIR"] = directory
        yield Path(directory)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
