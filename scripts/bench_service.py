#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the whole service on one GPU: HTTP clients -> gateways -> broker -> actor -> engine, real processes.

    python scripts/bench_service.py                          # everything, in about five minutes
    python scripts/bench_service.py offline closed           # the service's share of the engine's throughput
    python scripts/bench_service.py sla --plot-dir plots     # effective throughput over the number of clients
    python scripts/bench_service.py structured               # what grammars cost the requests without
    python scripts/bench_service.py --dry-run                # on any machine, a tiny random model
    python scripts/bench_service.py --dry-run fake           # the same with the fake engine

One JSON line per figure. Weights are random, of a published shape, and say nothing but text of the tokenizer (the demo
model's if it has been prepared here, else one that is made up). `offline` runs the requests of `closed` through the
engine alone, with the same settings, before the service starts; both are closed loops. Exit code 1: something failed,
was not ready in time, or found no time left; the end of the log that explains it is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from made_tokenizer import find_tokenizer
from service_grammar import structured
from service_load import LoadPool
from service_parts import DRY, Bench, Result, Sizes, closed_loops, offline, replaced, service_level
from service_stack import Service

from mii_zmq.command_line import to_arguments
from mii_zmq.config import EngineConfig
from mii_zmq.errors import MiiError
from mii_zmq.tokenizer import load_tokenizer

PARTS = ("offline", "closed", "sla", "structured")
NEEDED_S = {"offline": 60.0, "closed": 45.0, "sla": 100.0, "structured": 50.0}
"""Without so much time left a part is not begun; in a dry run without NEEDED_DRY_S."""
NEEDED_DRY_S = 5.0
LEVEL_LIMIT_S = 75.0
FAKE = "fake:step_ms=4,num_blocks=8192,max_model_len=16384"


class Printer:
    """Prints figures with what they were measured on, and notes what is wrong with them."""

    def __init__(self, args: argparse.Namespace, settings: dict[str, Any]) -> None:
        self.problems: list[str] = []
        self._out = args.out
        self._more = settings

    def __call__(self, result: Result) -> None:
        for name, found in {"": result, **result.get("beside_figures", {})}.items():
            if found.get("failures"):
                self.problems.append(f"{result['test']} {name}: failed requests: {found['failures']}")
        line = json.dumps({**result, **self._more})
        print(line, flush=True)
        if self._out:
            with self._out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def problem(self, text: str) -> None:
        self.problems.append(text)
        print(text, flush=True)


class Run:
    """One call: its parts in order, within its time."""

    def __init__(self, args: argparse.Namespace, bench: Bench, show: Printer) -> None:
        self._args, self._bench, self._show = args, bench, show
        self._end = time.monotonic() + 60 * args.minutes
        self._offline_rates: dict[int, float] = {}

    @property
    def _left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    async def run(self) -> None:
        parts = self._args.parts
        if "offline" in parts and self._may_begin("offline"):
            try:
                async for result in offline(self._bench, min(self._args.start_limit_s + 60, self._left_s)):
                    if "concurrency" in result:
                        self._offline_rates[result["concurrency"]] = result["output_tokens_per_s"]
                    self._show(result)
            except SystemExit as error:
                # The service can be measured without.
                self._show.problem(str(error))
        if parts != ["offline"]:
            await self._with_service([part for part in parts if part != "offline"])

    async def _with_service(self, parts: list[str]) -> None:
        args, bench = self._args, self._bench
        engine = [argument for argument in to_arguments(bench.engine) if not argument.startswith("--model=")]
        service = Service(
            [bench.engine.model, f"--gateways={args.gateways}", *engine], bench.folder / "service.log",
            min(args.start_limit_s, self._left_s),
        )  # fmt: skip
        async with service, LoadPool(args.clients) as pool:
            self._show({"test": "service start", "seconds": round(service.seconds, 2)})
            for part in parts:
                if not self._may_begin(part):
                    continue
                try:
                    async for result in self._results(part, service, pool):
                        self._show(result)
                except SystemExit as error:
                    self._show.problem(f"{part}: {error}; the service's log:\n{service.tail()}")
                    # The clients may be in the middle of a level.
                    return
                if not service.is_whole:
                    self._show.problem(f"{part}: the engine was lost; the service's log:\n{service.tail()}")
                    return

    def _results(self, part: str, service: Service, pool: LoadPool) -> AsyncIterator[Result]:
        limit_s = min(LEVEL_LIMIT_S, self._left_s)
        if part == "closed":
            return closed_loops(self._bench, service, pool, self._offline_rates, limit_s)
        if part == "sla":
            return service_level(self._bench, service, pool, limit_s, self._args.plot_dir)
        return structured(self._bench, service, pool, limit_s)

    def _may_begin(self, part: str) -> bool:
        needed = NEEDED_DRY_S if self._args.dry_run else NEEDED_S[part]
        if self._left_s >= needed:
            return True
        self._show.problem(f"{part}: not run, {self._left_s:.0f} s are left and it takes about {needed:.0f} s")
        return False


def integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"{', '.join(PARTS)}; all")
    parser.add_argument("--random-weights", metavar="SHAPE", help="default: 8B; in a dry run tiny")
    parser.add_argument("--tokenizer", metavar="DIR", help="default: the demo model's, or one that is made up")
    parser.add_argument("--gateways", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--clients", type=int, default=5, help="load processes, at least 2 (default: 5)")
    parser.add_argument("--token-budget", type=int, help="tokens per step (default: the engine's)")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--gpu-memory-fraction", type=float, default=0.9)
    parser.add_argument("--sla-clients", type=integers, metavar="N,...", help="default: 1,2,4,8,16,32,64")
    parser.add_argument("--sla-seconds", type=float, metavar="S", help="per number of clients (default: 12)")
    parser.add_argument("--minutes", type=float, default=6.0, help="what does not fit is left out (default: 6)")
    parser.add_argument("--start-limit-s", type=float, default=120.0, help="for the service to be ready")
    parser.add_argument("--plot-dir", type=Path, default=os.environ.get("OUT"), help="for PNG plots (default: $OUT)")
    parser.add_argument("--dry-run", nargs="?", const="tiny", choices=("tiny", "fake"), help="without a GPU")
    parser.add_argument("--full-size", action="store_true", help="a dry run with as many requests as a real one")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file as well")
    args = parser.parse_args(argv)
    args.parts = [part for part in PARTS if part in (args.parts or PARTS)]
    args.plot_dir = None if args.plot_dir is None else Path(args.plot_dir)
    if args.clients < 2 or args.gateways < 1:
        parser.error("--clients must be at least 2 (one may be needed for a load beside), --gateways at least 1")
    return args


def prepare(args: argparse.Namespace, folder: Path) -> tuple[Bench, dict[str, Any]]:
    """The engine's settings, and what is said of them in every line.

    Raises:
        MiiError: an impossible setting, or a tokenizer that cannot be read.
    """
    shape = args.random_weights or ("tiny" if args.dry_run else "8B")
    sizes = replaced(
        DRY if args.dry_run and not args.full_size else Sizes(),
        sla_clients=args.sla_clients,
        sla_seconds=args.sla_seconds,
    )
    if args.dry_run == "fake":
        tokenizer, kind, model, vocab_size = "fake:", "bytes", FAKE, 94
    else:
        model = f"random:{shape}"
        rows = shape_rows(shape)
        if args.tokenizer:
            # The processes run in the repository's root.
            is_directory = Path(args.tokenizer).is_dir()
            tokenizer, kind = str(Path(args.tokenizer).resolve()) if is_directory else args.tokenizer, "given"
        else:
            found, kind = find_tokenizer(folder / "tokenizer", rows)
            tokenizer = str(found)
        vocab_size = min(load_tokenizer(tokenizer).vocab_size, rows)
    is_tiny = args.dry_run == "tiny"
    engine = EngineConfig(
        model=model, tokenizer=tokenizer, device="cpu" if args.dry_run else "cuda", token_budget=args.token_budget,
        max_model_len=args.max_model_len or (1024 if is_tiny else None), num_threads=1 if is_tiny else None,
        gpu_memory_fraction=args.gpu_memory_fraction, kv_cache_gb=0.1 if is_tiny else None,
    )  # fmt: skip
    facts = {
        "shape": "fake" if args.dry_run == "fake" else shape, "budget": args.token_budget or "default",
        "tokenizer": f"{kind}, {vocab_size} ids", "gateways": args.gateways, "load_processes": args.clients,
        "prefix_cache": engine.prefix_cache, "torch": version("torch"), "card": card(args),
    }  # fmt: skip
    return Bench(engine, vocab_size, sizes, folder), facts


def shape_rows(shape: str) -> int:
    """Ids of a shape's vocabulary."""
    # Imported here: torch takes seconds, and the fake engine does without.
    from mii_zmq.worker.models.random_weights import shape_config

    return shape_config(shape).vocab_size


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def card(args: argparse.Namespace) -> str:
    """Its name by the driver's own tool: torch would take memory on it."""
    if args.dry_run:
        return "none, a dry run"
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, _on_sigterm)
    folder = Path(tempfile.mkdtemp(prefix="bench-service-"))
    try:
        bench, facts = prepare(args, folder)
        show = Printer(args, facts)
        asyncio.run(Run(args, bench, show).run())
    except MiiError as error:
        sys.exit(f"bench_service: {error}")
    finally:
        if args.plot_dir is not None:
            args.plot_dir.mkdir(parents=True, exist_ok=True)
            for log in folder.glob("*.log"):
                shutil.copy(log, args.plot_dir / f"bench_{log.name}")
        shutil.rmtree(folder, ignore_errors=True)
    for problem in show.problems:
        print(f"PROBLEM: {problem.splitlines()[0]}", flush=True)
    return 1 if show.problems else 0


def _on_sigterm(number: int, frame: Any) -> NoReturn:
    """Ends in order, and with it what was started."""
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main())
