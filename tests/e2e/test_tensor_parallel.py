# SPDX-License-Identifier: Apache-2.0
"""Groups of several ranks, as users meet them: the same text as with one rank, and no request lost with a rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mii_zmq as mii
from mii_zmq.errors import InternalError, ServiceError
from mii_zmq.protocol import Verb
from mii_zmq.worker.fake_model import FakeModel
from mii_zmq.worker.plan import SequenceRequest
from tests.worker.scripted_broker import staged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GREEDY: dict[str, Any] = {"do_sample": False, "ignore_eos": True}
PROMPTS = ["The quick brown fox", "你好，世界！", "def f(x):\n    return", "a", "1 2 3 4 5 6 7 8 9 10" * 6]


VECTORS: list[list[float]] = []
"""What one rank makes of the prompts as embeddings."""


def expected_text(prompt: str, max_new_tokens: int) -> str:
    return bytes(FakeModel().generate(SequenceRequest(0, list(prompt.encode()), max_new_tokens))).decode()


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def seconds_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s
        time.sleep(0.01)
    return time.monotonic() - start


def ready_groups(client: mii.MIIClient) -> list[dict[str, Any]]:
    """What the broker knows of them."""
    deployments = client.status()["broker"]["deployments"]
    groups = deployments["d"]["groups"] if "d" in deployments else []
    return [{**group["info"], "load": group["load"]} for group in groups if group["state"] == "ready"]


def wait_for_info(
    client: mii.MIIClient, accept: Callable[[dict[str, Any]], bool], num_groups: int = 1
) -> dict[str, Any]:
    """Of one group, when so many are there and all are as wanted."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = ready_groups(client)
        return len(found) == num_groups and all(map(accept, found))

    seconds_until(is_there)
    return found[0]


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Iterator[list[str]]:
    """What one rank makes of the prompts: greedy, then drawn."""
    with mii.pipeline(str(tiny_model), kv_cache_gb=0.05) as pipe:
        VECTORS.extend(pipe.embed(PROMPTS, pooling="mean"))
        yield texts_of(pipe)


def texts_of(model: Any) -> list[str]:
    greedy = model(PROMPTS, max_new_tokens=24, **GREEDY)
    drawn = model(PROMPTS, max_new_tokens=24, ignore_eos=True, do_sample=True, temperature=0.8, top_k=20, seed=11)
    return [response.generated_text for response in [*greedy, *drawn]]


@pytest.mark.usefixtures("deployments")
def test_two_ranks_write_what_one_writes(tiny_model: Path, alone: list[str]) -> None:
    with mii.pipeline(str(tiny_model), kv_cache_gb=0.05, tensor_parallel=2) as pipe:
        assert texts_of(pipe) == alone
        for found, expected in zip(pipe.embed(PROMPTS, pooling="mean"), VECTORS, strict=True):
            assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("deployments")
def test_a_deployment_of_a_model_survives_the_loss_of_a_rank(tiny_model: Path, alone: list[str]) -> None:
    client = mii.serve(str(tiny_model), deployment_name="d", tensor_parallel=2, kv_cache_gb=0.05)
    try:
        assert texts_of(client) == alone
        prompts = PROMPTS * 2
        expected = [response.generated_text for response in client.generate(prompts, max_new_tokens=200, **GREEDY)]
        before = wait_for_info(client, lambda info: True)
        (rank_1,) = before["rank_pids"]
        with ThreadPoolExecutor(len(prompts)) as threads:
            work = [threads.submit(client.generate, prompt, max_new_tokens=200, **GREEDY) for prompt in prompts]
            wait_for_info(client, lambda info: info["load"].get("running", 0) > 0)
            os.kill(rank_1, signal.SIGKILL)
            seconds_until(lambda: not is_running(before["engine_pid"]))
        after = wait_for_info(client, lambda info: info["engine_pid"] != before["engine_pid"])
        assert after["rank_pids"] != before["rank_pids"]
        for text, future in zip(expected, work, strict=True):
            # Torch may take longer to come up on a busy machine than the broker keeps requests waiting.
            error = future.exception()
            assert error.retryable if isinstance(error, ServiceError) else future.result()[0].generated_text == text
        assert texts_of(client) == alone
    finally:
        client.terminate_server()


@pytest.mark.usefixtures("deployments")
def test_no_request_is_lost_with_a_rank() -> None:
    # Two groups, since requests wait for a deployment's only one for a time in which a busy machine may not start it.
    client = mii.serve("fake:step_ms=5", deployment_name="d", tensor_parallel=2, replica_num=2)
    try:
        for victim in range(2):
            info = wait_for_info(client, lambda info: all(map(is_running, info["rank_pids"])), num_groups=2)
            pid = [info["engine_pid"], *info["rank_pids"]][victim]
            with ThreadPoolExecutor(16) as threads:
                # For several heartbeats, which tell that they run.
                work = [threads.submit(client.generate, f"p{i}", max_new_tokens=300, **GREEDY) for i in range(16)]
                wait_for_info(client, lambda info: info["load"].get("running", 0) > 0, num_groups=2)
                os.kill(pid, signal.SIGKILL)
                everyone = [info["engine_pid"], *info["rank_pids"]]
                seconds_until(lambda: not any(map(is_running, everyone)))  # noqa: B023
                assert [future.result()[0].generated_text for future in work] == [
                    expected_text(f"p{i}", 300) for i in range(16)
                ]
    finally:
        client.terminate_server()


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
async def test_a_lost_rank_ends_its_group_with_a_reason(run_directory: Path, how: signal.Signals) -> None:
    async with staged("fake:step_ms=5", "--tensor-parallel=2") as stage:
        (rank_1,) = stage.ready["info"]["rank_pids"]
        stage.broker.generate(1, ignore_eos=True, max_new_tokens=8000)
        await stage.broker.take(Verb.TOKENS)
        os.kill(rank_1, how)
        message = await stage.broker.skip_to(Verb.DISCONNECT)
        assert "rank 1" in message.header["reason"]
        assert await stage.exit_code() == 1
        seconds_until(lambda: not is_running(rank_1))
    assert os.listdir(run_directory) == []


def test_a_pipeline_says_that_it_lost_a_rank(run_directory: Path) -> None:
    with mii.pipeline("fake:step_ms=5", tensor_parallel=2) as pipe:
        (rank_1,) = children_of(os.getpid(), "--rank=1")
        threading.Timer(0.2, os.kill, (rank_1, signal.SIGKILL)).start()
        for _ in range(2):
            with pytest.raises(InternalError, match="rank 1 was killed by SIGKILL.*make a new pipeline"):
                pipe("hello", max_new_tokens=8000, ignore_eos=True)
    assert not list(run_directory.iterdir())


def children_of(parent: int, argument: str) -> list[int]:
    pids = [pid for path in Path(f"/proc/{parent}/task").glob("*/children") for pid in path.read_text().split()]
    return [int(pid) for pid in pids if argument.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
