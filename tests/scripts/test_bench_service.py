# SPDX-License-Identifier: Apache-2.0
"""The measurement of the whole service, in small and as far as it runs without a GPU."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mii_zmq.bench_metrics import RequestRecord
from mii_zmq.tokenizer import load_tokenizer
from mii_zmq.worker.core import EngineCore
from mii_zmq.worker.fake import FakeExecutor
from mii_zmq.worker.models.random_vocabulary import readable_ids
from mii_zmq.worker.plan import EngineLimits, SequenceRequest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def record(*chunk_times: float) -> RequestRecord:
    return RequestRecord(4, len(chunk_times), chunk_times[0] - 1, chunk_times[-1], chunk_times)


def test_arguments(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parse = script("bench_service").parse_arguments
    assert parse([]).parts == ["offline", "closed", "sla", "structured"]
    assert parse(["sla", "offline"]).parts == ["offline", "sla"]
    assert parse(["--dry-run"]).dry_run == "tiny"
    assert parse(["--dry-run", "fake", "--sla-clients", "1,2"]).sla_clients == (1, 2)
    for wrong in (["everything"], ["--clients", "1"], ["--gateways", "0"], ["--dry-run", "huge"]):
        with pytest.raises(SystemExit):
            parse(wrong)
    assert "--clients must be at least 2" in capsys.readouterr().err


def test_plots_go_where_the_checks_want_them(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", "/elsewhere")
    assert script("bench_service").parse_arguments([]).plot_dir == Path("/elsewhere")


def test_the_queue_gives_every_request_once(script: Any) -> None:
    load = script("service_load")
    assert load.shares(10, 4) == [3, 3, 2, 2]
    pool = load.LoadPool(1)
    pool._fill(5)
    assert [load.take_ticket(pool._tickets_read) for _ in range(2)] == [0, 1]
    pool._fill(3)
    assert [load.take_ticket(pool._tickets_read) for _ in range(4)] == [0, 1, 2, None]
    with pytest.raises(ValueError, match="at most 16384"):
        pool._fill(20_000)
    asyncio.run(pool.__aexit__())


def test_gaps_are_those_inside_the_window(script: Any) -> None:
    load, parts = script("service_load"), script("service_parts")
    records = [record(10.5, 11.0, 11.25, 13.0), record(11.5, 12.0)]
    level = load.Level(records, [], 10.0, 3.0, [])
    assert parts.gaps_between(level, lead_s=1.0, window_s=2.5) == [0.25, 0.5]
    assert parts.events_per_token(records) == 1.0
    assert parts.events_per_token([]) == 0.0


def test_counters_of_another_engine_are_no_figure(script: Any) -> None:
    increase = script("service_parts").increase
    assert increase({"step": 3}, {"step": 10}, "step") == 7
    assert increase({"step": 10}, {"step": 3}, "step") is None
    assert increase({}, {"step": 3}, "step") is None


def test_cpu_shares_are_of_the_time_asked_for(script: Any) -> None:
    watch = script("service_stack").CpuWatch({"one": os.getpid()})
    watch._samples = [(float(at), {"one": used}) for at, used in enumerate((0.0, 5.0, 5.5, 5.75, 9.0))]
    watch._threads = [{"one": {"7:main": 1.0, "8:io": 0.0}}, {"one": {"7:main": 1.5, "8:io": 0.125, "9:new": 0.125}}]
    assert watch.shares(1.0, 2.0) == {"one": {"mean": 0.38, "max": 0.5, "busiest_thread": ["main", 0.25]}}
    # Too short a time: all samples.
    assert watch.shares(1.2, 0.5)["one"]["mean"] == 2.25


def test_cpu_time_of_processes_and_threads(script: Any) -> None:
    stack = script("service_stack")
    assert 0 < stack.cpu_seconds(os.getpid()) <= sum(os.times()[:2]) + 0.02
    assert any(name.startswith(f"{os.getpid()}:") for name in stack.thread_seconds(os.getpid()))
    assert stack.cpu_seconds(2**22 + 1) == 0.0
    assert stack.thread_seconds(2**22 + 1) == {}


def test_schemas_differ(script: Any) -> None:
    grammar = script("service_grammar")
    schemas = [grammar.response_format(index) for index in range(grammar.NUM_SCHEMAS)]
    assert len({json.dumps(schema) for schema in schemas}) == len(schemas)
    schema = schemas[0]["json_schema"]["schema"]
    assert schema["required"] == list(schema["properties"])


@pytest.mark.parametrize("num_tokens", [300, 1024, 49152])
def test_a_tokenizer_is_made_of_nothing(script: Any, num_tokens: int, tmp_path: Path) -> None:
    script("made_tokenizer").make_tokenizer(tmp_path, num_tokens)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == num_tokens
    text = "An answer, please: naïve 你好"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(readable_ids(tokenizer, num_tokens)) > 0.4 * num_tokens
    assert tokenizer.chat_template is not None


def test_the_offline_loop_keeps_its_concurrency(script: Any) -> None:
    offline = script("service_offline")
    assert offline.levels("64:512,256:1024") == [(64, 512), (256, 1024)]
    core = EngineCore(FakeExecutor(EngineLimits(257, 256, 64, 16, 8, 64)))
    requests = [SequenceRequest(index, [1, 2, 3], 5) for index in range(7)]
    running = []
    add = core.add

    def noted(request: SequenceRequest) -> None:
        add(request)
        running.append(core.stats().num_running + core.stats().num_waiting)

    core.add = noted  # type: ignore[method-assign]
    found = offline.run_level(core, requests, concurrency=3)
    assert found["output_tokens"] == 35
    assert len(running) == 7
    assert max(running) == 3


@pytest.mark.slow
async def test_a_service_that_is_not_ready_in_time_leaves_its_log_and_no_process(script: Any, tmp_path: Path) -> None:
    stack = script("service_stack")
    service = stack.Service(["fake:", "--gateways=1"], tmp_path / "log", limit_s=0.05)
    with pytest.raises(SystemExit, match=r"(?s)the service .* its log:.*within 0 s"):
        await service.__aenter__()
    assert service._pids
    assert service._living() == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["fake", "tiny"])
def test_everything_runs_dry(kind: str, tmp_path: Path) -> None:
    command = ["scripts/bench_service.py", "--dry-run", kind, "--gateways", "2", "--clients", "2"]
    done = subprocess.run(
        [sys.executable, *command, "--sla-seconds", "0.5", "--plot-dir", str(tmp_path)],
        cwd=SCRIPTS.parent, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["test"] for line in found] == [
        "offline start", "offline 4", "offline 8", "service start", "service 4", "service 8", "sla 1", "sla 2",
        "sla plots", "structured",
    ]  # fmt: skip
    for line in found[4:6]:
        assert line["failures"] == {}
        assert line["share_of_offline"] > 0
        # Every token is text, and an event of its own.
        assert line["events_per_token"] == 1.0 or kind == "fake"
        assert {"broker", "gateway 1", "gateway 2", "actor", "engine", "client 1"} <= set(line["cpu"])
    assert (tmp_path / "effective_throughput.png").is_file()
    assert (tmp_path / "bench_service.log").is_file()
