# SPDX-License-Identifier: Apache-2.0
"""The clients printed in PROTOCOL.md, run as they stand against a broker and a scripted worker."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from pathlib import Path

import pytest

from mii_zmq.errors import PromptTooLong
from mii_zmq.protocol import GenerateBody, TokenDelta, Verb, parse_body
from tests.broker.peers import Worker, open_site

PAGE = Path(__file__).parents[2] / "PROTOCOL.md"


def example(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == 1
    return str(found[0])


async def run(*command: str, cwd: Path, timeout_s: float = 60) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode()


async def stream(worker: Worker, words: list[str]) -> None:
    message = await worker.wait_for(Verb.GENERATE)
    assert parse_body(message, GenerateBody).prompt == "Grüße"
    for seq, word in enumerate(words):
        row = TokenDelta(message.request_id, seq, seq, bytes(4), word.encode(), None)
        await worker.emit(message.header["client"], row)
    await worker.finish(message.request_id)


@pytest.mark.slow
async def test_one_shot_client(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        worker = site.worker()
        await worker.register("my-model")
        code = example("python").replace("tcp://127.0.0.1:50050", site.broker.client_endpoint)
        client = asyncio.create_task(run(sys.executable, "-c", code, cwd=tmp_path))
        message = await worker.wait_for(Verb.GENERATE)
        assert parse_body(message, GenerateBody).params == {"max_new_tokens": 32}
        await worker.finish(message.request_id, "fast")
        assert await client == (0, "fast\n")
        client = asyncio.create_task(run(sys.executable, "-c", code, cwd=tmp_path))
        message = await worker.wait_for(Verb.GENERATE)
        await worker.send(Verb.ERROR, message.request_id, PromptTooLong("too long").to_wire())
        assert await client == (0, "error: too long\n")


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_node_client(tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("needs node and npm")
    (tmp_path / "stream.mjs").write_text(example("javascript"))
    code, output = await run(
        npm, "install", "--no-audit", "--no-fund", "zeromq@6", "@msgpack/msgpack@3", cwd=tmp_path, timeout_s=300
    )
    if code:
        pytest.skip(f"npm could not install the packages: {output[-300:]}")
    async with open_site(tmp_path) as site:
        worker = site.worker()
        await worker.register()
        script = (node, "stream.mjs", site.broker.client_endpoint)
        client = asyncio.create_task(run(*script, "m", "Grüße", cwd=tmp_path))
        await stream(worker, ["Hé", "llo", " 👩‍🚀"])
        assert await client == (0, "Héllo 👩‍🚀\n[stop]\n")
        code, output = await run(*script, "nope", "x", cwd=tmp_path)
        assert code == 1
        assert output.startswith("unknown_deployment: deployment 'nope' is unknown; known: m")
