# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: processes, exit codes, what is printed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mii_zmq import cli

COMMAND = [sys.executable, "-m", "mii_zmq"]


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=100, check=False)


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """A `serve` in the foreground; yields what it has printed up to its last line when ready."""
    with subprocess.Popen(
        [*COMMAND, "serve", "fake:", "--port", "0", *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if line.startswith("End it"):
                break
        try:
            yield printed
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


@pytest.mark.parametrize("command", [(), ("serve",), ("chat",), ("status",), ("top",), ("stop",)])
def test_help_names_every_option_with_its_meaning(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "--help"])
    printed = capsys.readouterr().out
    assert "usage: python -m mii_zmq" in printed
    if command == ("serve",):
        for option in ("--replicas", "--port", "--host", "--deployment-name", "--token-budget", "--dtype"):
            assert option in printed


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["serve", "/nowhere/model"], "/nowhere/model"),
        (["serve", "fake:", "--tensor-parallel", "0"], "tensor_parallel is 0"),
        (["serve", "fake:", "--host", "0.0.0.0"], "--insecure"),
        (["serve", "fake:", "--block-size", "48"], "power of two"),
        (["serve", "fake:", "--deployment-name", "a b"], "deployment name"),
        (["stop", "nobody"], "no deployment 'nobody' runs on this host"),
        (["status", "nobody"], "no deployment 'nobody' runs on this host"),
        (["chat", "--deployment", "nobody"], "no deployment 'nobody'"),
        (["chat", "--url", "http://127.0.0.1:1"], "cannot reach http://127.0.0.1:1"),
        (["chat", "--url", "nonsense"], "cannot reach nonsense"),
    ],
)
def test_errors_are_one_line_and_a_code(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 1
    printed = capsys.readouterr().err.strip().splitlines()
    assert printed[-1].startswith("error: ")
    assert error in printed[-1]
    assert not any("Traceback" in line for line in printed)


def test_an_option_of_a_command_is_found_among_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", "fake:", "--potr", "1"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "python -m mii_zmq serve: error: unknown argument '--potr'; did you mean --port?"


def test_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert "no deployment runs on this host" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("deployments")
def test_a_served_model_from_all_sides() -> None:
    with served("--replicas", "2", "--deployment-name", "org/model") as printed:
        assert printed.count("READY") == 1
        (curl,) = re.findall(r"^  (curl .*)$", printed, re.MULTILINE)
        answer = json.loads(subprocess.check_output(["sh", "-c", curl], timeout=60))
        assert (answer[0]["generated_length"], answer[0]["finish_reason"]) == (32, "length")

        chat = run("chat", "--max-new-tokens", "5", stdin="hello\n\n/reset\nhello\n/exit\nnever\n")
        first, second = chat.stdout.splitlines()
        assert len(first) == 5
        assert first == second
        url = printed.partition("HTTP    ")[2].split()[0]
        over_http = run("chat", "--url", url, "--max-new-tokens", "5", stdin="hello\n")
        assert over_http.stdout == first + "\n"
        by_name = run("chat", "org/model", "--max-new-tokens", "5", stdin="hello\n")
        assert by_name.stdout == first + "\n"

        status = json.loads(run("status", "--json", "org/model").stdout)
        assert set(status["processes"]) == {"supervisor", "broker", "gateway", "worker 1", "worker 2"}
        assert len(status["broker"]["deployments"]["org/model"]["groups"]) == 2
        shown = run("status").stdout
        assert "org/model: fake:" in shown
        assert len(re.findall(r"^    \S+ +ready ", shown, re.MULTILINE)) == 2
        assert "org/model: ready" in run("top", "--once", "--interval", "0.1", "org/model").stdout


@pytest.mark.slow
@pytest.mark.usefixtures("deployments")
def test_the_first_request_is_sent_and_shown() -> None:
    with subprocess.Popen(
        [*COMMAND, "serve", "fake:", "--port", "0", "--first-request"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("First request, answered in"):
                break
            assert not line.startswith("The first request failed"), line
        (answer,) = json.loads(process.stdout.readline())
        assert answer["generated_length"] == 32
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("deployments")
def test_stop_ends_a_foreground_deployment() -> None:
    with subprocess.Popen([*COMMAND, "serve", "fake:", "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("End it"):
                break
        assert run("stop", "fake-mii-deployment").stdout == "ended fake-mii-deployment\n"
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("deployments")
def test_a_model_that_cannot_load_fails_serve_with_one_line() -> None:
    done = run("serve", "fake:bogus=1", "--port", "0")
    assert done.returncode == 1
    assert "READY" not in done.stdout
    assert done.stderr.strip().splitlines()[-1].startswith("error: worker 1: option 'bogus=1'")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_taken_port_fails_serve_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "fake:", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert re.fullmatch(r"error: cannot listen on 127.0.0.1:\d+: Address already in use; .*\n", done.stderr)


@pytest.mark.slow
def test_chat_loads_a_model_that_nobody_serves() -> None:
    done = run("chat", "fake:", "--max-new-tokens", "4", stdin="hello\n")
    assert (done.returncode, len(done.stdout)) == (0, 5)
    refused = run("chat", "fake:", "--max-new-tokens", "0", stdin="hello\n")
    assert refused.returncode == 1
    assert "error: max_new_tokens is 0" in refused.stderr


@pytest.mark.slow
def test_the_command_line_starts_without_torch_and_transformers() -> None:
    script = (
        "import sys, mii_zmq.cli, mii_zmq.launcher, mii_zmq.api\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'aiohttp') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


@pytest.mark.slow
def test_a_closed_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*COMMAND, "status"], stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert b"Traceback" not in done.stderr
