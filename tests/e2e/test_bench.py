# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark against a deployment with the fake engine, as a user runs it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import mii_zmq as mii
from mii_zmq import cli

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("deployments")]
PAGE = Path(__file__).parents[2] / "docs" / "benchmarking.md"


@pytest.fixture
def client() -> Iterator[mii.MIIClient]:
    client = mii.serve("fake:", deployment_name="d", enable_restful_api=True, restful_api_port=0)
    yield client
    client.terminate_server()


def documented_commands(url: str) -> list[list[str]]:
    """The arguments of every `bench` in the page's bash blocks, but for those marked `gpu`."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [line.replace("http://HOST:PORT", url).replace("NAME", "d") for line in lines if "mii_zmq bench" in line]
    return [shlex.split(command)[3:] for command in commands]


def test_a_sweep_failures_and_the_documented_commands(
    client: mii.MIIClient, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--num-prompts", "12", "--input-len", "60", "--output-len", "8", "--range-ratio", "0.5"]
    assert cli.main(["bench", *sizes, "--concurrency", "1", "4", "--ignore-eos", "--save-result", "r.json"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("model d at http://127.0.0.1:")
    assert "concurrency 4: 12 of 12 done" in printed.err
    for level in json.loads((tmp_path / "r.json").read_text())["levels"]:
        assert (level["completed"], level["failed"], level["without_usage"]) == (12, 0, 0)
        assert 12 * 30 <= level["total_input_tokens"] <= 12 * 90
        assert 12 * 4 <= level["total_output_tokens"] <= 12 * 12

    # Longer than the model's context: every request is refused, which is a result with an exit code.
    assert cli.main(["bench", "--num-prompts", "2", "--input-len", "9000", "--num-warmups", "0"]) == 1
    assert "FAILED: 2 x HTTP 400; for example: prompt has 9000 tokens" in capsys.readouterr().out

    monkeypatch.setenv("BENCH_KEY", "secret")
    # Drawing takes longer than all the rest, and has a test of its own.
    for arguments in documented_commands(client.status()["rest_url"]):
        without_plots = [word for word in arguments if word not in ("--plot-dir", "plots")]
        assert cli.main(without_plots) == 0, arguments
    assert capsys.readouterr().out.count("model d at http") == 7
