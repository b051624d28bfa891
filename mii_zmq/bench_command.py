# SPDX-License-Identifier: Apache-2.0
"""`python -m mii_zmq bench`: options of the serving benchmark; progress to stderr, the table to stdout.

The benchmark itself (and aiohttp with it) is imported when it runs, so that the other commands start quickly.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mii_zmq.errors import ConfigError
from mii_zmq.progress import Progress

if TYPE_CHECKING:
    from mii_zmq.serving_bench import BenchResult, Report

PROGRESS_STEPS = 10
"""Lines per level where stderr is no terminal."""
DESCRIPTION = """Measure a server that speaks OpenAI's API, ours or any other. docs/benchmarking.md explains it.

  python -m mii_zmq bench                                     what is served on this host, 100 requests at once
  python -m mii_zmq bench --url http://HOST:PORT --concurrency 1 2 4 8 --plot-dir plots
  python -m mii_zmq bench --request-rate 5 --goodput ttft:500 tpot:50"""


def add_bench(commands: Any) -> None:
    """Register the command with argparse's subparsers."""
    bench = commands.add_parser(
        "bench",
        help="measure a server",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_server(bench.add_argument_group("server"))
    _add_load(bench.add_argument_group("load"))
    _add_dataset(bench.add_argument_group("prompts"))
    _add_results(bench.add_argument_group("results"))
    bench.set_defaults(run=run)


def _add_server(group: Any) -> None:
    group.add_argument("--url", help="address as http://HOST:PORT (default: the deployment that runs on this host)")
    group.add_argument("--model", metavar="NAME", help="model to ask for (default: the first that is listed)")
    group.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="completions sends token ids where it can, chat sends words (default: completions)",
    )
    group.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds a bearer key to send")
    group.add_argument("--ignore-eos", action="store_true", help="have every output go on to its full length")
    group.add_argument("--temperature", type=float, metavar="T", default=0.0, help="0: greedy (default: 0)")
    group.add_argument("--extra-body", metavar="JSON", default="{}", help="an object of further request fields")
    group.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="for one request (default: 600)")
    group.add_argument(
        "--ready-timeout-s",
        type=float,
        default=60.0,
        metavar="S",
        help="to wait for a model to be listed (default: 60)",
    )


def _add_load(group: Any) -> None:
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests (default: 100)")
    group.add_argument(
        "--prompts-per-client", type=int, metavar="N", help="of each level at least this many times its concurrency"
    )
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="R", help="requests due per second (default: inf)"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of the gaps' gamma distribution; 1: Poisson, less: burstier, inf: even (default: 1)",
    )
    limits = group.add_mutually_exclusive_group()
    limits.add_argument("--max-concurrency", type=int, metavar="N", help="most requests at a time (default: no limit)")
    limits.add_argument(
        "--concurrency", type=int, nargs="+", metavar="N", help="a sweep: one run with each of these limits"
    )
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before (default: 1)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")


def _add_dataset(group: Any) -> None:
    group.add_argument(
        "--dataset",
        choices=("random", "prefix-repetition", "sharegpt"),
        default="random",
        help="kind of prompts (default: random)",
    )
    group.add_argument(
        "--vocab-size", type=int, default=94, metavar="N", help="random token ids are from 32 to N - 1 (default: 94)"
    )
    group.add_argument("--input-len", type=int, default=1024, metavar="N", help="random: mean tokens (default: 1024)")
    group.add_argument(
        "--output-len",
        type=int,
        metavar="N",
        help="tokens to ask for (default: 128; sharegpt: as long as the answer in the file)",
    )
    group.add_argument("--prefix-len", type=int, metavar="N", help="tokens shared (default: random 0, repetition 256)")
    group.add_argument("--range-ratio", type=float, default=0.0, metavar="R", help="random: spread (default: 0)")
    group.add_argument(
        "--length-distribution",
        choices=("uniform", "normal"),
        default="uniform",
        help="random: lengths within mean * (1 ± R), or normal with a deviation of mean * R (default: uniform)",
    )
    group.add_argument("--max-input-len", type=int, metavar="N", help="random: longer prompts are cut to it")
    group.add_argument("--suffix-len", type=int, default=256, metavar="N", help="repetition: own tokens (default: 256)")
    group.add_argument("--num-prefixes", type=int, default=10, metavar="N", help="repetition: prefixes (default: 10)")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="sharegpt: the JSON file")


def _add_results(group: Any) -> None:
    group.add_argument(
        "--percentiles", type=float, nargs="+", default=[99.0], metavar="P", help="to show (default: 99)"
    )
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="objectives of ttft, tpot, e2el, as in ttft:500"
    )
    group.add_argument(
        "--sla-rates",
        type=float,
        nargs="*",
        default=[2.0, 4.0, 6.0],
        metavar="R",
        help="tokens/s of DeepSpeed-MII's service level for effective throughput; none: leave it out (default: 2 4 6)",
    )
    group.add_argument("--save-result", type=Path, metavar="FILE", help="write everything as JSON")
    group.add_argument("--save-detailed", action="store_true", help="every request as well")
    group.add_argument("--plot-dir", type=Path, metavar="DIR", help="draw PNG plots into it (extra 'bench')")


def run(options: argparse.Namespace) -> int:
    """Exit code 1 if any request failed.

    Raises:
        MiiError: an impossible option, or nothing to measure; a message for one line.
    """
    import uvloop

    from mii_zmq.bench_plots import check_can_plot, draw
    from mii_zmq.bench_report import as_json, text_table
    from mii_zmq.bench_settings import bench_options
    from mii_zmq.serving_bench import run_bench

    bench = bench_options(options)
    if options.plot_dir is not None:
        check_can_plot(options.plot_dir)
    progress = Progress()
    try:
        result: BenchResult = uvloop.run(run_bench(bench, reporter(progress)))
    finally:
        progress.close()
    print(f"model {result.model} at {bench.server.url}, {options.dataset} prompts to {bench.server.endpoint}")
    print(text_table(result, bench), flush=True)
    try:
        if options.save_result is not None:
            text = json.dumps(as_json(result, bench, is_detailed=options.save_detailed), indent=1)
            options.save_result.write_text(text + "\n")
            print(f"wrote {options.save_result}", file=sys.stderr)
        if options.plot_dir is not None:
            for path in draw(result, options.plot_dir):
                print(f"wrote {path}", file=sys.stderr)
    except OSError as error:
        raise ConfigError(f"cannot write the results: {error}; the figures above are complete") from None
    return 1 if result.num_failed else 0


def reporter(progress: Progress) -> Report:
    """Shows every change on a terminal, a few lines elsewhere."""
    is_terminal = sys.stderr.isatty()

    def report(concurrency: int | None, num_done: int, num_requests: int, num_failed: int) -> None:
        step = 1 if is_terminal else math.ceil(num_requests / PROGRESS_STEPS)
        if num_done % step and num_done != num_requests:
            return
        name = "requests" if concurrency is None else f"concurrency {concurrency}"
        text = f"{num_done} of {num_requests} done" + (f", {num_failed} FAILED" if num_failed else "")
        progress({"name": name, "progress": text, "fraction": num_done / num_requests})

    return report
