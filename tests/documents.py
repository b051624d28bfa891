# SPDX-License-Identifier: Apache-2.0
"""The code in the documents: fenced blocks with their marks, commands in running text, and how a block is run.

A block is run as it stands, but for what depends on the reader's machine: ports, addresses, names of models and
directories. Commands that serve until they are ended run in the background while the rest of their block is run, and
must end with exit code 0.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.stack import unused_port

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PATIENCE_S = 180.0
_FENCE = re.compile(r"(?:<!-- run by (?P<runner>\S+) -->\n)?^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
_SERVERS = re.compile(r"python -m mii_zmq(\.broker|\.gateway|\.worker| serve)\b|scripts/(run|worker)\b")
_READY = {
    " serve ": re.compile(r"^End it: Ctrl-C", re.M),
    "scripts/run": re.compile(r"^First request, answered .*\n.*\n", re.M),
    "": re.compile(r"\] ready: |^group \S+ serves ", re.M),
}
"""What the first of these prints whose name is in the command."""


@dataclass(frozen=True)
class Block:
    """A fenced block: the info string says its language, and perhaps what it needs that is not everywhere."""

    page: str
    number: int
    language: str
    needs: tuple[str, ...]
    text: str
    runner: str | None
    """A test file that runs it."""

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks() -> Iterator[Block]:
    """Of all pages, numbered from 1 on each of them."""
    for page in PAGES:
        for number, found in enumerate(_FENCE.finditer(page.read_text(encoding="utf-8")), start=1):
            language, *needs = found["info"].split() or [""]
            yield Block(page.name, number, language, tuple(needs), found["text"], found["runner"])


def without_blocks(page: Path) -> str:
    """The running text of a page, with the blocks that are set apart by four spaces."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(text: str) -> list[str]:
    """The commands of a shell block, each on one or several lines."""
    found: list[str] = []
    pending = ""
    for line in text.splitlines():
        pending += line
        if is_open(pending):
            pending += "\n"
            continue
        found += [part for part in re.split(r"\s&&\s", pending) if shlex.split(part, comments=True)]
        pending = ""
    assert not pending, f"a command does not end: {pending}"
    return found


def is_open(text: str) -> bool:
    """Whether a command goes on in the next line."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return text.endswith("\\")


@dataclass
class Reader:
    """Somebody who types what a page says, in a directory of their own with the repository's scripts and documents."""

    directory: Path
    substitute: Callable[[str], str]
    """Puts in what depends on the machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    servers: list[tuple[str, subprocess.Popen[bytes], Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        programs = self.directory / "bin"
        programs.mkdir()
        (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (programs / "python").chmod(0o755)
        (self.directory / ".curlrc").write_text("fail-with-body\n")  # otherwise an error of the server's is no error
        for name in ("scripts", "docs", "tests", "pyproject.toml", "mii_zmq"):
            (self.directory / name).symlink_to(ROOT / name)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "PYTHON": sys.executable,  # for the scripts: nothing is installed
            "CURL_HOME": str(self.directory),
            **self.environment,
        }

    def run(self, block: Block) -> str:
        """Everything that a block says; returns what was printed."""
        text = self.substitute(block.text)
        if block.language == "python":
            script = Path(tempfile.mkstemp(suffix=".py", dir=self.directory)[1])
            script.write_text(text)
            return self.finish(f"python {script.name}")
        printed = ""
        for command in commands(text):
            if command.startswith("export "):
                name, _, value = command.removeprefix("export ").partition("=")
                self.environment = {**self.environment, name: value}
            elif _SERVERS.match(command):
                self.start(command)
            else:
                self.need(shlex.split(command)[0])
                printed += self.finish(command)
        for command, process, log in self.servers:
            assert process.poll() is None, f"{command} has ended: {log.read_text()}"
        return printed

    def need(self, program: str) -> None:
        """Skip what takes a program that is not here."""
        if subprocess.run(["which", program], env=self.environment, cwd=self.directory, capture_output=True).returncode:
            pytest.skip(f"needs {program}")

    def finish(self, command: str) -> str:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=self.directory, env=self.environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            printed = process.communicate(timeout=PATIENCE_S)[0].decode()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        assert process.returncode == 0, f"{command}\n{printed}"
        return printed

    def start(self, command: str) -> str:
        """Run it in the background until `close`; returns what it printed up to being ready."""
        log = Path(tempfile.mkstemp(suffix=".log", dir=self.directory)[1])
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.directory, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.servers.append((command, process, log))
        deadline = time.monotonic() + PATIENCE_S
        ready = next(pattern for name, pattern in _READY.items() if name in f"{command} ")
        while not ready.search(log.read_text()):
            assert process.poll() is None, f"{command} has ended: {log.read_text()}"
            assert time.monotonic() < deadline, f"{command} is not ready: {log.read_text()}"
            time.sleep(0.02)
        return log.read_text()

    def close(self) -> None:
        """End what serves, the last one first; all must end well."""
        codes = {}
        for command, process, _ in reversed(self.servers):
            process.send_signal(signal.SIGINT if " serve " in command or "scripts/run" in command else signal.SIGTERM)
            codes[command] = process.wait(PATIENCE_S)
        assert not any(codes.values()), codes


def own_ports(text: str) -> str:
    """A site of the block's own: what would listen where the documents say listens elsewhere, on loopback."""
    clients, workers, http = unused_port(), unused_port(), unused_port()
    text = re.sub(r"//(0\.0\.0\.0|BROKER)\b", "//127.0.0.1", text).replace("--host 0.0.0.0", "--host 127.0.0.1")
    for default, port in (("50050", clients), ("50051", workers), ("28080", http)):
        text = text.replace(default, str(port))
    options = {
        ".broker": f" --client-endpoint tcp://127.0.0.1:{clients} --worker-endpoint tcp://127.0.0.1:{workers}",
        ".gateway": f" --brokers tcp://127.0.0.1:{clients}",
        "scripts/worker": f" --brokers tcp://127.0.0.1:{workers}",
        " serve": f" --port {http}",
    }
    lines = text.split("\n")
    for index, line in enumerate(lines):
        command, sharp, comment = line.partition(" #")
        for name, option in options.items():
            if name in command and _SERVERS.search(command) and option.split()[0] not in command:
                command = command.rstrip() + option
        lines[index] = command + sharp + comment
    return "\n".join(lines)
