# SPDX-License-Identifier: Apache-2.0
"""`serve`, `client` and the doors of a deployment with the fake engine, whose text is known beforehand."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import mii_zmq as mii
from mii_zmq import cli
from mii_zmq.embeddings import values_of
from mii_zmq.errors import InvalidRequest, PromptTooLong, ServiceError
from mii_zmq.registry import Registry, process_identity
from mii_zmq.worker.embedding import shape_vector
from mii_zmq.worker.fake_model import EOS_TOKEN_ID, FakeModel
from mii_zmq.worker.fake_options import HIDDEN_SIZE
from mii_zmq.worker.plan import SamplingSpec, SequenceRequest
from tests.ctrl_c import interrupted_when

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("deployments")]


@pytest.fixture
def client(deployments: Path) -> Iterator[mii.MIIClient]:
    client = mii.serve(
        "fake:step_ms=2", deployment_name="d", replica_num=2, enable_restful_api=True, restful_api_port=0
    )
    yield client
    client.terminate_server()


def expected_text(prompt: str, max_new_tokens: int) -> str:
    sampling = SamplingSpec(stop_token_ids=(EOS_TOKEN_ID,))
    return bytes(FakeModel().generate(SequenceRequest(0, list(prompt.encode()), max_new_tokens, sampling))).decode()


def post(client: mii.MIIClient, body: Any) -> tuple[int, Any]:
    url = f"{client.status()['rest_url']}/mii/{client.deployment}"
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def wait_for_groups(
    client: mii.MIIClient, condition: Callable[[dict[str, dict[str, Any]]], bool], timeout_s: float = 60.0
) -> None:
    """Until the groups (by name), as the broker knows them from their heartbeats, are as wanted."""
    deadline = time.monotonic() + timeout_s
    while True:
        listed = client.status()["broker"]["deployments"]["d"]["groups"]
        groups = {group["group"]: group for group in listed}
        if condition(groups):
            return
        assert time.monotonic() < deadline, groups
        time.sleep(0.05)


def wait_until_idle(client: mii.MIIClient) -> None:
    def is_idle(groups: dict[str, dict[str, Any]]) -> bool:
        loads = [group["load"] for group in groups.values()]
        return all(
            group["num_requests"] == load["running"] == load["waiting"] == load["used_blocks"] == 0
            for group, load in zip(groups.values(), loads, strict=True)
        )

    wait_for_groups(client, is_idle)


def test_every_way_of_asking_gives_the_same_text(client: mii.MIIClient) -> None:
    prompts = ["DeepSpeed is", "Seattle is", "né 👩‍🚀"]
    texts = [expected_text(prompt, 20) for prompt in prompts]
    responses = client.generate(prompts, max_new_tokens=20)
    assert [r.generated_text for r in responses] == texts
    assert [(r.prompt_length, r.generated_length, r.finish_reason) for r in responses[:2]] == [
        (12, 20, "length"),
        (10, 20, "length"),
    ]
    assert [r.generated_text for r in client("a", n=2, max_new_tokens=5)] == [expected_text("a", 5)] * 2

    calls: list[list[mii.Response]] = []
    client.generate(prompts[0], streaming_fn=calls.append, max_new_tokens=20)
    assert "".join(str(call[0]) for call in calls) == texts[0]
    assert [call[0].finish_reason for call in calls] == ["none"] * (len(calls) - 1) + ["length"]
    assert (calls[-1][0].generated_text, calls[-1][0].prompt_length, calls[-1][0].generated_length) == ("", 12, 20)

    status, answer = post(client, {"prompts": prompts, "max_new_tokens": 20})
    assert (status, [item["generated_text"] for item in answer]) == (200, texts)
    check_embeddings(client, prompts)


def check_embeddings(client: mii.MIIClient, texts: list[str]) -> None:
    """Of the synchronous client, which calls from any thread, and of the asynchronous one."""

    def expected(text: str, pooling: str, dimensions: int | None, normalize: bool) -> list[float]:
        pooled = FakeModel().pool(list(text.encode()), pooling, HIDDEN_SIZE)
        return values_of(shape_vector(pooled, dimensions, normalize))

    async def embed() -> list[list[float]]:
        async with mii.async_client("d") as asynchronous:
            return await asynchronous.embed(texts)

    assert client.embed(texts) == asyncio.run(embed()) == [expected(text, "last", None, True) for text in texts]
    assert client.embed("hi", pooling="mean", dimensions=5, normalize=False) == [expected("hi", "mean", 5, False)]
    assert client.embed([104, 105]) == client.embed([[104, 105]]) == client.embed("hi")
    for wrong in ([], "", ["a", 5], [["a"]], ["\ud800"]):
        with pytest.raises(InvalidRequest):
            client.embed(wrong)
    with pytest.raises(InvalidRequest, match="allowed: 1 to 32"):
        client.embed("hi", dimensions=33)


def test_log_probabilities_are_the_same_at_every_door(client: mii.MIIClient) -> None:
    prompts, options = ["DeepSpeed is", "né 👩‍🚀"], {"max_new_tokens": 12, "logprobs": 2, "prompt_logprobs": 1}
    responses = client.generate(prompts, **options)
    with mii.pipeline("fake:") as pipe:
        assert pipe(prompts, **options) == responses
    assert responses[0].prompt_logprobs is not None
    assert responses[0].prompt_logprobs[0] is None

    parts = list(client.stream(prompts[1], **options))
    assert [record for part in parts for record in part.logprobs or ()] == responses[1].logprobs
    assert parts[0].prompt_logprobs == responses[1].prompt_logprobs
    assert all(part.prompt_logprobs is None for part in parts[1:])

    _, answer = post(client, {"prompts": prompts, **options})
    for response, item in zip(responses, answer, strict=True):
        ours = [(list(e.text), e.logprob) for record in response.logprobs or () for e in (record.chosen, *record.top)]
        theirs = [entry for place in item["logprobs"] for entry in (place, *place["top_logprobs"])]
        assert [(entry["bytes"], entry["logprob"]) for entry in theirs] == ours
        assert len(item["prompt_logprobs"]) == len(response.prompt_logprobs or ())
        for found, record in zip(item["prompt_logprobs"][1:], (response.prompt_logprobs or ())[1:], strict=True):
            assert record is not None
            assert {int(key): (value["logprob"], value["rank"]) for key, value in found.items()} == {
                entry.token_id: (entry.logprob, entry.rank) for entry in (*record.top, record.chosen)
            }


def test_many_threads_use_one_client(client: mii.MIIClient) -> None:
    def call(index: int) -> str:
        return client.generate(f"thread {index}", max_new_tokens=30)[0].generated_text

    with ThreadPoolExecutor(32) as threads:
        texts = list(threads.map(call, range(64)))
    assert texts == [expected_text(f"thread {index}", 30) for index in range(64)]
    (many,) = [client.generate([f"prompt {index}" for index in range(3000)], max_new_tokens=2)]
    assert [r.generated_text for r in many] == [expected_text(f"prompt {index}", 2) for index in range(3000)]
    wait_for_groups(client, lambda groups: all(group["load"]["generated_tokens"] > 0 for group in groups.values()))
    wait_until_idle(client)


async def test_clients_inside_an_event_loop(client: mii.MIIClient) -> None:
    # The synchronous one too: it blocks this loop, but needs none.
    assert client.generate("a", max_new_tokens=3)[0].generated_text == expected_text("a", 3)
    async with mii.async_client("d") as other:
        generations = [other.generate([f"a{index}", "b"], max_new_tokens=10) for index in range(8)]
        for index, (first, second) in enumerate(await asyncio.gather(*generations)):
            assert first.generated_text == expected_text(f"a{index}", 10)
            assert second.generated_text == expected_text("b", 10)
        parts = [part async for part in other.stream("hello", max_new_tokens=10)]
        assert "".join(map(str, parts)) == expected_text("hello", 10)
        assert (await other.status())["deployment"] == "d"
        task = asyncio.create_task(other.generate("hello", max_new_tokens=8000))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in other.stream("hello", max_new_tokens=8000):
            break
    await asyncio.to_thread(wait_until_idle, client)


def test_wrong_requests_at_all_doors(client: mii.MIIClient) -> None:
    for arguments, error in [
        ({"prompts": ""}, InvalidRequest),
        ({"prompts": "\ud800"}, InvalidRequest),
        ({"prompts": "x" * 9000}, PromptTooLong),
        ({"prompts": "a", "max_new_tokens": 0}, InvalidRequest),
        ({"prompts": "a", "stop_token_ids": [100_000]}, InvalidRequest),
        ({"prompts": "a", "tempreature": 1}, InvalidRequest),
    ]:
        with pytest.raises(error):
            client.generate(**arguments)
    nested = b'{"prompts": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for body in [{"prompts": ""}, {"prompts": 5}, {}, {"prompts": "a", "top_p": 2}, b"{", b"[]", nested]:
        status, answer = post(client, body)
        assert 400 <= status < 500
        assert set(answer) == {"message"}
    assert client.generate("a", max_new_tokens=2)[0].generated_text == expected_text("a", 2)


def test_an_abandoned_stream_frees_its_blocks(client: mii.MIIClient) -> None:
    stream = client.stream("hello", max_new_tokens=8000)
    next(stream)
    stream.close()
    wait_until_idle(client)

    def is_running() -> bool:
        groups = client.status()["broker"]["deployments"]["d"]["groups"]
        return sum(group["load"]["running"] for group in groups) == 2

    with interrupted_when(is_running):
        client.generate(["a", "b"], max_new_tokens=8000)
    wait_until_idle(client)


def test_groups_come_and_go(client: mii.MIIClient) -> None:
    endpoint = client.status()["worker_endpoints"][0]
    arguments = ["--model", "fake:step_ms=2", "--deployment", "d", "--brokers", endpoint, "--group", "third"]
    with ExitStack() as at_end:
        third = subprocess.Popen([sys.executable, "-m", "mii_zmq.worker", *arguments], stdout=subprocess.PIPE)
        at_end.enter_context(third)
        at_end.callback(third.kill)
        assert third.stdout is not None
        assert b"group third serves d" in third.stdout.readline()
        assert len(client.generate(["x"] * 60, max_new_tokens=20)) == 60
        wait_for_groups(client, lambda groups: groups["third"]["load"]["generated_tokens"] > 0)
        # Drained while it works: nothing fails.
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(client.generate, [f"p{index}" for index in range(60)], max_new_tokens=100)
            third.send_signal(signal.SIGTERM)
            assert [r.generated_text for r in running.result()] == [expected_text(f"p{i}", 100) for i in range(60)]
        assert third.wait(60) == 0
    # Killed: requests go on behind the tokens that were delivered, or start anew elsewhere.
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(client.generate, [f"q{index}" for index in range(60)], max_new_tokens=100)
        record = Registry().find("d")
        assert record is not None
        os.kill(record.processes["worker 1"], signal.SIGKILL)
        assert [r.generated_text for r in running.result()] == [expected_text(f"q{i}", 100) for i in range(60)]


def test_any_process_ends_a_deployment_with_everything_in_it(client: mii.MIIClient, deployments: Path) -> None:
    pids = client.status()["processes"].values()
    script = "import mii_zmq as mii; mii.client('d').terminate_server()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert not [pid for pid in pids if process_identity(pid)]
    assert not list(deployments.iterdir())
    with pytest.raises(mii.DeploymentNotFoundError):
        mii.client("d")
    client.terminate_server()
    with pytest.raises(ServiceError, match="closed"):
        client.generate("a")


def test_two_deployments_with_default_settings() -> None:
    with mii.serve("fake:", deployment_name="one", enable_restful_api=True) as one:
        try:
            with mii.serve("fake:", deployment_name="two", enable_restful_api=True) as two:
                assert one.status()["rest_url"] != two.status()["rest_url"]
                for client in (one, two):
                    assert post(client, {"prompts": "a", "max_new_tokens": 1})[0] == 200
                two.terminate_server()
        finally:
            one.terminate_server()


def test_a_model_is_found_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with mii.serve("fake:") as client:
        assert client.deployment == "fake-mii-deployment"
        assert cli.main(["top", "--once", "--interval", "0.1", "fake:"]) == 0  # no gateway: over ZeroMQ
        assert "fake-mii-deployment: ready" in capsys.readouterr().out
        with mii.client("fake:") as other:
            other.terminate_server()
