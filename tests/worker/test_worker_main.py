# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mii_zmq.errors import StartupError
from mii_zmq.process import Child
from mii_zmq.protocol import Verb
from tests.worker.scripted_broker import PATIENCE_S, staged, worker_process

pytestmark = pytest.mark.slow


def run_worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mii_zmq.worker", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def up_to_readiness(worker: Child) -> list[dict[str, Any]]:
    """What it announces, the last one included."""
    found = []
    for announcement in worker.announcements(PATIENCE_S):
        found.append(announcement)
        if announcement.get("ready"):
            return found
    raise AssertionError(f"it was not ready in time, or ended: {found}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model=/no/such/model", "--deployment=d"], "there is no model directory '/no/such/model'"),
        (["--model=fake:stepms=5", "--deployment=d"], "option 'stepms=5' of the fake model is unknown"),
        (["--model=fake:", "--deployment=d", "--block-size=48"], "block_size is 48; it must be a power of two"),
        (["--model=fake:", "--deployment=d", "--max-sequences=many"], "invalid int value: 'many'"),
        (["--model=fake:", "--deployment=d", "--modl=x"], "--modl=x"),
        (["--model=fake:"], "--deployment"),
        (["--model=fake:", "--deployment=a b"], "deployment name 'a b'"),
        (["--model=fake:", "--deployment=d", "--brokers=tcp://nowhere"], "broker endpoint 'tcp://nowhere'"),
        (["--model=fake:", "--deployment=d", "--tokenizer=/no/such"], "there is no model directory '/no/such'"),
    ],
)
def test_wrong_settings_end_with_one_clear_line(arguments: list[str], expected: str) -> None:
    done = run_worker(*arguments)
    errors = [line for line in done.stderr.splitlines() if " E [" in line]
    assert done.returncode == 1
    assert len(errors) == 1, done.stderr
    assert expected in errors[0]
    assert "Traceback" not in done.stderr


def test_directory_without_a_model_ends_with_one_clear_line(tmp_path: Path) -> None:
    done = run_worker(f"--model={tmp_path}", "--deployment=d")
    errors = [line for line in done.stderr.splitlines() if " E [" in line]
    assert (done.returncode, len(errors)) == (1, 1), done.stderr
    assert str(tmp_path) in errors[0]
    assert "Traceback" not in done.stderr


def test_failure_while_loading_is_announced() -> None:
    with worker_process("--model=/no/such/model", "--deployment=d") as worker:
        with pytest.raises(StartupError, match="there is no model directory"):
            worker.wait_ready(PATIENCE_S)
        assert worker.process.wait(PATIENCE_S) == 1


async def test_ready_is_announced_with_limits_and_without_torch() -> None:
    async with staged("fake:max_model_len=512,num_blocks=16") as stage:
        announcements = up_to_readiness(stage.worker)
        assert announcements[0] == {"progress": "starting", "fraction": 0.0}
        ready = announcements[-1]
        assert (ready["deployment"], ready["group"]) == ("d", "g")
        assert (ready["limits"]["max_model_len"], ready["limits"]["kv_tokens"]) == (512, 1024)
        for pid in (stage.worker.pid, stage.engine_pid):
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()  # noqa: ASYNC240 - a file of the kernel


async def test_ready_line_names_group_deployment_and_model(capfd: pytest.CaptureFixture[str]) -> None:
    async with staged("fake:max_model_len=512,num_blocks=16") as stage:
        await stage.broker.heartbeats.get()
        stage.terminate()
        await stage.broker.skip_to(Verb.DISCONNECT)
        assert await stage.exit_code() == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines == [
        "group g serves d (model fake:max_model_len=512,num_blocks=16, context 512, 1024 KV tokens, 256 sequences)"
    ]


def test_group_that_no_broker_answers_ends_in_order_on_sigterm() -> None:
    with worker_process("--model=fake:", "--deployment=d", "--brokers=tcp://127.0.0.1:9") as worker:
        assert next(worker.announcements(PATIENCE_S)) == {"progress": "starting", "fraction": 0.0}
        assert worker.stop(PATIENCE_S) == 0


async def test_checkpoint_is_loaded_with_progress_and_answers(tiny_model: Path) -> None:
    async with staged(str(tiny_model), "--num-blocks=8", "--num-threads=1", "--device=cpu") as stage:
        assert "KV pool" in stage.ready["info"]["memory"]
        assert stage.ready["max_model_len"] == 512
        request_id = stage.broker.generate(1, "hello", max_new_tokens=4, ignore_eos=True, do_sample=False)
        deltas, final = await stage.broker.collect(request_id)
        assert final.verb is Verb.FINAL
        assert sum(len(delta.token_ids) // 4 for delta in deltas) == 4
        progress = [facts for facts in up_to_readiness(stage.worker) if "progress" in facts]
        assert progress[-1]["fraction"] == 1.0
