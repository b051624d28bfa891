# SPDX-License-Identifier: Apache-2.0
"""What is shown of a serving benchmark: table, JSON and plots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mii_zmq.bench_client import ServerOptions
from mii_zmq.bench_datasets import RandomOptions
from mii_zmq.bench_metrics import Failure
from mii_zmq.bench_plots import draw
from mii_zmq.bench_report import as_json, text_table
from mii_zmq.serving_bench import BenchOptions, BenchResult, LoadOptions, measured
from tests.bench_server import record

OPTIONS = BenchOptions(
    ServerOptions("http://x", api_key="secret"),
    RandomOptions(),
    LoadOptions(),
    objectives={"ttft": 500.0},
    sla_rates=(4.0,),
)


@pytest.fixture
def result() -> BenchResult:
    failed = replace(record(), failure=Failure("timeout", "not finished"))
    levels = [
        measured(1, [record(0.1), record(0.1, has_usage=False)], 2.0, 0.1, OPTIONS),
        measured(2, [record(0.1), record(0.1), record(0.3), failed], 2.0, 0.95, OPTIONS),
        measured(4, [failed], 2.0, 0.1, OPTIONS),
    ]
    return BenchResult("m", tuple(levels))


def test_the_table_has_a_column_per_level_and_hides_nothing(result: BenchResult) -> None:
    table = text_table(result, OPTIONS)
    rows = {
        line[:36].strip(): line[36:].split() for line in table.splitlines() if not line.startswith(("FAIL", "note"))
    }
    assert rows["concurrency"] == ["1", "2", "4"]
    assert rows["failed"] == ["0", "1", "1"]
    assert rows["goodput, requests/s"] == ["1.00", "1.50", "0.00"]
    assert rows["TTFT p99, ms"] == ["100.00", "100.00", "-"]
    assert rows["ITL mean, ms"] == ["100.00", "166.67", "-"]
    assert rows["effective at 4 tokens/s, requests/s"] == ["1.00", "(100%)", "1.00", "(50%)", "0.00", "(0%)"]
    assert "FAILED at concurrency 4: 1 x timeout; for example: not finished" in table
    assert "note at concurrency 1: 1 answers stated no usage" in table
    assert "note at concurrency 2: this client used 0.95 of a core" in table
    assert "client queue" not in table


def test_json_bears_vllms_names_and_no_key(result: BenchResult) -> None:
    text = json.dumps(as_json(result, OPTIONS, is_detailed=True), allow_nan=False)
    assert "secret" not in text
    found = json.loads(text)
    assert found["options"]["load"]["request_rate"] == "inf"
    first, second, third = found["levels"]
    assert (first["max_concurrency"], first["completed"], first["without_usage"]) == (1, 2, 1)
    assert (second["failed"], second["failures"], second["request_throughput"]) == (1, {"timeout": 1}, 1.5)
    assert second["effective_throughput"] == {"4": {"requests_per_s": 1.0, "share": 0.5}}
    for name in ("mean_ttft_ms", "median_tpot_ms", "std_itl_ms", "p99_e2el_ms"):
        assert first[name] >= 0
        assert name not in third
    assert [one["failure"] for one in second["requests"]] == [None, None, None, "timeout: not finished"]
    assert "requests" not in as_json(result, OPTIONS, is_detailed=False)["levels"][0]


@pytest.mark.slow
def test_plots_are_png_files_even_where_everything_failed(result: BenchResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = draw(result, tmp_path)
    assert [path.name for path in paths] == ["latency_throughput.png", "effective_throughput.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert draw(BenchResult("m", result.levels[2:]), tmp_path) == paths
