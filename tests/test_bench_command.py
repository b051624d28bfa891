# SPDX-License-Identifier: Apache-2.0
"""The command line of `bench`: what it asks for, and what it refuses."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pytest

from mii_zmq import cli
from mii_zmq.bench_command import add_bench, reporter
from mii_zmq.bench_datasets import PrefixOptions, RandomOptions, ShareGPTOptions
from mii_zmq.bench_settings import bench_options
from mii_zmq.progress import Progress
from mii_zmq.serving_bench import BenchOptions

URL = "http://127.0.0.1:1"


def parsed(*arguments: str) -> BenchOptions:
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers())
    return bench_options(parser.parse_args(["bench", "--url", URL, *arguments]))


def test_defaults() -> None:
    options = parsed()
    assert options.dataset == RandomOptions()
    assert options.load.levels == (None,)
    assert math.isinf(options.load.request_rate)
    assert (options.server.api_key, options.server.temperature, options.model) == (None, 0.0, None)
    assert options.sla_rates == (2.0, 4.0, 6.0)


def test_options_reach_their_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    options = parsed(
        "--concurrency", "1", "8", "--prompts-per-client", "4", "--request-rate", "2.5", "--burstiness", "inf",
        "--api-key-env", "SOME_KEY", "--extra-body", '{"top_k": 5}', "--goodput", "ttft:500", "tpot:50",
        "--percentiles", "50", "99.9", "--sla-rates",
    )  # fmt: skip
    assert options.load.levels == (1, 8)
    assert (options.load.prompts_per_client, options.load.request_rate) == (4, 2.5)
    assert (options.server.api_key, options.server.extra_body) == ("secret", {"top_k": 5})
    assert options.objectives == {"ttft": 500.0, "tpot": 50.0}
    assert (options.percentiles, options.sla_rates) == ((50.0, 99.9), ())
    assert parsed("--max-concurrency", "4").load.levels == (4,)
    assert parsed("--dataset", "prefix-repetition", "--num-prefixes", "3").dataset == PrefixOptions(256, 256, 3, 128)
    file = tmp_path / "s.json"
    assert parsed("--dataset", "sharegpt", "--dataset-path", str(file)).dataset == ShareGPTOptions(file, None)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0; it must be above 0"),
        (["--concurrency", "4", "-1"], "--concurrency is -1"),
        (["--request-rate", "nan"], "--request-rate is nan"),
        (["--range-ratio", "1"], "--range-ratio is 1; it must be at least 0 and below 1"),
        (["--percentiles", "101"], "--percentiles is 101"),
        (["--vocab-size", "32"], "--vocab-size is 32"),
        (["--max-input-len", "5", "--prefix-len", "5"], "--max-input-len 5 leaves no room"),
        (["--goodput", "itl:5"], "--goodput 'itl:5'"),
        (["--extra-body", "{"], "--extra-body is not JSON"),
        (["--extra-body", "[]"], "--extra-body [] is no JSON object"),
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY: that environment variable is not set"),
        (["--dataset", "sharegpt"], "needs --dataset-path"),
        (["--save-result", "/nowhere/r.json"], "/nowhere/r.json is in no existing directory"),
        (["--plot-dir", "/dev/null/plots"], "/dev/null/plots cannot be made"),
        (["--url", "nonsense"], "'nonsense' is no HTTP address"),
        (["--ready-timeout-s", "0"], "no model is served at http://127.0.0.1:1/v1"),
        (["--model", "m"], "a warm-up request failed (no connection)"),
    ],
)
def test_errors_are_one_line_and_a_code(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--url", URL, *arguments]) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert line.startswith("error: ")
    assert error in line
    assert printed.out == ""


def test_help_names_every_option_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "--help"])
    printed = capsys.readouterr().out
    for option in ("--request-rate", "--burstiness", "--concurrency", "--dataset-path", "--goodput", "--plot-dir"):
        assert option in printed


def test_without_an_address_and_a_deployment_it_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 1
    assert "which server? Name it with --url" in capsys.readouterr().err


def test_progress_is_a_few_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report = reporter(Progress(sys.stderr))
    for num_done in range(96):
        report(4, num_done, 95, num_done // 50)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[0] == "concurrency 4: 0 of 95 done"
    assert lines[-1] == "concurrency 4: 95 of 95 done, 1 FAILED"
