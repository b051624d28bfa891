# SPDX-License-Identifier: Apache-2.0
"""The official `openai` package for Node, unchanged, against our gateway: the cases are in openai_sdk.test.mjs.

Needs node 20 or newer and npm, which fetches the package from its registry; skipped without them. To run them by hand,
against any deployment: `npm install openai`, then

    BASE_URL=http://localhost:28080 MODEL=NAME node --test --test-name-pattern=engine tests/e2e/openai_sdk.test.mjs
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mii_zmq.config import GatewayConfig
from mii_zmq.errors import Overloaded, WorkerLost
from mii_zmq.gateway.app import listen, make_app, make_runner, open_door
from tests.gateway.fake_client import FakeClient, FakeGeneration
from tests.gateway.test_official_clients import ANSWER
from tests.stack import Stack

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

CASES = Path(__file__).with_name("openai_sdk.test.mjs")
OLDEST = (20, 6)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package and the cases."""
    found, npm = shutil.which("node"), shutil.which("npm")
    if found is None or npm is None:
        pytest.skip("needs node and npm")
    version = subprocess.check_output([found, "--version"], text=True, timeout=60)
    if tuple(map(int, version.removeprefix("v").split(".")[:2])) < OLDEST:
        pytest.skip(f"needs node 20.6 or newer, this is {version.strip()}")
    directory = tmp_path_factory.mktemp("node")
    command = [npm, "install", "--no-audit", "--no-fund", "openai"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"npm could not install the package: {done.stderr[-300:]}")
    shutil.copy(CASES, directory)
    return directory


async def run(directory: Path, suite: str, url: str, model: str) -> str:
    """Node's report; fails when a case failed or none ran."""
    process = await asyncio.create_subprocess_exec(
        "node", "--test", f"--test-name-pattern={suite}", CASES.name,
        cwd=directory, env={**os.environ, "BASE_URL": url, "MODEL": model},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    report = output.decode()
    assert process.returncode == 0, report
    return report


async def test_against_a_fake_engine(node: Path) -> None:
    stack = Stack()
    try:
        stack.start_group("g", "fake:step_ms=2,max_model_len=8192")
        report = await run(node, "engine", stack.start_gateway(), "m")
    finally:
        stack.close()
    assert "# pass 10\n" in report, report


@pytest.fixture
async def scripted() -> AsyncIterator[str]:
    """The address of a gateway whose model calls its tool, is busy at first or breaks, as the prompt wants it."""
    refusals = iter((True, True, False))

    def answer(generation: FakeGeneration) -> None:
        message = (generation.body.messages or [])[-1]
        if message["content"] == "BUSY" and next(refusals):
            generation.fail(Overloaded("the queue is full", retry_after_ms=50))
        elif message["content"] == "BREAK":
            generation.push("half ", "an")
            generation.fail(WorkerLost("the group is gone"))
        else:
            text = f"It is {message['content']}." if message["role"] == "tool" else ANSWER
            text = "At last." if message["content"] == "BUSY" else text
            generation.push(*(text[at : at + 4] for at in range(0, len(text), 4)))
            generation.finish("stop")

    broker = FakeClient()
    broker.answer = answer
    listener = listen("127.0.0.1", 0)
    runner = make_runner(make_app(GatewayConfig(port=0), broker))
    await runner.setup()
    door = await open_door(runner, listener)
    host, port = listener.getsockname()
    yield f"http://{host}:{port}"
    await door.close()
    await runner.cleanup()


async def test_the_documented_example(node: Path, scripted: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "endpoints.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```javascript\n(.*?)```", page, re.DOTALL)
    text = example.replace("http://localhost:28080", scripted).replace("MODEL", "fake").replace("Hi!", "BUSY")
    (node / "example.mjs").write_text(text)
    process = await asyncio.create_subprocess_exec("node", "example.mjs", cwd=node, stdout=subprocess.PIPE)
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert (process.returncode, output) == (0, b"At last.")


async def test_against_scripted_answers(node: Path, scripted: str) -> None:
    report = await run(node, "scripted", scripted, "fake")
    assert "# pass 5\n" in report, report
